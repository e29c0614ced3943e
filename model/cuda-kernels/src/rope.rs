//! Rotary position embeddings, and the stores of keys and values: `kernels/rope.cu`.
//!
//! Values that all layers share are computed once: [`PlaceRows`] looks up the slots of rows in the pool,
//! [`RopeTable`] computes cosines and sines of positions. Both read per-step values from memory, and padding rows
//! have no slot. A graph of the launches can therefore be replayed.

use baton_kv_cache::KvLayout;

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};
use crate::kv_type;

/// For heads whose first `rotary_dim` elements are rotated, and KV of this layout.
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

/// Looks up the slots of rows in the pool. Moves 16 bytes per row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PlaceRows {
    /// `[rows]`, u32.
    pub positions: Address,
    /// `[rows]`, u32: the row's block table, or [`NONE`](crate::rows::NONE).
    pub sequence_of: Address,
    /// `[sequences][max_blocks]`, u32.
    pub block_tables: Address,
    /// `[rows]`, u32, output: block * block_size + offset of the position in the block, or
    /// [`NONE`](crate::rows::NONE).
    pub slots: Address,
    pub max_blocks: u32,
    pub block_size: u32,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `PlaceRows` in the kernel file.
unsafe impl Kernel for PlaceRows {
    const NAME: &'static str = "place_rows";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_rows.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// Cosines and sines of a batch's positions. Angles are rounded to f32; their cosines and sines are computed in f64,
/// as on processors.
///
/// Takes some hundred f64 operations per number, once per batch: bound by arithmetic.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RopeTable {
    /// `[rows]`, u32.
    pub positions: Address,
    /// `[rotary_dim / 2]`, f32: [`RopeSpec::inverse_frequencies`](baton_model_spec::RopeSpec::inverse_frequencies).
    pub inverse_frequencies: Address,
    /// `[rows][2][rotary_dim / 2]`, f32, output: cosines, then sines.
    pub cos_sin: Address,
    /// Factor of both: [`RopeSpec::attention_factor`](baton_model_spec::RopeSpec::attention_factor).
    pub factor: f32,
    pub num_rows: u32,
    /// Read by the launch shape only.
    pub rotary_dim: u64,
}

// SAFETY: the fields are those of `RopeTable` in the kernel file.
unsafe impl Kernel for RopeTable {
    const NAME: &'static str = "rope_table";

    fn shape(&self) -> LaunchShape {
        let numbers = u64::from(self.num_rows) * (self.rotary_dim / 2);
        LaunchShape { grid: [numbers.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// Adds the projection's bias, norms and rotates the heads of queries and keys, writes queries back, and stores keys
/// and values in their blocks. Stored bits equal those of
/// [`store_vector`](baton_kv_cache::VectorCodec::store_vector). The keys and values in `qkv` keep the output of
/// the projection.
///
/// Moves 4 bytes per element of queries, 3 to 6 per element of keys and values, and 4 `rotary_dim` bytes per row:
/// bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct StoreQkv {
    /// `[rows][(num_heads + 2 num_kv_heads) * head_dim]`, bf16: queries, keys, values.
    pub qkv: Address,
    /// `[rows]`, from [`PlaceRows`].
    pub slots: Address,
    /// From [`RopeTable`].
    pub cos_sin: Address,
    /// `[head_dim]`, f32, or null.
    pub query_norm: Address,
    /// `[head_dim]`, f32, or null.
    pub key_norm: Address,
    /// `[(num_heads + 2 num_kv_heads) * head_dim]`, f32, or null. This kernel adds the bias instead of the product:
    /// that saves a pass over the rows and a rounding of the sum.
    pub bias: Address,
    /// The layer's piece of block 0, aligned to 16 bytes.
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

/// Lanes that share a head.
pub fn lanes(head_dim: usize, rotary_dim: usize) -> u32 {
    let half = rotary_dim / 2;
    let chunk = 1 << (half | head_dim | 8).trailing_zeros();
    let pairs = half / chunk + ((head_dim - rotary_dim) / chunk).div_ceil(2);
    pairs.next_power_of_two().min(32) as u32
}

// SAFETY: the fields are those of `StoreQkv` in the kernel file.
unsafe impl Kernel for StoreQkv {
    const NAME: &'static str = "store_qkv";

    fn shape(&self) -> LaunchShape {
        let heads = u64::from(self.num_rows) * u64::from(self.num_heads + 2 * self.num_kv_heads);
        let grid = heads.div_ceil(u64::from(128 / self.lanes)) as u32;
        LaunchShape { grid: [grid, 1, 1], threads: 128, shared_bytes: 0 }
    }
}
