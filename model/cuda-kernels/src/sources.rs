//! All kernels, for the shapes of common models. `cargo xtask cuda-check` compiles them, and releases install them.

use std::collections::HashSet;

use baton_kv_cache::{KvDtype, KvLayout};
use baton_model_spec::Activation;

use crate::kernel::KernelSource;
use crate::{
    attention, blend, blocks, checksum, codes, embed, expert_products, experts, gate, norm, one_row,
    products, ranks, rope, rows, sample,
};

/// Numbers of a head in common models.
const HEAD_DIMS: [usize; 6] = [64, 80, 96, 128, 192, 256];

/// The default of `--block-size`.
const BLOCK_SIZE: usize = 16;

/// Numbers of a head, and how many of them Phi-4-mini rotates. Other models rotate all.
const PARTIALLY_ROTATED: (usize, usize) = (128, 96);

/// Every file, for the shapes of common models. Each source occurs once.
pub fn all_sources() -> Vec<KernelSource> {
    let of_layouts = layouts().into_iter().flat_map(|layout| {
        let (head_dim, rotary_dim) = PARTIALLY_ROTATED;
        let partial = (layout.head_dim == head_dim).then_some(rotary_dim);
        let ropes = [layout.head_dim].into_iter().chain(partial);
        let ropes: Vec<KernelSource> = ropes.map(|rotary_dim| rope::source(rotary_dim, &layout)).collect();
        [attention::sources(&layout), ropes, vec![codes::source(&layout)]].concat()
    });
    let gates = [Activation::Silu, Activation::Gelu, Activation::GeluTanh].map(gate::source);
    let others = [
        blend::source(),
        embed::source(),
        norm::source(),
        one_row::source(),
        rows::source(),
        sample::source(),
        experts::source(),
        blocks::source(),
        checksum::source(),
        ranks::source(),
    ];
    let products = [products::sources(), expert_products::sources()].concat();
    let all = of_layouts.chain(attention::usual_sources()).chain(products).chain(gates).chain(others);
    let mut seen = HashSet::new();
    all.filter(|source| seen.insert(source.clone())).collect()
}

/// Every kv type, for heads of every size; f16 and f32, for which there are no fast kernels, with the most common sizes.
fn layouts() -> Vec<KvLayout> {
    let is_common = |head_dim, dtype| {
        matches!(dtype, KvDtype::Bf16 | KvDtype::Fp8 | KvDtype::Int8) || [64, 128].contains(&head_dim)
    };
    let of = |head_dim, dtype| KvLayout {
        block_size: BLOCK_SIZE,
        num_layers: 1,
        num_kv_heads: 1,
        head_dim,
        dtype,
    };
    let all = HEAD_DIMS.into_iter().flat_map(|head_dim| KvDtype::ALL.map(|dtype| (head_dim, dtype)));
    all.filter(|&(head_dim, dtype)| is_common(head_dim, dtype))
        .map(|(head_dim, dtype)| of(head_dim, dtype))
        .collect()
}
