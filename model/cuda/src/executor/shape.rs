//! The kernels that a model needs, and whether there are kernels for its shape.

use baton_checkpoint::DeviceModel;
use baton_cuda_kernels::device::NUM_MARKS;
use baton_cuda_kernels::kernel::KernelSource;
use baton_cuda_kernels::products::{self, WeightKind};
use baton_cuda_kernels::{
    attention, blend, blocks, embed, expert_products, experts, gate, norm, one_row, ranks, rope, rows, sample,
};
use baton_kv_cache::KvLayout;
use baton_model_spec::{Activation, DecoderSpec, MlpSpec};

use crate::error::StartError;
use crate::multiply::EXPERT_TILE_ROWS;
use crate::weights;

/// All kernels of a model.
pub fn sources(model: &DeviceModel) -> Vec<KernelSource> {
    let kinds = weights::kinds(model.weights()).into_iter().filter(|kind| *kind != WeightKind::Bf16);
    let mut sources = sources_of(model.shard().spec(), &model.kv_layout_of_rank());
    sources.extend(kinds.map(products::source));
    sources.extend((model.shard().rank().num_ranks > 1).then(ranks::source));
    sources
}

/// The kernels of a decoder, or of a rank's part of it, with bf16 weights.
pub fn sources_of(spec: &DecoderSpec, layout: &KvLayout) -> Vec<KernelSource> {
    [
        blend::source(),
        blocks::source(),
        embed::source(),
        norm::source(),
        one_row::source(),
        rows::source(),
        sample::source(),
        gate::source(spec.activation),
        rope::source(spec.ropes[0].rotary_dim, layout),
    ]
    .into_iter()
    .chain(attention::sources(layout))
    .chain(
        is_routed(spec)
            .then(|| [experts::source()].into_iter().chain(expert_sources(spec.activation)))
            .into_iter()
            .flatten(),
    )
    .collect()
}

/// The products of experts with this activation.
pub fn expert_sources(activation: Activation) -> Vec<KernelSource> {
    let of = |gate| [expert_products::source(EXPERT_TILE_ROWS, gate), expert_products::wgmma_source(gate)];
    [None, Some(activation)].into_iter().flat_map(of).collect()
}

fn is_routed(spec: &DecoderSpec) -> bool {
    spec.layers.iter().any(|layer| matches!(layer.mlp, MlpSpec::Experts { .. }))
}

/// Checks that there are kernels for the model's shape.
pub fn check_shape(model: &DeviceModel) -> Result<(), StartError> {
    let (spec, rank) = (model.shard().spec(), model.shard().rank());
    let shape = |what, found, expected| Err(StartError::Shape { what, found, expected });
    let mut widths = vec![
        ("hidden_size", spec.hidden_size),
        ("num_attention_heads * head_dim", spec.query_width()),
        ("num_key_value_heads * head_dim", spec.kv_width()),
    ];
    for layer in &spec.layers {
        let (MlpSpec::Dense { intermediate_size } | MlpSpec::Experts { intermediate_size, .. }) = layer.mlp;
        widths.push(("intermediate_size", intermediate_size));
        if let MlpSpec::Experts { num_active: 33.., .. } = layer.mlp {
            return shape("num_experts_per_tok", 33, "at most 32");
        }
    }
    if let Some(&(what, found)) = widths.iter().find(|(_, width)| !width.is_multiple_of(8)) {
        let expected = match rank.num_ranks {
            1 => "a multiple of 8",
            _ => "a multiple of 8 in each rank's part (a smaller tensor parallel degree may give that)",
        };
        return shape(what, found, expected);
    }
    if spec.layers.len() > NUM_MARKS {
        return shape("num_hidden_layers", spec.layers.len(), "at most 1024");
    }
    // The sampling kernel keeps a sum for each part of a row in shared memory.
    if spec.vocab_size > 4 << 20 {
        return shape("vocab_size", spec.vocab_size, "at most 4194304");
    }
    let rotary_dim = spec.ropes[0].rotary_dim;
    match spec.ropes.iter().find(|rope| rope.rotary_dim != rotary_dim) {
        Some(other) => shape("rotary_dim", other.rotary_dim, "the same in all layers"),
        None => Ok(()),
    }
}
