//! Products of few rows with weights below bf16, and the kernels around a library's products of many rows:
//! `kernels/products.cu`.
//!
//! The bits of a row's result do not depend on the other rows or their number. Sums are f32. Weights enter the sums
//! exactly; scales and zeros are applied to the sum of each group.

use crate::device::FP8_BLOCK;
use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};
use crate::rows::by_eights;

/// Formats of weights. All are row-major, `[n][k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum WeightKind {
    /// K is a multiple of 8.
    Bf16 = 0,
    /// E4M3, as in the files, finite numbers only. K is a multiple of 16. Groups are multiples of 64, or whole rows.
    Fp8 = 1,
    /// In the layout of [`pack`]. K is a multiple of 8, groups are multiples of 32.
    Int8 = 2,
    /// As [`Int8`](WeightKind::Int8).
    Int4 = 3,
}

impl WeightKind {
    pub const ALL: [WeightKind; 4] = [WeightKind::Bf16, WeightKind::Fp8, WeightKind::Int8, WeightKind::Int4];

    fn is_integer(self) -> bool {
        matches!(self, WeightKind::Int8 | WeightKind::Int4)
    }

    /// Numbers in 64 bytes of a row. Four lanes read them together.
    fn step(self) -> usize {
        match self {
            WeightKind::Bf16 => 32,
            WeightKind::Fp8 | WeightKind::Int8 => 64,
            WeightKind::Int4 => 128,
        }
    }

    /// Bytes from one row to the next.
    pub fn row_bytes(self, k: usize) -> usize {
        match self {
            WeightKind::Bf16 => 2 * k,
            WeightKind::Fp8 => k,
            WeightKind::Int8 | WeightKind::Int4 => k.div_ceil(self.step()) * 64,
        }
    }
}

/// 1 in E4M3.
pub const E4M3_ONE: u8 = 0x38;

/// The kernels of a kind below bf16.
pub fn source(kind: WeightKind) -> KernelSource {
    debug_assert!(kind != WeightKind::Bf16, "libraries multiply bf16");
    KernelSource { file: "products.cu", defines: vec![("WEIGHTS", kind as u64)] }
}

/// For each kind below bf16.
pub fn sources() -> Vec<KernelSource> {
    WeightKind::ALL.into_iter().filter(|kind| *kind != WeightKind::Bf16).map(source).collect()
}

/// Packs a row of levels in the order of the kernels, into its [`row_bytes`](WeightKind::row_bytes).
///
/// A step is 64 (int8) or 128 (int4) numbers: 16 bytes for each of four lanes. Lane `i` has the eight numbers from `8
/// i` on of every 32. Int8 numbers are stored as `level - 128`, signed, in the order 0 2 1 3 and 4 6 5 7. Eight int4
/// numbers are one word: numbers 0 2 4 6 in the low half, from the lowest bits on, numbers 1 3 5 7 in the high half.
/// The end of the last step is filled up with level 0.
pub fn pack(levels: &[u8], kind: WeightKind, to: &mut [u8]) {
    let unit_bytes = if kind == WeightKind::Int8 { 8 } else { 4 };
    assert_eq!(to.len(), kind.row_bytes(levels.len()), "bytes of a row");
    to.fill(match kind {
        WeightKind::Int8 => 0x80,
        WeightKind::Int4 => 0,
        WeightKind::Bf16 | WeightKind::Fp8 => unreachable!("integers are packed"),
    });
    for (step, to) in levels.chunks(kind.step()).zip(to.chunks_exact_mut(64)) {
        for (idx, eight) in step.chunks(8).enumerate() {
            let mut unit = [0; 8];
            unit[..eight.len()].copy_from_slice(eight);
            let (lane, unit_idx) = (idx % 4, idx / 4);
            let to = &mut to[16 * lane + unit_bytes * unit_idx..][..unit_bytes];
            match kind {
                WeightKind::Int8 => {
                    to.copy_from_slice(&[0, 2, 1, 3, 4, 6, 5, 7].map(|idx| unit[idx] ^ 0x80));
                }
                _ => {
                    let pair = |first: usize| unit[first] | unit[first + 2] << 4;
                    to.copy_from_slice(&[pair(0), pair(4), pair(1), pair(5)]);
                }
            }
        }
    }
}

/// Scales and zeros that groups of weights share. Output `n` and input `k` find theirs at `n / rows_per_scale *
/// row_stride + k / group * group_stride`. Integers have a scale for each row, at a stride of 1, and a `group_stride`
/// that is a multiple of 4: kernels load the scales of four rows at once. There are fewer than 2^32 scales.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scales {
    /// f32. Not read for bf16.
    pub scales: Address,
    /// f32: the level that stands for zero, minus the middle of the levels. Null: the format has no zeros. Fp8 never
    /// has.
    pub zeros: Address,
    pub rows_per_scale: u32,
    pub row_stride: u32,
    pub group_stride: u32,
    pub group: u32,
}

impl Scales {
    /// The scales of bf16.
    pub const NONE: Scales = Scales {
        scales: Address::NULL,
        zeros: Address::NULL,
        rows_per_scale: 1,
        row_stride: 0,
        group_stride: 0,
        group: 64,
    };

    /// The scales after the first `first` rows. `first` is a multiple of `rows_per_scale`.
    pub fn after(self, first: usize) -> Scales {
        debug_assert!(first.is_multiple_of(self.rows_per_scale as usize), "rows of a scale");
        let offset = first / self.rows_per_scale as usize * self.row_stride as usize * 4;
        let moved = |at: Address| if at == Address::NULL { at } else { at.offset_by(offset) };
        Scales { scales: moved(self.scales), zeros: moved(self.zeros), ..self }
    }
}

/// Outputs of a block of threads of [`MultiplyFew`].
const OUTPUTS: usize = 128;

/// Rows that [`MultiplyFew`] multiplies in one pass over the weights, if there are more than 16 and no experts.
pub const PASS_ROWS: usize = 32;

/// Blocks that fill a GPU: two on each of an H100's 132 multiprocessors.
const WANTED_BLOCKS: usize = 264;

/// A part of K has this many chunks at least: with fewer, it would take longer to add the parts than to compute them.
const LEAST_PART_CHUNKS: usize = 4;

/// How [`MultiplyFew`] divides K among blocks. It depends on the matrix alone, so that the bits of a row do not depend on the
/// number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct KParts {
    /// At least 1.
    pub num: u32,
    /// Of a part; the last may have fewer. A chunk is two times the numbers in 64 bytes of a row.
    pub chunks: u32,
}

impl KParts {
    /// One.
    pub const ONE: KParts = KParts { num: 1, chunks: 0 };

    /// As many as it takes to fill a GPU with blocks.
    pub fn of(kind: WeightKind, n: usize, k: usize) -> KParts {
        let num_chunks = k.div_ceil(2 * kind.step());
        let wanted = WANTED_BLOCKS / n.div_ceil(OUTPUTS);
        let chunks = num_chunks.div_ceil(wanted.max(1)).max(LEAST_PART_CHUNKS.min(num_chunks));
        let num = num_chunks.div_ceil(chunks) as u32;
        if num == 1 { KParts::ONE } else { KParts { num, chunks: chunks as u32 } }
    }

    /// Bytes of [`MultiplyFew::part_sums`] and [`MultiplyFew::parts_done`].
    pub fn scratch_bytes(self, n: usize, num_rows: usize) -> (usize, usize) {
        if self.num == 1 {
            return (0, 0);
        }
        let sums = self.num as usize * num_rows * n.next_multiple_of(4) * 4;
        (sums, num_rows.div_ceil(PASS_ROWS) * n.div_ceil(OUTPUTS) * 4)
    }
}

/// `out[place][n] = sum over k of x[row][k] w[n][k] + bias[n]`, rounded to the output's type once. Without experts a
/// place is a row. With experts `rows` gives the row of each place, and `w` is the matrix of the place's expert.
///
/// Reads each weight once per 16 rows (per [`PASS_ROWS`], if there are more than 16 and no experts), with two operations per
/// weight and row: bound by memory bandwidth, or by the L2 cache.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MultiplyFew {
    /// `[..][k]`, bf16.
    pub x: Address,
    /// `[places]`, u32: the row of `x` at each place. Null: `x` is `[places][k]`.
    pub rows: Address,
    /// `[num_experts + 1]`, u32: each expert's first place ([`SortPairs`](crate::experts::SortPairs)). Null: there is
    /// one matrix and `num_rows` places.
    pub offsets: Address,
    /// `[num_experts][n]`, rows of [`row_bytes`](WeightKind::row_bytes). With experts of integers, `n` is a multiple of
    /// 4.
    pub weights: Address,
    /// The scales of all experts' outputs, in their order.
    pub scales: Scales,
    /// `[n]`, f32, or null. Null with experts.
    pub bias: Address,
    /// `[places][n]`: f32 if `is_f32`, otherwise bf16.
    pub out: Address,
    pub k: u32,
    pub n: u32,
    pub num_rows: u32,
    /// At least 1.
    pub num_experts: u32,
    /// 0 or 1.
    pub is_f32: u32,
    /// The kind of its [`source`]: not bf16.
    pub kind: WeightKind,
    /// [`KParts::ONE`] with experts.
    pub parts: KParts,
    /// `[parts][num_rows][n, padded to a multiple of 4]`, f32. Null if there is one part.
    pub part_sums: Address,
    /// u32 for each pass of rows and 128 outputs: zeros between launches. Null if there is one part.
    pub parts_done: Address,
}

impl MultiplyFew {
    fn is_wide(&self) -> bool {
        self.offsets == Address::NULL && self.num_rows > 16
    }

    /// Stages of shared memory, each with a chunk of rows, weights, scales and zeros: `StageLayout` in the kernel file. They fit
    /// 99 KiB, which every supported card has for a block (CUDA C++ Programming Guide, compute capabilities 8.9 and 12.0).
    fn shared_bytes(&self) -> u32 {
        let rows = if self.is_wide() { PASS_ROWS } else { 16 };
        let x = rows * 2 * self.kind.step() * 2;
        let weights = OUTPUTS * 128;
        let tables = match (self.kind.is_integer(), self.scales.zeros != Address::NULL) {
            (false, _) => 0,
            (true, has_zeros) => 1 + usize::from(has_zeros),
        };
        let table = 2 * self.kind.step() / 32 * OUTPUTS * 4;
        let stages = if self.kind == WeightKind::Int4 && self.is_wide() { 2 } else { 3 };
        (stages * (x + weights + tables * table)) as u32
    }
}

// SAFETY: the fields are those of `MultiplyFew` in the kernel file.
unsafe impl Kernel for MultiplyFew {
    const NAME: &'static str = "multiply_few";

    fn name(&self) -> &'static str {
        let has_zeros = self.scales.zeros != Address::NULL;
        match (self.kind, self.is_wide(), has_zeros) {
            (WeightKind::Bf16, ..) => unreachable!("libraries multiply bf16"),
            (WeightKind::Fp8, false, _) => "multiply_few_fp8",
            (WeightKind::Fp8, true, _) => "multiply_few32_fp8",
            (WeightKind::Int8, false, false) => "multiply_few_int8",
            (WeightKind::Int8, true, false) => "multiply_few32_int8",
            (WeightKind::Int8, false, true) => "multiply_few_zeros_int8",
            (WeightKind::Int8, true, true) => "multiply_few32_zeros_int8",
            (WeightKind::Int4, false, false) => "multiply_few_int4",
            (WeightKind::Int4, true, false) => "multiply_few32_int4",
            (WeightKind::Int4, false, true) => "multiply_few_zeros_int4",
            (WeightKind::Int4, true, true) => "multiply_few32_zeros_int4",
        }
    }

    fn shape(&self) -> LaunchShape {
        check(self.kind, self.k, &self.scales);
        let are_fours = self.num_experts == 1 || self.n.is_multiple_of(4);
        debug_assert!(are_fours || !self.kind.is_integer(), "{} outputs of an expert", self.n);
        debug_assert!(self.parts.num == 1 || self.num_experts == 1, "parts of experts");
        let grid = [self.n.div_ceil(OUTPUTS as u32), self.num_experts, self.parts.num];
        LaunchShape { grid, threads: 256, shared_bytes: self.shared_bytes() }
    }
}

/// Dequantises weights to bf16, `[n][k]`, times a factor. Each number is rounded once. Not for bf16 weights.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Dequantise {
    /// `[num_held]`, rows of [`row_bytes`](WeightKind::row_bytes).
    pub weights: Address,
    pub scales: Scales,
    /// `[n]`, u32: the row of the weights for each output row, counted from `first_row`. Null: row `n` itself. Rows
    /// that are not held become zeros.
    pub rows: Address,
    /// `[n][k]`, bf16.
    pub out: Address,
    pub k: u32,
    pub n: u32,
    pub num_held: u32,
    pub factor: f32,
    /// The kind of its [`source`].
    pub kind: WeightKind,
    /// 0 where `rows` is null.
    pub first_row: u32,
}

// SAFETY: the fields are those of `Dequantise` in the kernel file.
unsafe impl Kernel for Dequantise {
    const NAME: &'static str = "dequantise";

    fn name(&self) -> &'static str {
        match self.kind {
            WeightKind::Bf16 => unreachable!("nothing to do"),
            WeightKind::Fp8 => "dequantise_fp8",
            WeightKind::Int8 => "dequantise_int8",
            WeightKind::Int4 => "dequantise_int4",
        }
    }

    fn shape(&self) -> LaunchShape {
        check(self.kind, self.k, &self.scales);
        let num_threads = u64::from(self.n) * (self.k as usize).div_ceil(self.kind.step()) as u64 * 4;
        debug_assert!(num_threads < 1 << 31, "the kernel counts in 32 bits");
        LaunchShape { grid: [num_threads.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// 16 bytes belong to one row, and the numbers of one multiplication to one group.
fn check(kind: WeightKind, k: u32, scales: &Scales) {
    let (numbers, of_group) = match kind {
        WeightKind::Bf16 | WeightKind::Int8 | WeightKind::Int4 => (8, 32),
        WeightKind::Fp8 => (16, 64),
    };
    let Scales { group, rows_per_scale, row_stride, group_stride, .. } = *scales;
    debug_assert!(k.is_multiple_of(numbers), "{k} numbers of {kind:?}");
    debug_assert!(group >= k || group.is_multiple_of(of_group), "groups of {group} numbers of {kind:?}");
    if kind.is_integer() {
        debug_assert!(group.is_multiple_of(of_group), "groups of {group} numbers of {kind:?}");
        debug_assert!((rows_per_scale, row_stride, group_stride % 4) == (1, 1, 0), "four scales in a row");
    }
}

/// Quantises rows of activations to E4M3 for a library's fp8 products. The largest number of a row becomes 448. A row
/// with NaN or infinity gets the scale NaN.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QuantiseRows {
    /// `[rows][k]`, bf16; k is a multiple of 8.
    pub x: Address,
    /// `[rows][k]`, E4M3.
    pub out: Address,
    /// `[rows]`, f32: the factors that restore the numbers.
    pub scales: Address,
    pub k: u32,
    pub num_rows: u32,
}

// SAFETY: the fields are those of `QuantiseRows` in the kernel file.
unsafe impl Kernel for QuantiseRows {
    const NAME: &'static str = "quantise_rows";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.k.is_multiple_of(8), "16 bytes at a time");
        LaunchShape { grid: [self.num_rows, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// [`QuantiseRows`] with a scale for every [`FP8_BLOCK`] numbers of a row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QuantiseGroups {
    /// `[rows][k]`, bf16; k is a multiple of [`FP8_BLOCK`].
    pub x: Address,
    /// `[rows][k]`, E4M3.
    pub out: Address,
    /// `[k / 128][stride]`, f32. The first `num_rows` of each row are written.
    pub scales: Address,
    pub k: u32,
    pub stride: u32,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `QuantiseGroups` in the kernel file.
unsafe impl Kernel for QuantiseGroups {
    const NAME: &'static str = "quantise_groups";

    fn shape(&self) -> LaunchShape {
        debug_assert!((self.k as usize).is_multiple_of(FP8_BLOCK), "whole groups");
        LaunchShape { grid: [self.num_rows as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// `x = x * row scale * column scale`. Undoes the scaling of [`QuantiseRows`] and of fp8 weights after a library's
/// unscaled product.
///
/// Moves 4 bytes per element: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaleProduct {
    /// `[rows][n]`, bf16; n is a multiple of 8.
    pub x: Address,
    /// `[rows]`, f32.
    pub row_scales: Address,
    /// `[n]`, f32.
    pub column_scales: Address,
    pub n: u32,
    pub num_rows: u32,
}

// SAFETY: the fields are those of `ScaleProduct` in the kernel file.
unsafe impl Kernel for ScaleProduct {
    const NAME: &'static str = "scale_product";

    fn shape(&self) -> LaunchShape {
        by_eights(self.num_rows, self.n)
    }
}
