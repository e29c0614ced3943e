//! What a worker says of its speed: the prior of its steps, from the model's shape and the device's profile, and which
//! processors compute for it.

use std::path::Path;

use anyhow::Context;
use baton_cluster::Compute;
use baton_cost::{DeviceProfile, ModelShape, StepLine, StepProfile, prior};
use baton_kv_cache::KvDtype;
use baton_model::{
    CpuList, DecoderSpec,
    cost::{ModelCost, TYPICAL_BATCH},
    cuda_device_name,
};

/// What a step takes before any was measured. `weight_bytes` are those in the memories of all ranks.
pub(crate) fn step_prior(
    spec: &DecoderSpec,
    weight_bytes: u64,
    kv_dtype: KvDtype,
    device: DeviceProfile,
) -> Option<StepLine> {
    // The size of a weight does not change counts of operations.
    let cost = ModelCost::new(spec, 1.0, kv_dtype);
    let part_read = cost.weight_bytes_of_step(TYPICAL_BATCH) / cost.weight_bytes() as f64;
    let shape = ModelShape {
        weight_bytes: weight_bytes as f64 * part_read,
        flops_per_token: cost.flops_per_token(),
        flops_per_pair: cost.flops_per_pair(),
        kv_bytes_per_token: cost.kv_bytes_of_ranks(device.num_devices) as f64,
        num_layers: spec.layers.len() as f64,
        sum_bytes_per_token: cost.sum_bytes_per_token(),
    };
    prior(&shape, &device).checked()
}

/// Reads what steps take from the JSON that `baton bench steps` writes, or says what is wrong with the file.
pub fn step_profile(path: &Path) -> anyhow::Result<StepLine> {
    let read = || {
        let profile: StepProfile = serde_json::from_slice(&std::fs::read(path)?)?;
        profile.step.checked().context("its step line cannot be true: a time is negative or above 1,000 s")
    };
    read()
        .with_context(|| format!("--step-profile {}: `baton bench steps --json` writes one", path.display()))
}

/// What a model computes on.
#[derive(Clone, Debug)]
pub(crate) struct Devices {
    /// All of them together.
    pub(crate) profile: DeviceProfile,
    /// As other workers know them.
    pub(crate) compute: Option<Compute>,
}

impl Devices {
    /// Threads of this machine's processors, pinned or not.
    pub(crate) fn processors(num_threads: usize, pinned: Option<CpuList>) -> Devices {
        let profile = DeviceProfile::of_processor(num_threads);
        Devices { profile, compute: processors(pinned) }
    }

    /// GPUs like that one, one for each rank.
    pub(crate) fn gpus(ordinal: u32, num_ranks: usize) -> Devices {
        let profile = DeviceProfile::of_gpu(&cuda_device_name(ordinal).unwrap_or_default()).times(num_ranks);
        Devices { profile, compute: unshared("cuda") }
    }
}

/// The processors that threads are pinned to, or all that this process may use. `None` where the system does not say.
fn processors(pinned: Option<CpuList>) -> Option<Compute> {
    let cpus = pinned.or_else(|| CpuList::allowed().ok())?;
    let units = cpus.numbers().iter().map(|&cpu| cpu as u32).collect();
    unshared("cpu").map(|compute| Compute { units, ..compute })
}

/// Devices of this machine that no other worker computes with, as far as is known. `None` where the system does not say which machine
/// it is.
pub(crate) fn unshared(device: &str) -> Option<Compute> {
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(Compute { machine: machine.trim().to_owned(), device: device.into(), units: Vec::new() })
}

#[cfg(test)]
mod tests {
    use baton_model::ModelConfig;

    use super::*;

    fn decoder(json: &str) -> DecoderSpec {
        ModelConfig::parse(Path::new("config.json"), json.as_bytes()).expect("a configuration").decoder
    }

    #[test]
    fn gpus_that_hold_the_same_kv_head_read_it_each() {
        let spec = decoder(
            r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                "num_attention_heads": 32, "num_key_value_heads": 2, "num_hidden_layers": 32, "vocab_size": 32000}"#,
        );
        let [two, eight] = [2, 8].map(|num_gpus| {
            let device = DeviceProfile::of_gpu("H100").times(num_gpus);
            step_prior(&spec, 13 << 30, KvDtype::Bf16, device).expect("a possible time").per_context_token
        });
        assert!((eight / two - 1.0).abs() < 1e-9, "{eight} {two}");
    }

    #[test]
    fn a_step_reads_some_of_the_experts() {
        let spec = decoder(
            r#"{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "num_hidden_layers": 48, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8}"#,
        );
        let device = DeviceProfile { bytes_per_second: 1e12, ..DeviceProfile::UNBOUNDED };
        let step = step_prior(&spec, 61_000_000_000, KvDtype::Bf16, device).expect("a possible time");
        assert!((0.64..0.68).contains(&(step.fixed / 0.061)), "{}", step.fixed);
    }

    #[test]
    fn a_step_profile_is_read_or_refused_with_its_name() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("steps.json");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("written");
            step_profile(&path).map_err(|error| format!("{error:#}"))
        };
        let step = r#"{"fixed": 0.002, "per_token": 4e-5, "per_context_token": 0, "per_pair": 1e-9}"#;
        let line = read(&format!(r#"{{"model": "tiny", "step": {step}}}"#)).expect("a line");
        assert_eq!((line.fixed, line.per_pair), (0.002, 1e-9));
        let negative = step.replace("0.002", "-1");
        let bad = ["", "{}", r#"{"step": {"fixed": 1}}"#, &format!(r#"{{"step": {negative}}}"#)];
        for text in bad {
            let error = read(text).expect_err(text);
            assert!(error.contains("steps.json") && error.contains("baton bench steps"), "{error}");
        }
        std::fs::remove_file(&path).expect("it is there");
        assert!(step_profile(&path).is_err());
    }

    #[test]
    fn workers_of_one_machine_share_the_processors_that_both_may_use() {
        let Some(all) = processors(None) else { return };
        assert!(!all.units.is_empty());
        let one = CpuList::allowed().map(|cpus| cpus.first(1).expect("there is one"));
        let one = processors(Some(one.expect("the system says which"))).expect("as above");
        assert_eq!(one.units.len(), 1);
        assert!(one.shares(&all));
    }
}
