//! The tensors of a [`DecoderSpec`], found by their published names.

use baton_kv_cache::KvDtype;

use crate::LoadError;
use crate::cpu::RowOrder;
use crate::gguf::ROPE_DIVISORS;
use crate::matrix::Matrix;
use crate::packed::{PackedMatrix, Packer, Rounding};
use crate::quantised::is_about_activations;
use crate::spec::{DecoderSpec, ExpertNaming, LayerSpec, MlpSpec};
use crate::weights::Checkpoint;

/// Weights in the order in which the forward pass needs them.
#[derive(Debug)]
pub(crate) struct DecoderWeights {
    /// Looked up, not multiplied: stays where it is mapped. `None`: that of the head.
    pub(crate) embedding: Option<Matrix>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) norm: Vec<f32>,
    pub(crate) head: PackedMatrix,
    /// The type of KV that goes with them.
    pub(crate) kv_dtype: KvDtype,
}

#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) qkv: Linear,
    pub(crate) query_norm: Option<Vec<f32>>,
    pub(crate) key_norm: Option<Vec<f32>>,
    pub(crate) output: Linear,
    pub(crate) attention_post_norm: Option<Vec<f32>>,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) mlp: Mlp,
    pub(crate) mlp_post_norm: Option<Vec<f32>>,
}

/// Products whose outputs lie side by side.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weight: PackedMatrix,
    pub(crate) bias: Option<Vec<f32>>,
}

#[derive(Debug)]
pub(crate) enum Mlp {
    Dense(DenseMlp),
    Experts { router: Linear, experts: Vec<DenseMlp> },
}

#[derive(Debug)]
pub(crate) struct DenseMlp {
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

/// Takes what `spec` needs out of the checkpoint and has `packer` pack what is multiplied.
pub(crate) fn take_weights(
    spec: &DecoderSpec,
    from: &mut Checkpoint,
    packer: &mut Packer,
) -> Result<DecoderWeights, LoadError> {
    let prefix = &spec.tensor_prefix;
    let embedding =
        from.take(&format!("{prefix}embed_tokens.weight"), &[spec.vocab_size, spec.hidden_size])?;
    let mut layers = Vec::with_capacity(spec.layers.len());
    for (layer_idx, layer) in spec.layers.iter().enumerate() {
        let mut taker = Taker { spec, from, packer, prefix: format!("{prefix}layers.{layer_idx}.") };
        layers.push(taker.layer(layer)?);
    }
    let mut taker = Taker { spec, from, packer, prefix: prefix.clone() };
    let norm = taker.norm("norm", spec.hidden_size)?;
    let (embedding, head) = if spec.tied_head {
        (None, embedding)
    } else {
        (Some(embedding), from.take("lm_head.weight", &[spec.vocab_size, spec.hidden_size])?)
    };
    let kv_dtype = head.kv_dtype();
    Ok(DecoderWeights {
        embedding,
        layers,
        norm,
        head: packer.add(vec![head], Rounding::EightBits, RowOrder::Plain),
        kv_dtype,
    })
}

/// Tensors that may be left over: buffers that old versions saved, what the configuration has taken in, and a tied
/// head saved twice.
pub(crate) fn is_redundant(spec: &DecoderSpec, name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
        || name == ROPE_DIVISORS
        || is_about_activations(name)
        || name.ends_with("masked_bias")
        || (spec.tied_head && name == "lm_head.weight")
}

struct Taker<'a> {
    spec: &'a DecoderSpec,
    from: &'a mut Checkpoint,
    packer: &'a mut Packer,
    prefix: String,
}

impl Taker<'_> {
    fn layer(&mut self, layer: &LayerSpec) -> Result<LayerWeights, LoadError> {
        let spec = self.spec;
        let hidden = spec.hidden_size;
        // With norms on both sides the one before the MLP has another name.
        let (post_attention, before_mlp) = if spec.post_norms {
            (Some("post_attention_layernorm"), "pre_feedforward_layernorm")
        } else {
            (None, "post_attention_layernorm")
        };
        let (query, kv) = (spec.query_width(), spec.kv_width());
        let qkv = if spec.fused_projections {
            self.linear("self_attn.", &[("qkv_proj", query + 2 * kv)], hidden, spec.qkv_bias)?
        } else {
            let parts = [("q_proj", query), ("k_proj", kv), ("v_proj", kv)];
            self.linear("self_attn.", &parts, hidden, spec.qkv_bias)?
        };
        let head_norm =
            |taker: &mut Self, name: &str| spec.qk_norm.then(|| taker.norm(name, spec.head_dim)).transpose();
        Ok(LayerWeights {
            attention_norm: self.norm("input_layernorm", hidden)?,
            qkv,
            query_norm: head_norm(self, "self_attn.q_norm")?,
            key_norm: head_norm(self, "self_attn.k_norm")?,
            output: self.linear("self_attn.", &[("o_proj", hidden)], query, spec.output_bias)?,
            attention_post_norm: post_attention.map(|name| self.norm(name, hidden)).transpose()?,
            mlp_norm: self.norm(before_mlp, hidden)?,
            mlp: self.mlp(&layer.mlp)?,
            mlp_post_norm: spec
                .post_norms
                .then(|| self.norm("post_feedforward_layernorm", hidden))
                .transpose()?,
        })
    }

    fn mlp(&mut self, mlp: &MlpSpec) -> Result<Mlp, LoadError> {
        let hidden = self.spec.hidden_size;
        match *mlp {
            MlpSpec::Dense { intermediate_size: n } => {
                let bias = self.spec.mlp_bias;
                let gate_up = if self.spec.fused_projections {
                    self.gated("mlp.", &[("gate_up_proj", 2 * n)], hidden, bias)?
                } else {
                    self.gated("mlp.", &[("gate_proj", n), ("up_proj", n)], hidden, bias)?
                };
                let down = self.linear("mlp.", &[("down_proj", hidden)], n, bias)?;
                Ok(Mlp::Dense(DenseMlp { gate_up, down }))
            }
            MlpSpec::Experts { num_experts, intermediate_size: n, naming, .. } => {
                let (block, [gate, up, down]) = match naming {
                    ExpertNaming::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
                    ExpertNaming::Qwen => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
                };
                let router = [("gate", num_experts)];
                let router = self.packed(
                    &format!("{block}."),
                    &router,
                    hidden,
                    false,
                    (Rounding::Never, RowOrder::Plain),
                )?;
                // Nothing is reserved by a number that no tensor has confirmed yet.
                let mut experts = Vec::new();
                for expert_idx in 0..num_experts {
                    let name = format!("{block}.experts.{expert_idx}.");
                    experts.push(DenseMlp {
                        gate_up: self.gated(&name, &[(gate, n), (up, n)], hidden, false)?,
                        down: self.linear(&name, &[(down, hidden)], n, false)?,
                    });
                }
                Ok(Mlp::Experts { router, experts })
            }
        }
    }

    /// `parts`: names and rows, side by side in the output.
    fn linear(
        &mut self,
        block: &str,
        parts: &[(&str, usize)],
        cols: usize,
        bias: bool,
    ) -> Result<Linear, LoadError> {
        self.packed(block, parts, cols, bias, (Rounding::Asked, RowOrder::Plain))
    }

    /// Gates, and as many rows that they let through.
    fn gated(
        &mut self,
        block: &str,
        parts: &[(&str, usize)],
        cols: usize,
        bias: bool,
    ) -> Result<Linear, LoadError> {
        self.packed(block, parts, cols, bias, (Rounding::Asked, RowOrder::Gated))
    }

    fn packed(
        &mut self,
        block: &str,
        parts: &[(&str, usize)],
        cols: usize,
        bias: bool,
        (rounding, order): (Rounding, RowOrder),
    ) -> Result<Linear, LoadError> {
        let mut matrices = Vec::with_capacity(parts.len());
        let mut biases = Vec::new();
        for &(name, rows) in parts {
            matrices.push(self.from.take(&format!("{}{block}{name}.weight", self.prefix), &[rows, cols])?);
            if bias {
                biases.extend(self.vector(&format!("{block}{name}.bias"), rows)?);
            }
        }
        Ok(Linear { weight: self.packer.add(matrices, rounding, order), bias: bias.then_some(biases) })
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let mut weight = self.vector(&format!("{name}.weight"), len)?;
        if self.spec.norm_unit_offset {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(weight)
    }

    /// Vectors are few: they are kept in f32.
    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        Ok(self.from.take(&format!("{}{name}", self.prefix), &[len])?.to_f32())
    }
}
