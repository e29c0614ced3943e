//! [`DecoderSpec`]: one decoder described by data. Every supported architecture is a value of it.

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
    /// Rows of the embedding. Token ids are below this.
    pub vocab_size: usize,
    /// Elements of the hidden state `x`.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; each serves a group of query heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Rotary embeddings; layers refer to them by index.
    pub ropes: Vec<RopeSpec>,
    /// Epsilon of the norms, added to the mean square.
    pub norm_eps: f32,
    /// Norms multiply by `1 + weight` instead of `weight` (Gemma).
    pub norm_unit_offset: bool,
    /// Norms also follow attention and MLP (Gemma 2 and 3).
    pub post_norms: bool,
    /// Each query and key head is normalised before its rotation (Qwen 3, Gemma 3).
    pub qk_norm: bool,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The output projection of attention has a bias.
    pub output_bias: bool,
    /// The MLP has biases.
    pub mlp_bias: bool,
    /// Query, key and value projections are stored as one tensor, and so are gate and up (Phi-3).
    pub fused_projections: bool,
    /// Attention scores are multiplied by this.
    pub attention_scale: f32,
    /// Scores are `cap * tanh(score / cap)`.
    pub attention_soft_cap: Option<f32>,
    /// Activation function of the MLP's gate.
    pub activation: Activation,
    /// Embeddings are multiplied by this.
    pub embedding_scale: f32,
    /// The embedding is also the head.
    pub tied_head: bool,
    /// Logits are `cap * tanh(logit / cap)`.
    pub logit_soft_cap: Option<f32>,
    /// Prefix of tensor names, up to and including the dot.
    pub tensor_prefix: String,
}

/// The part of the description that differs between layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Sliding window: the number of positions a token attends to, its own included. `None` is all positions before
    /// it.
    pub window: Option<usize>,
    /// Index into [`DecoderSpec::ropes`].
    pub rope_idx: usize,
    /// The feed-forward part.
    pub mlp: MlpSpec,
}

/// `down(activation(gate(x)) * up(x))`, dense or as a mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MlpSpec {
    /// One MLP for every token.
    Dense {
        /// Rows of gate and of up.
        intermediate_size: usize,
    },
    /// The router selects the experts of each token.
    Experts {
        /// The number of experts.
        num_experts: usize,
        /// The number of experts per token.
        num_active: usize,
        /// Rows of gate and of up of one expert.
        intermediate_size: usize,
        /// The selected experts' weights are divided by their sum.
        renormalise: bool,
        /// Naming of the tensors.
        naming: ExpertNaming,
    },
}

impl MlpSpec {
    /// Rows of gate and of up (the neurons); of one expert if there are several.
    pub fn intermediate_size(&self) -> usize {
        match *self {
            MlpSpec::Dense { intermediate_size } | MlpSpec::Experts { intermediate_size, .. } => {
                intermediate_size
            }
        }
    }
}

/// Tensor names of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNaming {
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.0.w1 | w3 | w2`
    Mixtral,
    /// `mlp.gate`, `mlp.experts.0.gate_proj | up_proj | down_proj`
    Qwen,
}

/// Activation function of the MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`
    Silu,
    /// GELU with the error function.
    Gelu,
    /// GELU with its tanh approximation.
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

    /// Canonical text of the rotary embeddings, a part of the KV's fingerprint.
    pub fn rope_text(&self) -> String {
        let ropes: Vec<String> = self.ropes.iter().map(ToString::to_string).collect();
        if ropes.len() == 1 {
            return ropes.into_iter().next().expect("one rope");
        }
        let layers: String = self.layers.iter().map(|layer| layer.rope_idx.to_string()).collect();
        format!("{} layers={layers}", ropes.join("; "))
    }
}
