//! Takes the tensors of a [`DecoderSpec`] from a checkpoint by their published names.
//!
//! It does not know a backend's layout of matrices: a [`MatrixSink`] makes it.

use std::ops::Range;

use baton_kv_cache::KvDtype;
use baton_model_spec::{DecoderShard, DecoderSpec, ExpertNaming, LayerSpec, LoadError, MlpSpec};

use crate::checkpoint::Checkpoint;
use crate::gguf::ROPE_DIVISORS;
use crate::integer_choice::Tolerance;
use crate::matrix::Matrix;
use crate::quantised::is_about_activations;
use crate::sink::{MatrixSink, ProductKind};

/// The weights of a decoder, in the order of the forward pass.
#[derive(Debug)]
pub struct DecoderWeights<M> {
    /// Rows are looked up, not multiplied, so it stays mapped. `None`: it is the head, of which this rank has its own
    /// tokens.
    pub embedding: Option<Matrix>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights<M>>,
    /// The norm before the head, `[hidden]`.
    pub norm: Vec<f32>,
    /// `[vocab][hidden]`; with several ranks only this rank's rows.
    pub head: M,
    /// The default type of KV for these weights.
    pub kv_dtype: KvDtype,
}

/// The weights of one layer. Norms are `[hidden]`; those of heads are `[head_dim]`.
#[derive(Debug)]
pub struct LayerWeights<M> {
    /// The norm before attention.
    pub attention_norm: Vec<f32>,
    /// The projections to queries, keys and values, one after the other.
    pub qkv: Linear<M>,
    /// The norm of each query head.
    pub query_norm: Option<Vec<f32>>,
    /// The norm of each key head.
    pub key_norm: Option<Vec<f32>>,
    /// The output projection of attention.
    pub output: Linear<M>,
    /// The norm after attention.
    pub attention_post_norm: Option<Vec<f32>>,
    /// The norm before the MLP.
    pub mlp_norm: Vec<f32>,
    /// The MLP.
    pub mlp: Mlp<M>,
    /// The norm after the MLP.
    pub mlp_post_norm: Option<Vec<f32>>,
}

/// One product, or several with the same input and their outputs one after the other.
#[derive(Debug)]
pub struct Linear<M> {
    /// `[outputs][inputs]`.
    pub weight: M,
    /// `[outputs]`.
    pub bias: Option<Vec<f32>>,
}

/// The MLP of a layer.
#[derive(Debug)]
pub enum Mlp<M> {
    /// One MLP for every token.
    Dense(DenseMlp<M>),
    /// Each token goes to some of the experts.
    Experts {
        /// Computes the experts' scores.
        router: Linear<M>,
        /// All experts.
        experts: Vec<DenseMlp<M>>,
    },
}

/// `down(activation(gate(x)) * up(x))`
#[derive(Debug)]
pub struct DenseMlp<M> {
    /// The rows of gate, then the rows of up.
    pub gate_up: Linear<M>,
    /// The projection back to the hidden state.
    pub down: Linear<M>,
}

/// Takes the tensors that the rank of `shard` needs of the decoder `spec` from the checkpoint, and passes the
/// matrices of products to `sink`.
pub(crate) fn take_weights<S: MatrixSink>(
    spec: &DecoderSpec,
    shard: &DecoderShard,
    from: &mut Checkpoint,
    sink: &mut S,
) -> Result<DecoderWeights<S::Matrix>, LoadError> {
    let prefix = &spec.tensor_prefix;
    let embedding = embedding_name(spec);
    // A matrix that is both may be stored under either name.
    let is_stored_as_head = spec.tied_head && !from.has(&embedding) && from.has(HEAD);
    let embedding = if is_stored_as_head { HEAD } else { &*embedding };
    let embedding = from.take(embedding, &[spec.vocab_size, spec.hidden_size])?;
    let mut layers = Vec::with_capacity(spec.layers.len());
    for (layer_idx, layer) in spec.layers.iter().enumerate() {
        let mut taker = Taker { spec, shard, from, sink, prefix: format!("{prefix}layers.{layer_idx}.") };
        layers.push(taker.layer(layer)?);
    }
    let mut taker = Taker { spec, shard, from, sink, prefix: prefix.clone() };
    let norm = taker.norm("norm", spec.hidden_size)?;
    let (embedding, head) = if spec.tied_head {
        (None, embedding)
    } else {
        (Some(embedding), from.take(HEAD, &[spec.vocab_size, spec.hidden_size])?)
    };
    let kv_dtype = head.kv_dtype();
    let head = head.rows_at(shard.vocabulary());
    let head = sink
        .add(vec![head], Tolerance::EightBits, ProductKind::Plain)
        .expect("the head's columns are not cut");
    Ok(DecoderWeights { embedding, layers, norm, head, kv_dtype })
}

/// The published name of the head.
const HEAD: &str = "lm_head.weight";

/// The published name of the embedding.
fn embedding_name(spec: &DecoderSpec) -> String {
    format!("{}embed_tokens.weight", spec.tensor_prefix)
}

/// Whether the head of `spec` is tied, but the checkpoint has another one. Fine-tuned models whose configuration is that of
/// the original have it so.
pub(crate) fn has_other_head(spec: &DecoderSpec, from: &Checkpoint) -> bool {
    let embedding = embedding_name(spec);
    spec.tied_head && from.has(HEAD) && from.has(&embedding) && !from.are_equal(HEAD, &embedding)
}

/// Whether a tensor may be left over: a buffer that old versions saved, a tensor that the configuration already used,
/// or a tied head that is stored twice.
pub(crate) fn is_redundant(spec: &DecoderSpec, name: &str) -> bool {
    const BUFFERS: &[&str] =
        &["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias"];
    BUFFERS.iter().any(|buffer| name.ends_with(buffer))
        || name == ROPE_DIVISORS
        || is_about_activations(name)
        || (spec.tied_head && name == HEAD)
}

/// A tensor of a product: its rows, and the range of this rank.
struct Part {
    name: String,
    rows: usize,
    of_rank: Vec<Range<usize>>,
}

impl Part {
    /// This rank has all rows.
    fn whole(name: &str, rows: usize) -> Vec<Part> {
        Part::some(&[(name, rows, 0..rows)], None)
    }

    /// The tensors of one input, or the one tensor `fused` that contains the rows of all.
    fn some(tensors: &[(&str, usize, Range<usize>)], fused: Option<&str>) -> Vec<Part> {
        let Some(fused) = fused else {
            let part = |(name, rows, of_rank): &(&str, usize, Range<usize>)| Part {
                name: (*name).to_owned(),
                rows: *rows,
                of_rank: vec![of_rank.clone()],
            };
            return tensors.iter().map(part).collect();
        };
        let mut whole = Part { name: fused.to_owned(), rows: 0, of_rank: vec![] };
        for (_, rows, of_rank) in tensors {
            whole.of_rank.push(whole.rows + of_rank.start..whole.rows + of_rank.end);
            whole.rows += rows;
        }
        vec![whole]
    }
}

/// The columns of a product's tensors, and the range of this rank.
struct Columns {
    all: usize,
    of_rank: Range<usize>,
}

impl Columns {
    fn whole(all: usize) -> Columns {
        Columns { all, of_rank: 0..all }
    }
}

struct Taker<'a, S> {
    spec: &'a DecoderSpec,
    shard: &'a DecoderShard,
    from: &'a mut Checkpoint,
    sink: &'a mut S,
    prefix: String,
}

impl<S: MatrixSink> Taker<'_, S> {
    fn layer(&mut self, layer: &LayerSpec) -> Result<LayerWeights<S::Matrix>, LoadError> {
        let spec = self.spec;
        let hidden = spec.hidden_size;
        // With norms before and after, the norm before the MLP has another name.
        let (post_attention, before_mlp) = if spec.post_norms {
            (Some("post_attention_layernorm"), "pre_feedforward_layernorm")
        } else {
            (None, "post_attention_layernorm")
        };
        let (query, kv) = (spec.query_width(), spec.kv_width());
        let (query_rows, kv_rows) = (self.shard.query_rows(), self.shard.kv_rows());
        let qkv =
            [("q_proj", query, query_rows.clone()), ("k_proj", kv, kv_rows.clone()), ("v_proj", kv, kv_rows)];
        let qkv = Part::some(&qkv, spec.fused_projections.then_some("qkv_proj"));
        let qkv = self.linear("self_attn.", &qkv, &Columns::whole(hidden), spec.qkv_bias)?;
        let attended = Columns { all: query, of_rank: query_rows };
        let head_norm =
            |taker: &mut Self, name: &str| spec.qk_norm.then(|| taker.norm(name, spec.head_dim)).transpose();
        Ok(LayerWeights {
            attention_norm: self.norm("input_layernorm", hidden)?,
            qkv,
            query_norm: head_norm(self, "self_attn.q_norm")?,
            key_norm: head_norm(self, "self_attn.k_norm")?,
            output: self.linear("self_attn.", &Part::whole("o_proj", hidden), &attended, spec.output_bias)?,
            attention_post_norm: post_attention.map(|name| self.norm(name, hidden)).transpose()?,
            mlp_norm: self.norm(before_mlp, hidden)?,
            mlp: self.mlp(&layer.mlp)?,
            mlp_post_norm: spec
                .post_norms
                .then(|| self.norm("post_feedforward_layernorm", hidden))
                .transpose()?,
        })
    }

    fn mlp(&mut self, mlp: &MlpSpec) -> Result<Mlp<S::Matrix>, LoadError> {
        let hidden = self.spec.hidden_size;
        match *mlp {
            MlpSpec::Dense { intermediate_size: n } => {
                let (bias, fused) =
                    (self.spec.mlp_bias, self.spec.fused_projections.then_some("gate_up_proj"));
                self.dense("mlp.", ["gate_proj", "up_proj", "down_proj"], fused, n, bias).map(Mlp::Dense)
            }
            MlpSpec::Experts { num_experts, intermediate_size: n, naming, .. } => {
                let (block, names) = match naming {
                    ExpertNaming::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
                    ExpertNaming::Qwen => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
                };
                let router = self.product(
                    &format!("{block}."),
                    &Part::whole("gate", num_experts),
                    &Columns::whole(hidden),
                    false,
                    (Tolerance::None, ProductKind::Plain),
                )?;
                // The number of experts comes from the configuration alone, so nothing is reserved before the tensors
                // are found.
                let mut experts = Vec::new();
                for expert_idx in 0..num_experts {
                    let name = format!("{block}.experts.{expert_idx}.");
                    experts.push(self.dense(&name, names, None, n, false)?);
                }
                Ok(Mlp::Experts { router, experts })
            }
        }
    }

    /// An MLP of `n` neurons; this rank loads its own range.
    fn dense(
        &mut self,
        block: &str,
        [gate, up, down]: [&str; 3],
        fused: Option<&str>,
        n: usize,
        bias: bool,
    ) -> Result<DenseMlp<S::Matrix>, LoadError> {
        let (hidden, of_rank) = (self.spec.hidden_size, self.shard.rank().part_of(n));
        // The rows of gate, then as many rows of up.
        let gate_up = Part::some(&[(gate, n, of_rank.clone()), (up, n, of_rank.clone())], fused);
        let kind = (Tolerance::Any, ProductKind::Gated);
        Ok(DenseMlp {
            gate_up: self.product(block, &gate_up, &Columns::whole(hidden), bias, kind)?,
            down: self.linear(block, &Part::whole(down, hidden), &Columns { all: n, of_rank }, bias)?,
        })
    }

    /// A product whose outputs are those of `parts`, one after the other.
    fn linear(
        &mut self,
        block: &str,
        parts: &[Part],
        cols: &Columns,
        bias: bool,
    ) -> Result<Linear<S::Matrix>, LoadError> {
        self.product(block, parts, cols, bias, (Tolerance::Any, ProductKind::Plain))
    }

    fn product(
        &mut self,
        block: &str,
        parts: &[Part],
        cols: &Columns,
        bias: bool,
        (tolerance, kind): (Tolerance, ProductKind),
    ) -> Result<Linear<S::Matrix>, LoadError> {
        let rank = self.shard.rank();
        let (mut matrices, mut names, mut biases) = (Vec::new(), Vec::new(), Vec::new());
        for part in parts {
            let name = format!("{}{block}{}.weight", self.prefix, part.name);
            let tensor = self.from.take(&name, &[part.rows, cols.all])?.columns_at(cols.of_rank.clone());
            let bias =
                bias.then(|| self.vector(&format!("{block}{}.bias", part.name), part.rows)).transpose()?;
            for rows in &part.of_rank {
                matrices.push(tensor.rows_at(rows.clone()));
                names.push(name.clone());
                biases.extend(bias.iter().flat_map(|bias| &bias[rows.clone()]));
            }
        }
        let weight = self.sink.add(matrices, tolerance, kind).map_err(|split| LoadError::SplitGroup {
            path: self.from.path().to_owned(),
            tensor: names.swap_remove(split.part_idx),
            num_ranks: rank.num_ranks,
            column: split.column,
            group: split.group,
            multiple: split.multiple,
        })?;
        // The bias of an output that is summed over ranks is added by the first rank only.
        let is_added = cols.of_rank.len() == cols.all || rank.is_first();
        Ok(Linear { weight, bias: (bias && is_added).then_some(biases) })
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let mut weight = self.vector(&format!("{name}.weight"), len)?;
        if self.spec.norm_unit_offset {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(weight)
    }

    /// A vector in f32; vectors are small.
    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        Ok(self.from.take(&format!("{}{name}", self.prefix), &[len])?.to_f32())
    }
}
