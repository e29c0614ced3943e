//! Properties of KV blocks that kernels are compiled for: the element type as a number, and the alignment.

use baton_kv_cache::{KvDtype, KvLayout};

/// The number of the type in `kv::` of `kernels/common.cuh`.
pub fn number_of(dtype: KvDtype) -> u64 {
    KvDtype::ALL.iter().position(|&other| other == dtype).expect("all are there") as u64
}

/// Alignment of every vector in bytes, at most 16, if block 0 is aligned.
pub fn alignment(layout: &KvLayout) -> u64 {
    let places = layout.head_bytes() | (layout.head_dim * layout.dtype.size_bytes()) | 16;
    1 << places.trailing_zeros()
}
