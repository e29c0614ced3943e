//! Products of a few rows with a tile of KV: scores `Q K^T` and sums `P V`.
//!
//! A factor of each row times one line of the tile: every element of the result is one chain of fused multiply-adds
//! in the order of the lines, whatever the shape of the kernel.

use super::words::{Bf16Pair, Factor, Words, pair_kernel};
use crate::simd::{F32, LANES, kernel};

/// Rows of numbers, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<P> {
    pub(super) first: P,
    pub(super) stride: usize,
}

/// What the sums begin with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    Zero,
    /// What lies in the result.
    Result,
}

kernel! {
    /// `c[r][n] = start + sum over i of a[r][i] b[i][n]` for `num_rows` rows, `num_lines` lines and `num_vectors`
    /// times sixteen columns.
    ///
    /// # Safety
    /// All is valid for these numbers.
    pub(super) fn multiply / product<F32> (
        num_rows: usize,
        num_lines: usize,
        num_vectors: usize,
        a: Rows<*const f32>,
        b: Rows<*const f32>,
        c: Rows<*mut f32>,
        start: Start,
    )
}

pair_kernel! {
    /// As [`multiply`], where a line and what it is multiplied with hold two bf16 in the place of an f32.
    ///
    /// # Safety
    /// As [`multiply`]; the processor has the instruction.
    pub(super) fn multiply_pairs / product<Bf16Pair> (
        num_rows: usize,
        num_lines: usize,
        num_vectors: usize,
        a: Rows<*const f32>,
        b: Rows<*const f32>,
        c: Rows<*mut f32>,
        start: Start,
    )
}

#[inline(always)]
unsafe fn product<S: Words, W: Factor>(
    num_rows: usize,
    num_lines: usize,
    num_vectors: usize,
    a: Rows<*const f32>,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    start: Start,
) {
    let mut row = 0;
    // SAFETY: rows stay below their number.
    unsafe {
        while row < num_rows {
            let a = Rows { first: a.first.add(row * a.stride), ..a };
            let c = Rows { first: c.first.add(row * c.stride), ..c };
            row += match num_rows - row {
                1 => rows::<S, W, 1>(num_lines, num_vectors, a, b, c, start),
                2..=3 => rows::<S, W, 2>(num_lines, num_vectors, a, b, c, start),
                4..=5 => rows::<S, W, 4>(num_lines, num_vectors, a, b, c, start),
                _ => rows::<S, W, 6>(num_lines, num_vectors, a, b, c, start),
            };
        }
    }
}

/// All columns of `R` rows; returns `R`.
#[inline(always)]
unsafe fn rows<S: Words, W: Factor, const R: usize>(
    num_lines: usize,
    num_vectors: usize,
    a: Rows<*const f32>,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    start: Start,
) -> usize {
    let mut vector = 0;
    // SAFETY: columns stay below their number.
    unsafe {
        while vector < num_vectors {
            let left = num_vectors - vector;
            let b = Rows { first: b.first.add(vector * LANES), ..b };
            let c = Rows { first: c.first.add(vector * LANES), ..c };
            // Sums of six rows and a line stay in registers: 24 + 4 of 32, or 2 x 6 + 2 of 16 half as wide.
            vector += match left {
                4.. if S::NUM_REGISTERS == 32 => tile::<S, W, R, 4>(num_lines, a, b, c, start),
                2.. if S::NUM_REGISTERS == 32 => tile::<S, W, R, 2>(num_lines, a, b, c, start),
                _ => tile::<S, W, R, 1>(num_lines, a, b, c, start),
            };
        }
    }
    R
}

/// `C` vectors of columns, in registers over all lines; returns `C`.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn tile<S: Words, W: Factor, const R: usize, const C: usize>(
    num_lines: usize,
    a: Rows<*const f32>,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    start: Start,
) -> usize {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut sums = [[S::splat(0.0); C]; R];
        if start == Start::Result {
            for r in 0..R {
                for v in 0..C {
                    sums[r][v] = S::load(c.first.add(r * c.stride + v * LANES));
                }
            }
        }
        let mut line = [S::splat(0.0); C];
        for i in 0..num_lines {
            for v in 0..C {
                line[v] = S::load(b.first.add(i * b.stride + v * LANES));
            }
            for r in 0..R {
                let x = S::splat(*a.first.add(r * a.stride + i));
                for v in 0..C {
                    sums[r][v] = W::multiply_add::<S>(x, line[v], sums[r][v]);
                }
            }
        }
        for r in 0..R {
            for v in 0..C {
                S::store(c.first.add(r * c.stride + v * LANES), sums[r][v]);
            }
        }
    }
    C
}
