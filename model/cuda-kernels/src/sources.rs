//! All kernels, for the shapes of common models. `cargo xtask cuda-check` compiles them.

use baton_kv_cache::{KvDtype, KvLayout};
use baton_model_spec::Activation;

use crate::kernel::KernelSource;
use crate::{
    attention, blocks, checksum, codes, embed, expert_products, experts, gate, norm, products, ranks, rope,
    rows, sample,
};

/// Every file, for the shapes of common models.
pub fn all_sources() -> Vec<KernelSource> {
    let layout =
        |head_dim, dtype| KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim, dtype };
    let ropes = [64, 128]
        .into_iter()
        .flat_map(|head_dim| KvDtype::ALL.map(|dtype| rope::source(head_dim, &layout(head_dim, dtype))));
    let gates = [Activation::Silu, Activation::Gelu, Activation::GeluTanh].map(gate::source);
    let others = [
        embed::source(),
        norm::source(),
        rows::source(),
        sample::source(),
        experts::source(),
        blocks::source(),
        checksum::source(),
        ranks::source(),
    ];
    let large =
        [attention::usual_sources(), products::sources(), expert_products::sources(), codes::sources()]
            .concat();
    large.into_iter().chain(ropes).chain(gates).chain(others).collect()
}
