//! Causal attention over paged KV: `kernels/attention_*.cu`.
//!
//! [`DecodeAttention`] computes sequences of few rows, [`PrefillAttention`] computes sequences of many rows. Each takes all its sequences in one launch. A batch of both kinds is split: an array of sequences can
//! start at any address. [`WgmmaAttention`] is [`PrefillAttention`] with Hopper's warpgroup products, for KV that
//! [`takes_wgmma`]. [`PlainAttention`] computes KV for which [`has_tensor_cores`] is false. The result of a sequence
//! does not depend on the other sequences.

use baton_cuda::CudaError;
use baton_kv_cache::{KvDtype, KvLayout};

use crate::device::KernelDevice;
use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};
use crate::kv_type;

/// The kernels for heads of `layout.head_dim` elements of `layout.dtype`.
pub fn sources(layout: &KvLayout) -> Vec<KernelSource> {
    let files = if !has_tensor_cores(layout) {
        &["attention_plain.cu"][..]
    } else {
        let files = &["attention_decode.cu", "attention_prefill.cu", WGMMA_FILE];
        &files[..if takes_wgmma(layout) { 3 } else { 2 }]
    };
    let defines = vec![("HEAD_DIM", layout.head_dim as u64), ("KV_TYPE", kv_type::number_of(layout.dtype))];
    files.iter().map(|&file| KernelSource { file, defines: defines.clone() }).collect()
}

/// [`sources`] for the KV layouts of common models.
pub fn usual_sources() -> Vec<KernelSource> {
    let of = |head_dim, dtype| {
        sources(&KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim, dtype })
    };
    let bf16 = [64, 80, 96, 128, 192, 256].map(|head_dim| of(head_dim, KvDtype::Bf16));
    let eight_bits = [64, 80, 96, 128, 256]
        .into_iter()
        .flat_map(|head_dim| [of(head_dim, KvDtype::Fp8), of(head_dim, KvDtype::Int8)]);
    let plain = [of(128, KvDtype::F16), of(128, KvDtype::F32)];
    bf16.into_iter().chain(eight_bits).chain(plain).flatten().collect()
}

/// Whether the tensor core kernels support this KV. Otherwise only [`PlainAttention`] does.
pub fn has_tensor_cores(layout: &KvLayout) -> bool {
    let is_possible = match layout.dtype {
        KvDtype::F32 | KvDtype::F16 => false,
        KvDtype::Bf16 | KvDtype::Fp8 | KvDtype::Int8 => true,
    };
    // A head's scales follow its elements. The next head must still start at a multiple of 16 bytes.
    is_possible
        && layout.head_dim.is_multiple_of(16)
        && layout.head_dim <= 256
        && layout.head_bytes().is_multiple_of(16)
}

/// Whether [`WgmmaAttention`] supports this KV.
pub fn takes_wgmma(layout: &KvLayout) -> bool {
    has_tensor_cores(layout) && [64, 128].contains(&layout.head_dim)
}

/// Arguments of all attention kernels. The keys and values of the rows are already in the cache.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AttentionArgs {
    /// `[rows][q_stride]`, bf16, aligned to 16 bytes. A row starts with its query heads, `[num_kv_heads *
    /// group][head_dim]`.
    pub q: Address,
    /// `[rows][num_kv_heads * group][head_dim]`, bf16.
    pub out: Address,
    /// The layer's piece of block 0: the pool plus [`KvLayout::layer_offset`].
    pub kv: Address,
    /// `[num_sequences][max_blocks]`, u32. The kernels read only blocks that a row attends to.
    pub block_tables: Address,
    /// `[num_sequences]`, u32: each sequence's first row.
    pub first_row: Address,
    /// `[num_sequences]`, u32: the number of rows. A sequence without rows is skipped.
    pub num_rows: Address,
    /// `[num_sequences]`, u32: the position of the first row, for [`DecodeAttention`]. It equals the number of earlier
    /// positions in the cache, and the other rows follow without a gap.
    pub start_idx: Address,
    /// `[rows]`, u32, for the other kernels: the positions of the rows, ascending in each sequence. A row attends to
    /// positions up to its own, all of which are in the cache.
    pub positions: Address,
    /// [`KvLayout::block_bytes`]
    pub block_bytes: u64,
    /// [`KvLayout::half_bytes`]
    pub half_bytes: u64,
    /// [`KvLayout::head_bytes`]
    pub head_bytes: u32,
    pub block_size: u32,
    pub max_blocks: u32,
    pub num_kv_heads: u32,
    /// Query heads per kv head.
    pub group: u32,
    /// Elements between two rows of `q`, a multiple of 8.
    pub q_stride: u32,
    /// Positions that a row attends to, its own included. `u32::MAX`: all.
    pub window: u32,
    /// Factor of the scores.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`. 0: no cap.
    pub soft_cap: f32,
    pub num_sequences: u32,
    head_dim: u32,
    kv_type: u32,
}

/// The addresses of [`AttentionArgs`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionRows {
    pub q: Address,
    pub out: Address,
    pub block_tables: Address,
    pub first_row: Address,
    pub num_rows: Address,
    pub start_idx: Address,
    pub positions: Address,
    pub max_blocks: u32,
    pub num_sequences: u32,
}

impl AttentionArgs {
    /// Arguments for layer `layer_idx` of `pool`, without window and cap.
    pub fn new(
        layout: &KvLayout,
        pool: Address,
        layer_idx: usize,
        group: usize,
        scale: f32,
        rows: &AttentionRows,
    ) -> AttentionArgs {
        AttentionArgs {
            q: rows.q,
            out: rows.out,
            kv: pool.offset_by(layout.layer_offset(layer_idx)),
            block_tables: rows.block_tables,
            first_row: rows.first_row,
            num_rows: rows.num_rows,
            start_idx: rows.start_idx,
            positions: rows.positions,
            block_bytes: layout.block_bytes() as u64,
            half_bytes: layout.half_bytes() as u64,
            head_bytes: layout.head_bytes() as u32,
            block_size: layout.block_size as u32,
            max_blocks: rows.max_blocks,
            num_kv_heads: layout.num_kv_heads as u32,
            group: group as u32,
            q_stride: ((group + 2) * layout.num_kv_heads * layout.head_dim) as u32,
            window: u32::MAX,
            scale,
            soft_cap: 0.0,
            num_sequences: rows.num_sequences,
            head_dim: layout.head_dim as u32,
            kv_type: kv_type::number_of(layout.dtype) as u32,
        }
    }

    fn num_heads(&self) -> u32 {
        self.num_kv_heads * self.group
    }

    fn is_scaled(&self) -> bool {
        self.kv_type >= 3
    }

    /// Bytes of one head's key of one token without its scale, for the tensor cores.
    fn vector_bytes(&self) -> u32 {
        if self.is_scaled() { self.head_dim } else { 2 * self.head_dim }
    }
}

/// Attention for few rows of each sequence. Splits divide the context among several blocks of threads.
///
/// Reads each key and value once per 16 pairs of row and query head: bound by memory bandwidth. The last block of
/// threads to finish a split merges all splits, in their order.
///
/// The launch shape depends only on `num_sequences` and `max_rows`. The device reads the lengths.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DecodeAttention {
    pub attention: AttentionArgs,
    pub scratch: SplitScratch,
    /// The largest number of splits of a context. See [`max_splits`].
    pub max_splits: u32,
    /// Positions of the shortest split, a multiple of 64. See [`MIN_SPLIT`].
    pub min_split: u32,
    /// The largest number of rows of a sequence.
    pub max_rows: u32,
    /// Always 0.
    pub unused: u32,
}

/// Memory of a [`DecodeAttention`], for launches that follow each other.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SplitScratch {
    /// `[rows][heads][max_splits][head_dim]`, f32: the weighted sum of a split's values.
    pub sums: Address,
    /// `[rows][heads][max_splits][2]`, f32: the largest score, and the sum of the weights relative to it.
    pub stats: Address,
    /// `[rows * heads]`, u32: counts finished splits. Zeros before the first launch; every launch leaves zeros.
    pub num_done: Address,
}

impl SplitScratch {
    /// For KV without tensor cores.
    pub const NONE: SplitScratch =
        SplitScratch { sums: Address::NULL, stats: Address::NULL, num_done: Address::NULL };

    /// Memory for `num_rows` rows.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn new<D: KernelDevice>(
        device: &mut D,
        num_rows: usize,
        num_heads: usize,
        head_dim: usize,
        max_splits: u32,
    ) -> Result<SplitScratch, CudaError> {
        let [sums, stats, num_done] = split_scratch_bytes(num_rows, num_heads, head_dim, max_splits);
        Ok(SplitScratch {
            sums: device.allocate(sums)?,
            stats: device.allocate(stats)?,
            num_done: device.allocate_holding(&vec![0; num_done])?,
        })
    }
}

/// Attention for many rows of each sequence. Bound by the tensor cores.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PrefillAttention {
    pub attention: AttentionArgs,
    /// `[num_tiles][2]`, u32, from [`prefill_tiles`]. `[u32::MAX, 0]` is skipped.
    pub tiles: Address,
    pub num_tiles: u64,
}

/// [`PrefillAttention`] with warpgroup products.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct WgmmaAttention(pub PrefillAttention);

/// Attention for any number of rows and any KV. Reads the KV once per row and query head: correct, but slow.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PlainAttention {
    pub attention: AttentionArgs,
    /// The largest number of rows of a sequence.
    pub max_rows: u64,
}

/// Pairs of row and query head in a tile of [`DecodeAttention`].
const DECODE_PAIRS: u32 = 16;
/// [`DecodeAttention::min_split`]. A split reads 4 bytes of KV for each position and number of a head (bf16), and writes and
/// reads again 8 bytes of sums for each query head and number. With 4 query heads for a kv head that is 3 % more, where
/// splits of 64 positions would add 12 %. What more blocks gain is not counted: gpu-check's figures of decode attention
/// with one sequence decide.
pub const MIN_SPLIT: u32 = 256;
/// The file of [`WgmmaAttention`].
pub const WGMMA_FILE: &str = "attention_wgmma.cu";
/// Positions of a key and value tile of [`PrefillAttention`].
const PREFILL_TOKENS: u32 = 32;

/// [`DecodeAttention::max_splits`] for a model. A single long sequence should fill a device.
pub fn max_splits(num_kv_heads: usize) -> u32 {
    (128 / num_kv_heads).next_power_of_two().clamp(4, 64) as u32
}

/// Bytes of the fields of [`SplitScratch`] for `num_rows` rows.
pub fn split_scratch_bytes(
    num_rows: usize,
    num_heads: usize,
    head_dim: usize,
    max_splits: u32,
) -> [usize; 3] {
    let parts = num_rows * num_heads * max_splits as usize;
    [parts * head_dim * 4, parts * 8, num_rows * num_heads * 4]
}

/// Pairs of row and query head in a tile of [`PrefillAttention`].
pub fn prefill_pairs(head_dim: usize) -> u32 {
    if head_dim <= 128 { 128 } else { 64 }
}

/// The largest number of tiles for `num_rows` rows of `num_sequences` sequences.
pub fn max_prefill_tiles(num_rows: usize, num_sequences: usize, group: usize, head_dim: usize) -> usize {
    (num_rows * group) / prefill_pairs(head_dim) as usize + num_sequences
}

/// The tiles of [`PrefillAttention`], each the index of its sequence and its first pair. `sequences` yields the
/// number of rows and the first position of each sequence. The most expensive tiles come first, so that blocks that
/// start late end early.
pub fn prefill_tiles(
    sequences: impl Iterator<Item = (u32, u32)>,
    group: u32,
    window: u32,
    head_dim: usize,
) -> Vec<[u32; 2]> {
    let pairs = prefill_pairs(head_dim);
    let mut tiles = Vec::new();
    for (sequence_idx, (num_rows, start_idx)) in sequences.enumerate() {
        for first_pair in (0..num_rows * group).step_by(pairs as usize) {
            let last_pair = (first_pair + pairs).min(num_rows * group) - 1;
            let first_seen = (start_idx + first_pair / group + 1).saturating_sub(window);
            let end = start_idx + last_pair / group + 1;
            tiles.push((end - first_seen, [sequence_idx as u32, first_pair]));
        }
    }
    tiles.sort_by_key(|&(cost, _)| std::cmp::Reverse(cost));
    tiles.into_iter().map(|(_, tile)| tile).collect()
}

/// Bytes of a row in shared memory: an odd multiple of 16 bytes. The kernel file says why.
fn padded(num_bytes: u32) -> u32 {
    if (num_bytes / 16).is_multiple_of(2) { num_bytes + 16 } else { num_bytes }
}

// SAFETY: the fields are those of `DecodeAttention` in the kernel file.
unsafe impl Kernel for DecodeAttention {
    const NAME: &'static str = "decode_attention";

    fn shape(&self) -> LaunchShape {
        let a = &self.attention;
        debug_assert!(self.min_split.is_multiple_of(64), "splits end where tiles of warps do");
        let num_warps = if a.head_dim <= 128 { 4 } else { 2 };
        let num_stages = if a.is_scaled() { 4 } else { 2 };
        let stages = num_warps * num_stages * 2 * 16 * padded(a.vector_bytes());
        let merged = num_warps * 16 * (a.head_dim + 8 + 2) * 4;
        let num_tiles = (self.max_rows * a.group).div_ceil(DECODE_PAIRS);
        LaunchShape {
            grid: [self.max_splits * num_tiles, a.num_kv_heads, a.num_sequences],
            threads: num_warps * 32,
            shared_bytes: stages.max(merged),
        }
    }
}

// SAFETY: the fields are those of `PrefillAttention` in the kernel file.
unsafe impl Kernel for PrefillAttention {
    const NAME: &'static str = "prefill_attention";

    fn shape(&self) -> LaunchShape {
        let a = &self.attention;
        let row = padded(2 * a.head_dim);
        let num_tiles = if a.is_scaled() { 2 } else { 4 };
        let widened = if a.is_scaled() { 2 * PREFILL_TOKENS * (a.head_dim + 4) } else { 0 };
        let shared_bytes =
            prefill_pairs(a.head_dim as usize) * row + num_tiles * PREFILL_TOKENS * row + widened;
        LaunchShape { grid: [self.num_tiles as u32, a.num_kv_heads, 1], threads: 128, shared_bytes }
    }
}

// SAFETY: the fields are those of `PrefillAttention` in the kernel file.
unsafe impl Kernel for WgmmaAttention {
    const NAME: &'static str = "wgmma_attention";

    fn shape(&self) -> LaunchShape {
        let PrefillAttention { attention: a, num_tiles, .. } = &self.0;
        // Queries, two tiles of keys, two tiles of values. With 8-bit KV also the codes of a tile of keys and of a tile
        // of values, and the scales of four tiles of each.
        let tile = prefill_pairs(a.head_dim as usize);
        let codes = if a.is_scaled() { 2 * tile * a.head_dim + 8 * tile * 4 } else { 0 };
        let shared_bytes = 5 * tile * a.head_dim * 2 + codes;
        LaunchShape { grid: [*num_tiles as u32, a.num_kv_heads, 1], threads: 384, shared_bytes }
    }
}

// SAFETY: the fields are those of `PlainAttention` in the kernel file.
unsafe impl Kernel for PlainAttention {
    const NAME: &'static str = "plain_attention";

    fn shape(&self) -> LaunchShape {
        let a = &self.attention;
        debug_assert!(self.max_rows <= 65_535, "blocks in y");
        let grid = [a.num_heads(), self.max_rows as u32, a.num_sequences];
        LaunchShape { grid, threads: 256, shared_bytes: 0 }
    }
}
