//! The cost of a model, computed from its configuration alone, for `baton inspect` and planning.
//!
//! Costs are those of an ideal machine: a step reads every used weight once, a multiply-add is two operations, and
//! activations stay in caches. A real machine is slower. Counts saturate at the largest number, because a
//! configuration may state any size.
//!
//! With L layers, H the hidden size, Q = heads x head_dim, K = kv heads x head_dim, I the rows of gate
//! and of up, V the vocabulary:
//! ```text
//! weights of a layer that multiply   H (Q + 2 K) + Q H + 3 H I        (3 H I per expert, H E the router)
//! KV of a token, bytes               2 L x kv heads x (head_dim x bytes of an element + bytes of a scale)
//! flops of a token at position p     2 x weights + sum over layers of 4 Q min(p + 1, window)
//! flops of the head                  2 H V, only where logits are wanted
//! ```

use baton_kv_cache::KvDtype;

use crate::decoder::{DecoderSpec, LayerSpec, MlpSpec};
use crate::float::FloatDtype;
use crate::precision::Backend;
use crate::stored_weights::StoredWeights;

/// Tokens of a typical decode step, one of each sequence. It stands for all steps where one number says what a step reads of a
/// mixture of experts.
pub const TYPICAL_BATCH: usize = 16;

/// Costs of one model with weights and KV of given sizes.
#[derive(Clone, Debug)]
pub struct ModelCost {
    spec: DecoderSpec,
    bytes_per_weight: f64,
    /// Bytes of a parameter that is not in a matrix of a layer: of the embedding, the head, norms and biases.
    bytes_outside: f64,
    kv_dtype: KvDtype,
}

/// Operations and memory traffic of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Additions and multiplications.
    pub flops: f64,
    /// Bytes of weights and KV that are read or written.
    pub bytes: f64,
}

/// Speed of a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceSpeed {
    /// Additions and multiplications per second.
    pub flops_per_second: f64,
    /// Bytes of memory read per second.
    pub bytes_per_second: f64,
}

impl StepCost {
    /// Operations per byte: the arithmetic intensity.
    pub fn intensity(&self) -> f64 {
        self.flops / self.bytes
    }

    /// Seconds by the roofline model (Williams et al. 2009): the longer of computing and reading.
    pub fn seconds_on(&self, device: &DeviceSpeed) -> f64 {
        (self.flops / device.flops_per_second).max(self.bytes / device.bytes_per_second)
    }
}

impl DeviceSpeed {
    /// The arithmetic intensity above which computing takes longer than reading.
    pub fn ridge(&self) -> f64 {
        self.flops_per_second / self.bytes_per_second
    }
}

impl ModelCost {
    /// The cost of `spec` with weights of `bytes_per_weight` bytes, scales included, and KV of type `kv_dtype`.
    pub fn new(spec: &DecoderSpec, bytes_per_weight: f64, kv_dtype: KvDtype) -> ModelCost {
        ModelCost { spec: spec.clone(), bytes_per_weight, bytes_outside: bytes_per_weight, kv_dtype }
    }

    /// The cost of `spec` with the matrices of its layers as `backend` holds what is stored so, the other weights as it holds
    /// floats of type `others`, and KV of type `kv_dtype`.
    pub fn in_memory(
        spec: &DecoderSpec,
        (stored, others): (StoredWeights, FloatDtype),
        backend: Backend,
        kv_dtype: KvDtype,
    ) -> ModelCost {
        let bytes_outside = StoredWeights::Floats(others).bytes_in_memory(backend);
        ModelCost { bytes_outside, ..ModelCost::new(spec, stored.bytes_in_memory(backend), kv_dtype) }
    }

    /// The number of parameters.
    pub fn num_parameters(&self) -> u64 {
        self.count(all_experts)
    }

    /// The number of parameters that one token uses: of the experts only the active ones.
    pub fn num_active_parameters(&self) -> u64 {
        self.count(|mlp| match mlp {
            MlpSpec::Experts { num_active, .. } => *num_active as f64,
            MlpSpec::Dense { .. } => 1.0,
        })
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> u64 {
        let outside = self.embedding_weights() + self.num_small() as f64;
        (self.layer_weights(all_experts) * self.bytes_per_weight + outside * self.bytes_outside) as u64
    }

    /// Bytes of all weights but those of the experts that a step over `num_tokens` tokens does not read. The embedding counts,
    /// though a step reads few of its rows.
    pub fn weight_bytes_of_step(&self, num_tokens: usize) -> f64 {
        let read = self.layer_weights(|mlp| experts_read(mlp, num_tokens));
        let idle = self.layer_weights(all_experts) - read;
        self.weight_bytes() as f64 - idle * self.bytes_per_weight
    }

    /// Operations of one token's products with the weights, without the head.
    pub fn flops_per_token(&self) -> f64 {
        2.0 * self.active_weights()
    }

    /// Operations of attention for one token and one position that it sees, in all layers. Those with a sliding window count, too.
    pub fn flops_per_pair(&self) -> f64 {
        self.attention_flops(self.spec.layers.len() as f64)
    }

    /// Bytes of one token's KV in all layers.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (self.spec.layers.len() * self.kv_bytes_per_position()) as u64
    }

    /// Bytes of one token's KV in the memories of so many ranks together. If there are more ranks than KV heads, several hold
    /// each head, and each reads its own.
    pub fn kv_bytes_of_ranks(&self, num_ranks: usize) -> u64 {
        let num_replicas = (num_ranks / self.spec.num_kv_heads.max(1)).max(1);
        self.kv_bytes_per_token().saturating_mul(num_replicas as u64)
    }

    /// Bytes of one token's activations that ranks sum: 16 bits, after attention and after the MLP of each layer.
    pub fn sum_bytes_per_token(&self) -> f64 {
        2.0 * 2.0 * (self.spec.layers.len() * self.spec.hidden_size) as f64
    }

    /// Bytes of one token's KV in one layer.
    fn kv_bytes_per_position(&self) -> usize {
        2 * self.spec.num_kv_heads * self.kv_dtype.vector_bytes(self.spec.head_dim)
    }

    /// Bytes of a sequence's KV. Layers with a sliding window keep all of it, too.
    pub fn kv_bytes(&self, num_tokens: usize) -> u64 {
        self.kv_bytes_per_token().saturating_mul(num_tokens as u64)
    }

    /// Prefills a prompt of `num_tokens` tokens, of which the first `num_cached` have KV, and computes the logits of
    /// its last token. Bytes: all weights once, cached KV read once, new KV written once.
    pub fn prefill(&self, num_tokens: usize, num_cached: usize) -> StepCost {
        let new = num_tokens.saturating_sub(num_cached);
        let attention: f64 = self
            .spec
            .layers
            .iter()
            .map(|layer| self.attention_flops(seen(layer, num_tokens) - seen(layer, num_tokens - new)))
            .sum();
        let head = 2.0 * self.head_weights();
        StepCost {
            flops: new as f64 * 2.0 * self.active_weights() + attention + head,
            bytes: self.weights_read(new) + self.kv_bytes(num_tokens) as f64,
        }
    }

    /// Decodes one more token of each of `batch` sequences with `context` tokens each, the new one included. Bytes:
    /// all weights once for the batch, and each sequence's visible KV.
    pub fn decode(&self, batch: usize, context: usize) -> StepCost {
        let last = |layer: &LayerSpec| seen(layer, context) - seen(layer, context.saturating_sub(1));
        let positions: f64 = self.spec.layers.iter().map(last).sum();
        let kv = positions * self.kv_bytes_per_position() as f64;
        let weights = self.active_weights() + self.head_weights();
        StepCost {
            flops: batch as f64 * (2.0 * weights + self.attention_flops(positions)),
            bytes: self.weights_read(batch) + batch as f64 * kv,
        }
    }

    /// Bytes of the weights that a step over `num_tokens` tokens multiplies.
    fn weights_read(&self, num_tokens: usize) -> f64 {
        let of_layers = self.layer_weights(|mlp| experts_read(mlp, num_tokens));
        of_layers * self.bytes_per_weight + self.head_weights() * self.bytes_outside
    }

    /// Weights of the layers that are multiplied with one token.
    fn active_weights(&self) -> f64 {
        self.layer_weights(|mlp| match mlp {
            MlpSpec::Experts { num_active, .. } => *num_active as f64,
            MlpSpec::Dense { .. } => 1.0,
        })
    }

    /// Weights of the layers' matrices; `experts(mlp)` is the number of experts to count.
    fn layer_weights(&self, experts: impl Fn(&MlpSpec) -> f64) -> f64 {
        let spec = &self.spec;
        let hidden = spec.hidden_size as f64;
        let attention = hidden * (2 * spec.query_width() + 2 * spec.kv_width()) as f64;
        let layer = |layer: &LayerSpec| {
            let (intermediate, router) = match layer.mlp {
                MlpSpec::Dense { intermediate_size } => (intermediate_size, 0),
                MlpSpec::Experts { intermediate_size, num_experts, .. } => (intermediate_size, num_experts),
            };
            attention + hidden * router as f64 + experts(&layer.mlp) * 3.0 * hidden * intermediate as f64
        };
        spec.layers.iter().map(layer).sum()
    }

    fn head_weights(&self) -> f64 {
        self.spec.hidden_size as f64 * self.spec.vocab_size as f64
    }

    /// Operations of scores and weighted sums over this many visible positions.
    fn attention_flops(&self, positions: f64) -> f64 {
        4.0 * self.spec.query_width() as f64 * positions
    }

    fn count(&self, experts: impl Fn(&MlpSpec) -> f64) -> u64 {
        let matrices = self.layer_weights(experts) + self.embedding_weights();
        (matrices as u64).saturating_add(self.num_small() as u64)
    }

    /// Weights of the embedding and the head.
    fn embedding_weights(&self) -> f64 {
        if self.spec.tied_head { self.head_weights() } else { 2.0 * self.head_weights() }
    }

    /// Parameters of norms and biases.
    fn num_small(&self) -> usize {
        let spec = &self.spec;
        let num_layers = spec.layers.len();
        let (hidden, query, kv) = (spec.hidden_size, spec.query_width(), spec.kv_width());
        let mut others = hidden + num_layers * hidden * if spec.post_norms { 4 } else { 2 };
        if spec.qk_norm {
            others += num_layers * 2 * spec.head_dim;
        }
        if spec.qkv_bias {
            others += num_layers * (query + 2 * kv);
        }
        if spec.output_bias {
            others += num_layers * hidden;
        }
        if spec.mlp_bias {
            for layer in &spec.layers {
                if let MlpSpec::Dense { intermediate_size } = layer.mlp {
                    others += 2 * intermediate_size + hidden;
                }
            }
        }
        others
    }
}

fn all_experts(mlp: &MlpSpec) -> f64 {
    match *mlp {
        MlpSpec::Experts { num_experts, .. } => num_experts as f64,
        MlpSpec::Dense { .. } => 1.0,
    }
}

/// Experts that a step over `num_tokens` tokens reads. Tokens are assumed to select experts independently: with `k` of `E`
/// experts per token, `n` tokens use `E (1 - (1 - k/E)^n)` experts.
fn experts_read(mlp: &MlpSpec, num_tokens: usize) -> f64 {
    match *mlp {
        MlpSpec::Experts { num_experts, num_active, .. } => {
            let missed = 1.0 - num_active as f64 / num_experts as f64;
            num_experts as f64 * (1.0 - missed.powf(num_tokens as f64))
        }
        MlpSpec::Dense { .. } => 1.0,
    }
}

/// The sum, over the first `num_tokens` tokens, of the positions that each sees in a layer.
fn seen(layer: &LayerSpec, num_tokens: usize) -> f64 {
    let n = num_tokens as f64;
    match layer.window {
        Some(window) if window < num_tokens => {
            let w = window as f64;
            w * (w + 1.0) / 2.0 + (n - w) * w
        }
        _ => n * (n + 1.0) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::ModelConfig;

    fn cost(json: &str) -> ModelCost {
        let config = ModelConfig::parse(Path::new("config.json"), json.as_bytes()).unwrap();
        ModelCost::new(&config.decoder, 2.0, KvDtype::Bf16)
    }

    /// Llama 3.1 8B as published.
    const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072}"#;

    #[test]
    fn published_models_have_their_published_sizes() {
        let llama = cost(LLAMA);
        assert_eq!(llama.num_parameters(), 8_030_261_248);
        assert_eq!(llama.num_active_parameters(), 8_030_261_248);
        assert_eq!(llama.weight_bytes(), 16_060_522_496);
        assert_eq!(llama.kv_bytes_per_token(), 128 * 1024);
        let of = |dtype| ModelCost { kv_dtype: dtype, ..llama.clone() }.kv_bytes_per_token();
        assert_eq!(of(KvDtype::F32), 256 * 1024);
        assert_eq!(of(KvDtype::Fp8), 2 * 32 * 8 * (128 + 2), "a scale for each head and token");
        assert_eq!(of(KvDtype::Int8), of(KvDtype::Fp8));

        let mixtral = cost(
            r#"{"architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
                "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}"#,
        );
        assert_eq!(mixtral.num_parameters(), 46_702_792_704);
        assert_eq!(mixtral.num_active_parameters(), 12_879_925_248);

        // 0.5 B: tied head; biases of queries, keys and values.
        let qwen = cost(
            r#"{"architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
                "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24,
                "vocab_size": 151936, "tie_word_embeddings": true}"#,
        );
        assert_eq!(qwen.num_parameters(), 494_032_768);
    }

    #[test]
    fn a_step_reads_the_experts_that_its_tokens_select() {
        let llama = cost(LLAMA);
        assert_eq!(llama.weight_bytes_of_step(1), llama.weight_bytes() as f64, "it has no experts");
        let mixtral = cost(
            r#"{"architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
                "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}"#,
        );
        let [one, many] = [1, 1000].map(|num_tokens| mixtral.weight_bytes_of_step(num_tokens));
        assert!((one / (2.0 * mixtral.num_active_parameters() as f64) - 1.0).abs() < 1e-9, "{one}");
        assert!((many / mixtral.weight_bytes() as f64 - 1.0).abs() < 1e-9, "{many}");
    }

    #[test]
    fn the_cost_of_an_impossible_size_saturates() {
        let model = cost(
            r#"{"architectures": ["MixtralForCausalLM"], "hidden_size": 2147483648,
                "intermediate_size": 2147483648, "num_attention_heads": 1, "num_hidden_layers": 4096,
                "vocab_size": 2147483648, "num_local_experts": 2147483648, "num_experts_per_tok": 1,
                "max_position_embeddings": 2147483648}"#,
        );
        assert_eq!((model.num_parameters(), model.weight_bytes()), (u64::MAX, u64::MAX));
        assert_eq!(model.kv_bytes(1 << 31), u64::MAX);
    }

    #[test]
    fn a_prompt_costs_the_sum_of_its_tokens() {
        for window in ["null", "5"] {
            let model = cost(
                &LLAMA
                    .replace("LlamaFor", "MistralFor")
                    .replace("\"vocab_size\"", &format!("\"sliding_window\": {window}, \"vocab_size\"")),
            );
            let head = 2.0 * model.head_weights();
            let by_token: f64 = (1..=17).map(|context| model.decode(1, context).flops - head).sum();
            let whole = model.prefill(17, 0).flops - head;
            assert!((whole / by_token - 1.0).abs() < 1e-12, "{whole} {by_token}");
            let parts = model.prefill(11, 0).flops + model.prefill(17, 11).flops - 2.0 * head;
            assert!((parts / whole - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn a_prompts_operations_are_those_of_its_tokens_and_pairs() {
        let model = cost(LLAMA);
        let (tokens, pairs) = (1000.0, 1000.0 * 1001.0 / 2.0);
        let sum = tokens * model.flops_per_token() + pairs * model.flops_per_pair();
        let whole = model.prefill(1000, 0).flops - 2.0 * model.head_weights();
        assert!((sum / whole - 1.0).abs() < 1e-12, "{sum} {whole}");
    }

    #[test]
    fn decode_reads_weights_once_for_the_batch() {
        let model = cost(LLAMA);
        let (one, many) = (model.decode(1, 1000), model.decode(16, 1000));
        let kv = model.kv_bytes(1000) as f64;
        assert!((many.bytes - one.bytes - 15.0 * kv).abs() < 1.0);
        assert_eq!(many.flops, 16.0 * one.flops);
        assert!(many.intensity() > 10.0 * one.intensity());
        let device = DeviceSpeed { flops_per_second: 1e15, bytes_per_second: 3e12 };
        assert_eq!(one.seconds_on(&device), one.bytes / 3e12);
        assert!(one.intensity() < device.ridge() && model.prefill(4096, 0).intensity() > device.ridge());
    }
}
