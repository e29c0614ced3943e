//! One decoder, described by data: every supported architecture is a value of [`DecoderSpec`].

use crate::rope::RopeSpec;

/// A decoder-only transformer with pre-norms and rotary embeddings.
///
/// ```text
/// x = embedding[token] * embedding_scale
/// per layer:  a = attention(norm(x));  x += post_norms ? norm(a) : a
///             m = mlp(norm(x));        x += post_norms ? norm(m) : m
/// logits = soft_cap(head(norm(x)))
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Rows of the embedding; token ids are below.
    pub vocab_size: usize,
    /// Elements of `x`.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; each serves a group of query heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// First to last.
    pub layers: Vec<LayerSpec>,
    /// The rotary embeddings that layers refer to.
    pub ropes: Vec<RopeSpec>,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// Norms multiply by `1 + weight` (Gemma).
    pub norm_unit_offset: bool,
    /// Norms after attention and MLP as well as before (Gemma 2 and 3).
    pub post_norms: bool,
    /// A norm of each query and key head before its rotation (Qwen 3, Gemma 3).
    pub qk_norm: bool,
    /// Biases of the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias of the attention's output projection.
    pub output_bias: bool,
    /// Biases of the MLP.
    pub mlp_bias: bool,
    /// Query, key and value projections are one tensor, and so are gate and up (Phi-3).
    pub fused_projections: bool,
    /// Factor on scores.
    pub attention_scale: f32,
    /// Scores are `cap * tanh(score / cap)`.
    pub attention_soft_cap: Option<f32>,
    /// Function of the MLP's gate.
    pub activation: Activation,
    /// Factor on embeddings.
    pub embedding_scale: f32,
    /// The embedding is the head, too.
    pub tied_head: bool,
    /// Logits are `cap * tanh(logit / cap)`.
    pub logit_soft_cap: Option<f32>,
    /// What names of tensors begin with, up to and including a dot.
    pub tensor_prefix: String,
}

/// What differs between layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Positions that a token sees, its own included; all before it when `None`.
    pub window: Option<usize>,
    /// Index into [`DecoderSpec::ropes`].
    pub rope_idx: usize,
    /// The feed-forward part.
    pub mlp: MlpSpec,
}

/// `down(activation(gate(x)) * up(x))`, once or by experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MlpSpec {
    /// The same for every token.
    Dense {
        /// Rows of gate and of up.
        intermediate_size: usize,
    },
    /// Each token goes to the experts that a router likes best.
    Experts {
        /// How many there are.
        num_experts: usize,
        /// How many a token goes to.
        num_active: usize,
        /// Rows of gate and of up of one expert.
        intermediate_size: usize,
        /// Weights of the chosen are divided by their sum.
        renormalise: bool,
        /// How tensors are named.
        naming: ExpertNaming,
    },
}

impl MlpSpec {
    /// Rows of gate and of up: neurons.
    pub fn intermediate_size(&self) -> usize {
        match *self {
            MlpSpec::Dense { intermediate_size } | MlpSpec::Experts { intermediate_size, .. } => {
                intermediate_size
            }
        }
    }
}

/// Names of the tensors of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNaming {
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.0.w1 | w3 | w2`
    Mixtral,
    /// `mlp.gate`, `mlp.experts.0.gate_proj | up_proj | down_proj`
    Qwen,
}

/// Function of the MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`
    Silu,
    /// GELU by the error function.
    Gelu,
    /// GELU by its tanh approximation.
    GeluTanh,
}

impl DecoderSpec {
    /// Rows of the query projection.
    pub fn query_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Rows of the key projection, and of the value projection.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Canonical text of the positions' part of keys, for the KV's fingerprint.
    pub fn rope_text(&self) -> String {
        let ropes: Vec<String> = self.ropes.iter().map(ToString::to_string).collect();
        if ropes.len() == 1 {
            return ropes.into_iter().next().expect("one rope");
        }
        let layers: String = self.layers.iter().map(|layer| layer.rope_idx.to_string()).collect();
        format!("{} layers={layers}", ropes.join("; "))
    }
}
