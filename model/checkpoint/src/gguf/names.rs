//! Maps published tensor names to those of GGUF files.
//!
//! Converters (llama.cpp's) interleave the rows of rotated projections of `llama`; [`Place`] records that order.

use baton_model_spec::{DecoderSpec, MlpSpec};

use crate::matrix::StoredOrder;

pub(super) const EMBEDDING: &str = "token_embd.weight";
/// The start of the names of all tensors of layers.
pub(super) const LAYERS: &str = "blk.";
/// Llama 3's frequency divisors.
pub(crate) const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// The place of a published tensor in a GGUF file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) name: String,
    /// Index and number of parts: one expert's part of a tensor of all experts.
    pub(crate) part: Option<(usize, usize)>,
    pub(crate) order: StoredOrder,
}

/// How GGUF files name and arrange published tensors.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    /// Size of the heads whose rows are interleaved.
    interleaved: Option<usize>,
    post_norms: bool,
    num_experts: usize,
    separate_experts: bool,
}

impl Names {
    /// Names for an architecture. Early files have one tensor per expert.
    pub(crate) fn new(architecture: &str, separate_experts: bool, spec: &DecoderSpec) -> Names {
        let num_experts = spec.layers.iter().map(|layer| match layer.mlp {
            MlpSpec::Dense { .. } => 0,
            MlpSpec::Experts { num_experts, .. } => num_experts,
        });
        Names {
            interleaved: (architecture == "llama").then_some(spec.head_dim),
            post_norms: spec.post_norms,
            num_experts: num_experts.max().unwrap_or(0),
            separate_experts,
        }
    }

    /// The place of the tensor published as `name`.
    pub(crate) fn place(&self, name: &str) -> Place {
        let whole = |name: String| Place { name, part: None, order: StoredOrder::AsIs };
        let (module, kind) = name.rsplit_once('.').unwrap_or((name, "weight"));
        let Some(in_layer) = module.strip_prefix("model.layers.") else {
            return whole(match module {
                "model.embed_tokens" => EMBEDDING.to_owned(),
                "model.norm" => "output_norm.weight".to_owned(),
                "lm_head" => "output.weight".to_owned(),
                _ => name.to_owned(),
            });
        };
        let (layer, module) = in_layer.split_once('.').unwrap_or((in_layer, ""));
        if let Some((_, expert)) = module.split_once(".experts.") {
            let (expert, projection) = expert.split_once('.').unwrap_or((expert, ""));
            let stem = match projection {
                "gate_proj" | "w1" => "ffn_gate",
                "up_proj" | "w3" => "ffn_up",
                _ => "ffn_down",
            };
            if self.separate_experts {
                return whole(format!("blk.{layer}.{stem}.{expert}.{kind}"));
            }
            let part = expert.parse().ok().map(|expert_idx| (expert_idx, self.num_experts));
            return Place { part, ..whole(format!("blk.{layer}.{stem}_exps.{kind}")) };
        }
        let stem = match module {
            "input_layernorm" => "attn_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.qkv_proj" => "attn_qkv",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "post_attention_layernorm" if self.post_norms => "post_attention_norm",
            "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
            "post_feedforward_layernorm" => "post_ffw_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
            "mlp.down_proj" => "ffn_down",
            "mlp.gate" | "block_sparse_moe.gate" => "ffn_gate_inp",
            other => other,
        };
        let order = match (stem, self.interleaved) {
            ("attn_q" | "attn_k", Some(head_dim)) => StoredOrder::InterleavedHalves { head_dim },
            _ => StoredOrder::AsIs,
        };
        Place { order, ..whole(format!("blk.{layer}.{stem}.{kind}")) }
    }
}
