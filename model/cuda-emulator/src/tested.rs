//! The sources of kernels that tests load on a device. `cargo xtask gpu-check --pack` compiles them, because a machine with a GPU
//! may have no NVRTC. A test that loads another source fails, on the emulator too, so that this list is complete.

use std::collections::HashSet;
use std::sync::OnceLock;

use baton_cuda_kernels::kernel::KernelSource;
use baton_cuda_kernels::products;
use baton_cuda_kernels::{
    attention, blend, blocks, checksum, codes, embed, expert_products, experts, gate, norm, one_row, ranks,
    rope, rows, sample,
};
use baton_kv_cache::KvDtype::{self, Bf16, F16, F32, Fp8, Int8};
use baton_kv_cache::KvLayout;
use baton_model_spec::Activation;

/// The kv of models: its type, the numbers of a head, how many of them are rotated, and the tokens of a block. The first is that
/// of the embedded model, the second that of `gpu_check`. The next are those of `tests/parity/fixtures`.
const MODELS: [(KvDtype, usize, usize, usize); 13] = [
    (Bf16, 64, 64, 16),
    (Bf16, 128, 128, 16),
    (Bf16, 8, 8, 8),
    (Bf16, 12, 12, 8),
    (Bf16, 16, 12, 8),
    (Bf16, 16, 16, 8),
    (Bf16, 20, 20, 8),
    (Bf16, 24, 24, 8),
    (Bf16, 32, 32, 8),
    (F32, 32, 32, 5),
    (F16, 32, 32, 8),
    (Fp8, 32, 32, 8),
    (Int8, 32, 32, 5),
];

/// The same for tests of attention alone, without the rotation.
const ATTENTION: [(KvDtype, usize, usize); 10] = [
    (Bf16, 256, 16),
    (Fp8, 64, 16),
    (Fp8, 80, 16),
    (Fp8, 128, 16),
    (Int8, 96, 16),
    (Int8, 128, 16),
    (F32, 64, 16),
    (F16, 72, 16),
    (Fp8, 64, 5),
    (Int8, 96, 1),
];

/// The same as [`MODELS`] for tests of the rotation alone.
const ROPES: [(KvDtype, usize, usize, usize); 5] =
    [(F32, 80, 32, 5), (F16, 20, 12, 3), (Fp8, 10, 6, 7), (Fp8, 256, 256, 16), (Int8, 64, 64, 5)];

/// The pools of tests of handoffs: the type, the numbers of a head, and the tokens of a block.
const POOLS: [(KvDtype, usize, usize); 9] = [
    (Bf16, 64, 16),
    (Bf16, 128, 16),
    (F32, 320, 3),
    (F16, 37, 4),
    (Int8, 96, 5),
    (Int8, 10, 4),
    (Bf16, 64, 1),
    (Bf16, 10, 4),
    (Bf16, 10, 1),
];

/// All sources that tests load, each once.
pub fn tested_sources() -> Vec<KernelSource> {
    let mut sources = vec![
        blend::source(),
        blocks::source(),
        checksum::source(),
        embed::source(),
        experts::source(),
        norm::source(),
        one_row::source(),
        ranks::source(),
        rows::source(),
        sample::source(),
        sample::source_with(64),
    ];
    sources.extend(products::sources());
    sources.extend(expert_products::sources());
    sources.extend([Activation::Silu, Activation::Gelu, Activation::GeluTanh].map(gate::source));
    for (dtype, head_dim, rotary_dim, block_size) in MODELS {
        let layout = layout(dtype, head_dim, block_size);
        sources.extend(attention::sources(&layout));
        sources.push(rope::source(rotary_dim, &layout));
    }
    for (dtype, head_dim, block_size) in ATTENTION {
        sources.extend(attention::sources(&layout(dtype, head_dim, block_size)));
    }
    for (dtype, head_dim, rotary_dim, block_size) in ROPES {
        sources.push(rope::source(rotary_dim, &layout(dtype, head_dim, block_size)));
    }
    for (dtype, head_dim, block_size) in POOLS {
        sources.push(codes::source(&layout(dtype, head_dim, block_size)));
    }
    let mut seen = HashSet::new();
    sources.retain(|source| seen.insert(source.clone()));
    sources
}

fn layout(dtype: KvDtype, head_dim: usize, block_size: usize) -> KvLayout {
    KvLayout { block_size, num_layers: 1, num_kv_heads: 1, head_dim, dtype }
}

/// # Panics
/// When one of the sources is not in the list.
pub(crate) fn check(sources: &[KernelSource]) {
    static TESTED: OnceLock<HashSet<KernelSource>> = OnceLock::new();
    let tested = TESTED.get_or_init(|| tested_sources().into_iter().collect());
    for source in sources {
        assert!(
            tested.contains(source),
            "add {source:?} to model/cuda-emulator/src/tested.rs, for gpu-check"
        );
    }
}
