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
         # rdma (each GPU was to send {} GB/s to other workers; without rdma KV travels over TCP), resources of the workers.\n\
         model:\n  path: {}\nkv:\n  blockSize: {}\n{}\
         router:\n  slo:\n    ttftMilliseconds: {}\n    tpotMilliseconds: {}\n{}{}",
        args.model,
        args.gpus,
        args.device,
        args.link,
        // JSON's strings are YAML's.
        serde_json::Value::from(format!("/models/{}", name_of(&args.model))),
        args.block_size,
        args.host_kv.map(|gibibytes| format!("  host:\n    size: {gibibytes}G\n")).unwrap_or_default(),
        milliseconds(args.slo_ttft),
        milliseconds(args.slo_tpot),
        worker("prefill", num_prefill),
        worker("decode", num_decode)
    )
}

/// Whole milliseconds, and at least one: for the chart 0 is no target.
fn milliseconds(seconds: f64) -> u64 {
    (1e3 * seconds).round().max(1.0) as u64
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
    fn a_target_is_never_no_target() {
        assert_eq!([2.0, 0.05, 0.0001].map(milliseconds), [2000, 50, 1]);
    }

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
