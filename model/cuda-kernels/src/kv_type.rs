//! How blocks of KV are told to kernels: a number for the type of their elements, and their alignment.

use baton_kv_cache::{KvDtype, KvLayout};

/// What `kv::` in `kernels/common.cuh` calls it.
pub fn number_of(dtype: KvDtype) -> u64 {
    KvDtype::ALL.iter().position(|&other| other == dtype).expect("all are there") as u64
}

/// Bytes, at most 16, to which the elements of every vector are aligned, if block 0 is.
pub fn alignment(layout: &KvLayout) -> u64 {
    let places = layout.head_bytes() | (layout.head_dim * layout.dtype.size_bytes()) | 16;
    1 << places.trailing_zeros()
}
