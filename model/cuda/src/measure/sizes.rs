//! Sizes of the measured model, batches and ceilings.

use baton_cuda_kernels::kernel::KernelSource;
use baton_cuda_kernels::products::{self, WeightKind};
use baton_kv_cache::{KvDtype, KvLayout};
use baton_model_spec::{Activation, DecoderSpec, LayerSpec, MlpSpec, RopeScaling, RopeSpec};

use crate::executor::{expert_sources, sources_of};

/// Sizes of all measurements.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// The model.
    pub spec: DecoderSpec,
    /// Tokens in the cache of a decoding sequence, including the newest.
    pub context: usize,
    /// Number of decoding sequences of a step.
    pub batch: usize,
    /// Numbers of decoding sequences for which attention alone is measured.
    pub attention_batches: Vec<usize>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Layers of routed experts that are measured alone.
    pub experts: Vec<ExpertSizes>,
    /// Bytes of the large copy.
    pub copied_bytes: usize,
    /// Rows and columns of the large product.
    pub product: usize,
    /// Repetitions of each measurement.
    pub repetitions: usize,
}

impl Sizes {
    /// A model of the shape of Llama 3.1 8B.
    pub fn full() -> Sizes {
        let (hidden_size, num_heads, num_kv_heads, head_dim) = (4096, 32, 8, 128);
        let mlp = MlpSpec::Dense { intermediate_size: 14336 };
        let shape = [hidden_size, num_heads, num_kv_heads, head_dim];
        Sizes {
            spec: llama(shape, vec![LayerSpec { window: None, rope_idx: 0, mlp }; 32], 128_256),
            context: 4096,
            batch: 32,
            attention_batches: vec![1, 8, 32, 128],
            prompt: 8192,
            experts: vec![
                // Mixtral 8x7B, and Qwen3 30B-A3B.
                ExpertSizes { num_experts: 8, num_active: 2, hidden_size: 4096, intermediate_size: 14336 },
                ExpertSizes { num_experts: 128, num_active: 8, hidden_size: 2048, intermediate_size: 768 },
            ],
            copied_bytes: 4 << 30,
            product: 8192,
            repetitions: 15,
        }
    }

    /// The kernels of all measurements.
    pub fn sources(&self) -> Vec<KernelSource> {
        let experts = expert_sources(Activation::Silu);
        let quantised = [WeightKind::Int4, WeightKind::Fp8].map(products::source);
        sources_of(&self.spec, &self.layout()).into_iter().chain(experts).chain(quantised).collect()
    }

    /// Layout of its blocks.
    pub fn layout(&self) -> KvLayout {
        KvLayout {
            block_size: 16,
            num_layers: self.spec.layers.len(),
            num_kv_heads: self.spec.num_kv_heads,
            head_dim: self.spec.head_dim,
            dtype: KvDtype::Bf16,
        }
    }
}

/// A layer of routed experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSizes {
    /// Experts of the layer.
    pub num_experts: usize,
    /// Experts of a token.
    pub num_active: usize,
    /// Numbers of a token.
    pub hidden_size: usize,
    /// Numbers between the gate and the last product of an expert.
    pub intermediate_size: usize,
}

/// A model of the Llama architecture. `shape` is the hidden size, the heads, the kv heads and the head size.
pub fn llama(shape: [usize; 4], layers: Vec<LayerSpec>, vocab_size: usize) -> DecoderSpec {
    let [hidden_size, num_heads, num_kv_heads, head_dim] = shape;
    DecoderSpec {
        vocab_size,
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        layers,
        ropes: vec![RopeSpec { theta: 500_000.0, rotary_dim: head_dim, scaling: RopeScaling::None }],
        norm_eps: 1e-5,
        norm_unit_offset: false,
        post_norms: false,
        qk_norm: false,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        fused_projections: false,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        attention_soft_cap: None,
        activation: Activation::Silu,
        embedding_scale: 1.0,
        tied_head: false,
        logit_soft_cap: None,
        tensor_prefix: String::new(),
    }
}

/// Operations of one layer's attention: each row takes two multiplications and additions with each row up to itself.
pub fn attention_operations(spec: &DecoderSpec, num_tokens: usize) -> f64 {
    let pairs = num_tokens as f64 * (num_tokens as f64 + 1.0) / 2.0;
    4.0 * spec.query_width() as f64 * pairs
}
