//! A deployment as values of the Helm chart.

use std::path::Path;

use super::{args::PlanArgs, deployment::Deployment};

/// Values for `helm/baton`. Paths and images are the user's.
pub(super) fn helm_values(args: &PlanArgs, deployment: &Deployment) -> String {
    let Deployment { tensor_parallel, num_prefill, num_decode, token_budget, max_running, .. } = deployment;
    let worker = |role: &str, num_replicas: &usize| {
        format!(
            "{role}:\n  replicas: {num_replicas}\n  gpus: {tensor_parallel}\n  tokenBudget: {token_budget}\n  \
             maxRunning: {max_running}\n"
        )
    };
    format!(
        "# By baton plan, for {} on {} x {}. Also set: image (of deploy/Dockerfile --target cuda), model.volume,\n\
         # resources of the workers.\n\
         model:\n  path: {}\nkv:\n  blockSize: {}\n{}{}{}",
        args.model,
        args.gpus,
        args.device,
        // JSON's strings are YAML's.
        serde_json::Value::from(format!("/models/{}", name_of(&args.model))),
        args.block_size,
        args.host_kv.map(|gibibytes| format!("  host:\n    size: {gibibytes}G\n")).unwrap_or_default(),
        worker("prefill", num_prefill),
        worker("decode", num_decode)
    )
}

/// The name of a model: of its directory, where it is given by a path.
fn name_of(model: &str) -> String {
    let path = Path::new(model);
    let dir =
        if path.extension().is_some_and(|extension| extension == "json") { path.parent() } else { None };
    let name = dir.unwrap_or(path).file_name().unwrap_or_default().to_string_lossy();
    if name.is_empty() { "model".to_owned() } else { name.into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_named_by_their_directories() {
        for (model, name) in [
            ("llama-70b", "llama-70b"),
            ("/models/Qwen3-8B", "Qwen3-8B"),
            ("/models/Qwen3-8B/config.json", "Qwen3-8B"),
            ("config.json", "model"),
        ] {
            assert_eq!(name_of(model), name, "{model}");
        }
    }
}
