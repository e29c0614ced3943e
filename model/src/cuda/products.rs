//! Products of few rows with weights of all kinds, and what products of many need: `kernels/products.cu`.
//!
//! A row's result has the same bits whatever the other rows are, and however many. Sums are of f32; weights enter them
//! exactly, scales and zeros are applied to the sums of groups.

use super::kernel::{Address, Kernel, LaunchShape, Source};
use crate::integers::{IntegerRow, IntegerWidth};

/// What weights are. All lie row after row, `[n][k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WeightKind {
    /// K is a multiple of 8.
    Bf16 = 0,
    /// E4M3, as files have it, with finite numbers only. K is a multiple of 16, groups of 64 unless they are whole rows.
    Fp8 = 1,
    /// As [`pack`] lays them out. K is a multiple of 8, groups of 32.
    Int8 = 2,
    /// The same.
    Int4 = 3,
}

impl WeightKind {
    pub(crate) const ALL: [WeightKind; 4] =
        [WeightKind::Bf16, WeightKind::Fp8, WeightKind::Int8, WeightKind::Int4];

    pub(crate) fn of_integers(width: IntegerWidth) -> WeightKind {
        match width {
            IntegerWidth::Four => WeightKind::Int4,
            IntegerWidth::Eight => WeightKind::Int8,
        }
    }

    /// Numbers in 64 bytes of a row, which four lanes read at a time.
    fn step(self) -> usize {
        match self {
            WeightKind::Bf16 => 32,
            WeightKind::Fp8 | WeightKind::Int8 => 64,
            WeightKind::Int4 => 128,
        }
    }

    /// Outputs of a block of threads.
    fn outputs(self) -> u32 {
        if self == WeightKind::Bf16 { 16 } else { 32 }
    }

    /// From one row to the next.
    pub(crate) fn row_bytes(self, k: usize) -> usize {
        match self {
            WeightKind::Bf16 => 2 * k,
            WeightKind::Fp8 => k,
            WeightKind::Int8 | WeightKind::Int4 => k.div_ceil(self.step()) * 64,
        }
    }
}

pub(crate) fn source(kind: WeightKind) -> Source {
    Source {
        file: "products.cu",
        text: include_str!("kernels/products.cu"),
        defines: vec![("WEIGHTS", kind as u64)],
    }
}

/// For each kind of weight.
pub(crate) fn sources() -> Vec<Source> {
    WeightKind::ALL.map(source).into()
}

/// A row of levels in the kernels' order, appended to `to`: [`row_bytes`](WeightKind::row_bytes) of them.
///
/// In each step of 64 (int8) or 128 (int4) numbers there are 16 bytes for each of four lanes: of every 32 numbers lane `i`
/// has the eight from `8 i` on. Eight of four bits are a word, numbers 0 2 4 6 in its low half from the low end on, numbers
/// 1 3 5 7 in its high half.
pub(crate) fn pack(row: &IntegerRow, width: IntegerWidth, to: &mut Vec<u8>) {
    let kind = WeightKind::of_integers(width);
    for step in row.levels.chunks(kind.step()) {
        for lane in 0..4 {
            for unit in 0..kind.step() / 32 {
                let start = 32 * unit + 8 * lane;
                let level = |idx: usize| step.get(start + idx).copied().unwrap_or(0);
                match width {
                    IntegerWidth::Eight => to.extend((0..8).map(level)),
                    IntegerWidth::Four => {
                        let place = |idx: usize| idx / 2 * 4 + idx % 2 * 16;
                        let word = (0..8).fold(0u32, |word, idx| word | u32::from(level(idx)) << place(idx));
                        to.extend(word.to_le_bytes());
                    }
                }
            }
        }
    }
}

/// Numbers that groups of weights share: for output `n` and input `k` at
/// `n / rows_per_scale * row_stride + k / group * group_stride`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Scales {
    /// f32. Not read for bf16.
    pub(crate) scales: Address,
    /// f32: levels that stand for zero, less the [middle](IntegerWidth::middle). Null if none; fp8 has none.
    pub(crate) zeros: Address,
    pub(crate) rows_per_scale: u32,
    pub(crate) row_stride: u32,
    pub(crate) group_stride: u32,
    pub(crate) group: u32,
}

impl Scales {
    /// What bf16 has.
    pub(crate) const NONE: Scales = Scales {
        scales: Address::NULL,
        zeros: Address::NULL,
        rows_per_scale: 1,
        row_stride: 0,
        group_stride: 0,
        group: 64,
    };
}

/// `out[row][n] = sum of x[row][k] w[n][k] + bias[n] + added[row][n]`, for at most [`MAX_ROWS`](Self::MAX_ROWS) rows;
/// rounded once.
///
/// Reads each weight once, two operations for it and each row: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct MultiplyFew {
    /// `[rows][k]`, bf16.
    pub(crate) x: Address,
    /// `[n]`, rows of [`row_bytes`](WeightKind::row_bytes).
    pub(crate) weights: Address,
    pub(crate) scales: Scales,
    /// `[n]`, bf16, or null.
    pub(crate) bias: Address,
    /// `[rows][n]`, bf16, or null. It may be `out`.
    pub(crate) added: Address,
    /// `[rows][n]`, bf16; f32 if `is_f32`.
    pub(crate) out: Address,
    pub(crate) k: u32,
    pub(crate) n: u32,
    pub(crate) num_rows: u32,
    /// 0 or 1.
    pub(crate) is_f32: u32,
    /// That of the [source](source).
    pub(crate) kind: WeightKind,
    pub(crate) padding: u32,
}

impl MultiplyFew {
    pub(crate) const MAX_ROWS: u32 = 16;
}

// SAFETY: as `MultiplyFew` in the file.
unsafe impl Kernel for MultiplyFew {
    const NAME: &'static str = "multiply_few";

    fn shape(&self) -> LaunchShape {
        debug_assert!((1..=Self::MAX_ROWS).contains(&self.num_rows), "{} rows", self.num_rows);
        check(self.kind, self.k, self.scales.group);
        LaunchShape { grid: [self.n.div_ceil(self.kind.outputs()), 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// Weights as bf16, `[n][k]`, each rounded once. Not for those that are bf16.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Dequantise {
    /// `[n]`, rows of [`row_bytes`](WeightKind::row_bytes).
    pub(crate) weights: Address,
    pub(crate) scales: Scales,
    /// `[n][k]`, bf16.
    pub(crate) out: Address,
    pub(crate) k: u32,
    pub(crate) n: u32,
    /// That of the [source](source).
    pub(crate) kind: WeightKind,
    pub(crate) padding: u32,
}

// SAFETY: as `Dequantise` in the file.
unsafe impl Kernel for Dequantise {
    const NAME: &'static str = "dequantise";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.kind != WeightKind::Bf16, "nothing to do");
        check(self.kind, self.k, self.scales.group);
        let num_threads = u64::from(self.n) * (self.k as usize).div_ceil(self.kind.step()) as u64 * 4;
        LaunchShape { grid: [num_threads.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// 16 bytes are of one row, and what is multiplied at a time of one group.
fn check(kind: WeightKind, k: u32, group: u32) {
    let (numbers, of_group) = match kind {
        WeightKind::Bf16 | WeightKind::Int8 | WeightKind::Int4 => (8, 32),
        WeightKind::Fp8 => (16, 64),
    };
    debug_assert!(k.is_multiple_of(numbers), "{k} numbers of {kind:?}");
    debug_assert!(group >= k || group.is_multiple_of(of_group), "groups of {group} numbers of {kind:?}");
}

/// Rows of activations as E4M3, for a library's products with weights in fp8: the largest number of a row becomes 448. Of a
/// row that has NaN or infinity the scale is NaN.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct RoundRows {
    /// `[rows][k]`, bf16; k is a multiple of 8.
    pub(crate) x: Address,
    /// `[rows][k]`, E4M3.
    pub(crate) out: Address,
    /// `[rows]`, f32: what the numbers are to be multiplied with.
    pub(crate) scales: Address,
    pub(crate) k: u32,
    pub(crate) num_rows: u32,
}

// SAFETY: as `RoundRows` in the file.
unsafe impl Kernel for RoundRows {
    const NAME: &'static str = "round_rows";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.k.is_multiple_of(8), "16 bytes at a time");
        LaunchShape { grid: [self.num_rows, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

#[cfg(test)]
#[path = "products_tests.rs"]
mod tests;
