//! Rotary position embeddings, and where keys and values go: `kernels/rope.cu`.
//!
//! What is the same in all layers is computed once: [`PlaceRows`] looks up where rows are in the pool, [`RopeTable`] turns
//! positions into cosines and sines. Both read what changes from step to step from memory, and rows that only fill up a
//! batch have no slot, so that a graph of them can be replayed.

use baton_kv_cache::KvLayout;

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};
use crate::kv_type;

/// For heads of which the first `rotary_dim` elements are rotated, and KV of this layout.
pub fn source(rotary_dim: usize, layout: &KvLayout) -> KernelSource {
    KernelSource {
        file: "rope.cu",
        defines: vec![
            ("HEAD_DIM", layout.head_dim as u64),
            ("ROTARY_DIM", rotary_dim as u64),
            ("KV", kv_type::number_of(layout.dtype)),
            ("ALIGN", kv_type::alignment(layout)),
        ],
    }
}

/// Looks rows' places in the pool up. 16 bytes a row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PlaceRows {
    /// `[rows]`, u32.
    pub positions: Address,
    /// `[rows]`, u32: which row of the tables, or [`NONE`](crate::rows::NONE).
    pub sequence_of: Address,
    /// `[sequences][max_blocks]`, u32.
    pub block_tables: Address,
    /// `[rows]`, u32, written: block * block_size + the position's place in it, or [`NONE`](crate::rows::NONE).
    pub slots: Address,
    pub max_blocks: u32,
    pub block_size: u32,
    pub num_rows: u64,
}

// SAFETY: as `PlaceRows` in the file.
unsafe impl Kernel for PlaceRows {
    const NAME: &'static str = "place_rows";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_rows.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// Cosines and sines of a batch's positions. Angles are rounded to f32, and their cosines and sines computed in f64, as
/// the processor's pass does.
///
/// Some hundred operations of f64 a number: bound by those, once a batch.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RopeTable {
    /// `[rows]`, u32.
    pub positions: Address,
    /// `[rotary_dim / 2]`, f32: [`RopeSpec::inverse_frequencies`](baton_model_spec::RopeSpec::inverse_frequencies).
    pub inverse_frequencies: Address,
    /// `[rows][2][rotary_dim / 2]`, f32, written: cosines, then sines.
    pub cos_sin: Address,
    /// On both: [`RopeSpec::attention_factor`](baton_model_spec::RopeSpec::attention_factor).
    pub factor: f32,
    pub num_rows: u32,
    /// For the shape.
    pub rotary_dim: u64,
}

// SAFETY: as `RopeTable` in the file.
unsafe impl Kernel for RopeTable {
    const NAME: &'static str = "rope_table";

    fn shape(&self) -> LaunchShape {
        let numbers = u64::from(self.num_rows) * (self.rotary_dim / 2);
        LaunchShape { grid: [numbers.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// Adds the projection's bias, norms and rotates heads of queries and keys, writes queries back, and keys and values to their blocks, rounded as
/// [`KvDtype::store_vector`](baton_kv_cache::KvDtype::store_vector) does to the bit. Keys and values stay in the row as
/// the projection made them.
///
/// Moves 4 bytes an element of queries, 3 to 6 of keys and values, and 4 of `rotary_dim` a row: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct StoreQkv {
    /// `[rows][(num_heads + 2 num_kv_heads) * head_dim]`, bf16: queries, keys, values.
    pub qkv: Address,
    /// `[rows]`, by [`PlaceRows`].
    pub slots: Address,
    /// By [`RopeTable`].
    pub cos_sin: Address,
    /// `[head_dim]`, f32, or null.
    pub query_norm: Address,
    /// `[head_dim]`, f32, or null.
    pub key_norm: Address,
    /// `[(num_heads + 2 num_kv_heads) * head_dim]`, f32, or null. Here, and not with the product: it costs no pass over the rows,
    /// and the sum is not rounded.
    pub bias: Address,
    /// The layer in block 0, aligned to 16 bytes.
    pub layer: Address,
    pub block_bytes: u64,
    pub num_rows: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    pub block_size: u32,
    pub eps: f32,
    /// [`lanes`] of its source.
    pub lanes: u32,
}

/// Lanes that a head takes.
pub fn lanes(head_dim: usize, rotary_dim: usize) -> u32 {
    let half = rotary_dim / 2;
    let chunk = 1 << (half | head_dim | 8).trailing_zeros();
    let pairs = half / chunk + ((head_dim - rotary_dim) / chunk).div_ceil(2);
    pairs.next_power_of_two().min(32) as u32
}

// SAFETY: as `StoreQkv` in the file.
unsafe impl Kernel for StoreQkv {
    const NAME: &'static str = "store_qkv";

    fn shape(&self) -> LaunchShape {
        let heads = u64::from(self.num_rows) * u64::from(self.num_heads + 2 * self.num_kv_heads);
        let grid = heads.div_ceil(u64::from(128 / self.lanes)) as u32;
        LaunchShape { grid: [grid, 1, 1], threads: 128, shared_bytes: 0 }
    }
}
