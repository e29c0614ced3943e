//! What a step of a model takes on GPUs, and how much KV fits beside the weights.

use baton_cost::{GpuKind, ModelShape, StepLine, prior};
use baton_kv_cache::KvDtype;
use baton_model_spec::{
    Backend, DecoderShard, DecoderSpec, FloatDtype, LoadError, Rank, StoredWeights,
    cost::{ModelCost, TYPICAL_BATCH},
};

/// Fewer are no use.
const LEAST_KV_TOKENS: usize = 1024;

/// A model on so many GPUs of one kind that compute it together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceShare {
    /// What a step takes, by a roofline.
    pub step: StepLine,
    /// The part of every step that the host needs, in seconds; `step` contains it.
    pub host_seconds: f64,
    /// Bytes of all weights. A step reads fewer if it does not select every expert.
    pub weight_bytes: f64,
    /// Bytes of a token's KV, in BF16, each head once: what is sent to other workers and kept in tiers.
    pub kv_bytes_per_token: f64,
    /// Tokens whose KV fits beside the weights.
    pub num_kv_tokens: usize,
}

/// A model that so many GPUs cannot compute together.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// Its heads or neurons cannot be divided among them, as real workers refuse it.
    #[error(transparent)]
    Indivisible(#[from] LoadError),
    /// The weights leave no room for KV.
    #[error(
        "{num_gpus} x {} hold {:.0} GB, and the weights alone take {:.0} GB; raise the tensor-parallel degree",
        gpu.name(), room_bytes / 1e9, weight_bytes / 1e9
    )]
    DoesNotFit {
        /// What it should fit on.
        gpu: GpuKind,
        /// How many of them.
        num_gpus: usize,
        /// Bytes for weights and KV.
        room_bytes: f64,
        /// Bytes of the weights.
        weight_bytes: f64,
    },
}

impl DeviceShare {
    /// The matrices of layers are stored as `weights` says, the others as floats of the type beside it. That changes what GPUs
    /// read and hold, and not the arithmetic.
    /// `utilisation` is the part of the memory that weights and KV may take; the rest is for activations and the runtime.
    ///
    /// # Errors
    /// When the model cannot be divided among the GPUs, or the weights leave no room for KV.
    pub fn new(
        spec: &DecoderSpec,
        weights: (StoredWeights, FloatDtype),
        gpu: GpuKind,
        num_gpus: usize,
        utilisation: f64,
    ) -> Result<DeviceShare, ShareError> {
        DecoderShard::new(spec, Rank { idx: 0, num_ranks: num_gpus })?;
        let cost = ModelCost::in_memory(spec, weights, Backend::Cuda, KvDtype::Bf16);
        let shape = ModelShape {
            weight_bytes: cost.weight_bytes_of_step(TYPICAL_BATCH),
            flops_per_token: cost.flops_per_token(),
            flops_per_pair: cost.flops_per_pair(),
            kv_bytes_per_token: cost.kv_bytes_of_ranks(num_gpus) as f64,
            num_layers: spec.layers.len() as f64,
            sum_bytes_per_token: cost.sum_bytes_per_token(),
        };
        let weight_bytes = cost.weight_bytes() as f64;
        let room_bytes = gpu.memory_bytes() * num_gpus as f64 * utilisation;
        let num_kv_tokens = ((room_bytes - weight_bytes) / shape.kv_bytes_per_token).max(0.0) as usize;
        if num_kv_tokens < LEAST_KV_TOKENS {
            return Err(ShareError::DoesNotFit { gpu, num_gpus, room_bytes, weight_bytes });
        }
        let profile = gpu.profile().times(num_gpus);
        Ok(DeviceShare {
            step: prior(&shape, &profile),
            host_seconds: profile.overhead_seconds,
            weight_bytes,
            kv_bytes_per_token: cost.kv_bytes_per_token() as f64,
            num_kv_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use baton_model_spec::ModelConfig;

    use super::*;

    const BF16: (StoredWeights, FloatDtype) = (StoredWeights::Floats(FloatDtype::Bf16), FloatDtype::Bf16);

    fn config(json: &str) -> ModelConfig {
        ModelConfig::parse(Path::new("config.json"), json.as_bytes()).expect("a configuration")
    }

    #[test]
    fn ranks_that_hold_the_same_kv_head_keep_and_read_it_each() {
        let spec = config(
            r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                "num_attention_heads": 32, "num_key_value_heads": 2, "num_hidden_layers": 32, "vocab_size": 32000}"#,
        )
        .decoder;
        let [two, eight] = [2, 8]
            .map(|num_gpus| DeviceShare::new(&spec, BF16, GpuKind::H100, num_gpus, 0.9).expect("it fits"));
        assert_eq!(two.kv_bytes_per_token, eight.kv_bytes_per_token, "what a transfer sends");
        assert!((eight.step.per_context_token / two.step.per_context_token - 1.0).abs() < 1e-9);
        for (share, num_gpus) in [(two, 2.0), (eight, 8.0)] {
            // Each GPU holds one of the two heads.
            let kv_bytes = share.num_kv_tokens as f64 * share.kv_bytes_per_token / 2.0;
            let part = (share.weight_bytes / num_gpus + kv_bytes) / (0.9 * GpuKind::H100.memory_bytes());
            assert!((0.999..=1.0).contains(&part), "{part} of the memory of {num_gpus} GPUs");
        }
    }

    #[test]
    fn a_step_reads_some_experts_and_the_memory_holds_all() {
        // Qwen3 30B A3B: of 128 experts each token selects 8, and 16 tokens select 64 % of them.
        let spec = config(
            r#"{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "num_hidden_layers": 48, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8}"#,
        )
        .decoder;
        let share = DeviceShare::new(&spec, BF16, GpuKind::H100, 1, 0.9).expect("it fits");
        assert!((share.weight_bytes / 61e9 - 1.0).abs() < 0.01, "{}", share.weight_bytes);
        let seconds = share.step.fixed - share.host_seconds;
        let part = seconds * GpuKind::H100.profile().bytes_per_second / share.weight_bytes;
        assert!((0.64..0.68).contains(&part), "{part} of the weights");
        let held = share.weight_bytes + share.num_kv_tokens as f64 * share.kv_bytes_per_token;
        assert!((0.999..=1.0).contains(&(held / (0.9 * GpuKind::H100.memory_bytes()))), "{held}");
    }

    #[test]
    fn quantised_weights_take_less_to_hold_and_to_read() {
        let share = |quantisation: &str| {
            let config = config(&format!(
                r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
                    "quantization_config": {quantisation}}}"#
            ));
            DeviceShare::new(&config.decoder, (config.stored, config.dtype), GpuKind::H100, 1, 0.9)
                .expect("it fits")
        };
        let bf16 = share("null");
        // As large as published files of Llama 3.1 8B, but with scales in f32: their embedding and head have 2.1 GB.
        for (quantisation, bytes) in [
            (r#"{"quant_method": "fp8"}"#, 9.08e9),
            (r#"{"quant_method": "awq", "bits": 4, "group_size": 128}"#, 5.81e9),
            // Held in 8 bits, in groups of 32.
            (r#"{"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true}"#, 9.95e9),
        ] {
            let share = share(quantisation);
            assert!((share.weight_bytes / bytes - 1.0).abs() < 0.01, "{}", share.weight_bytes);
            let [read, read_in_bf16] = [share, bf16].map(|share| share.step.fixed - share.host_seconds);
            let part = share.weight_bytes / bf16.weight_bytes;
            assert!((read / read_in_bf16 / part - 1.0).abs() < 1e-9, "{read} s of {read_in_bf16} s");
            let more = (share.num_kv_tokens - bf16.num_kv_tokens) as f64 * bf16.kv_bytes_per_token;
            assert!(
                (more / (bf16.weight_bytes - share.weight_bytes) - 1.0).abs() < 1e-3,
                "{more} more bytes"
            );
            assert_eq!(share.step.per_token, bf16.step.per_token);
        }
    }
}
