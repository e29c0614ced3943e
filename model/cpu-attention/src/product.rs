//! Products of a few rows with a tile of KV: scores `Q K^T` and sums `P V`.
//!
//! Multiplies a factor of each row with one line of the tile at a time. Every element of the result is one chain of
//! fused multiply-adds in the order of the lines, whatever the shape of the kernel.

use baton_cpu_simd::{Bf16Pair, Factor, Words, pair_kernel};
use baton_cpu_simd::{F32, LANES, kernel};

/// Rows of numbers, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<P> {
    pub(super) first: P,
    pub(super) stride: usize,
}

/// The initial value of the sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    Zero,
    /// The current contents of the result.
    Result,
}

kernel! {
    /// `c[r][n] = start + sum over i of a[r][i] b[i][n]` for `num_rows` rows, `num_lines` lines and `num_vectors`
    /// times sixteen columns.
    ///
    /// # Safety
    /// All pointers are valid for these sizes.
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
    /// As [`multiply`], where each f32 of lines and rows is replaced by two bf16.
    ///
    /// # Safety
    /// As for [`multiply`]; the CPU has the instruction.
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
    // SAFETY: row indices are in range.
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
    // SAFETY: column indices are in range.
    unsafe {
        while vector < num_vectors {
            let left = num_vectors - vector;
            let b = Rows { first: b.first.add(vector * LANES), ..b };
            let c = Rows { first: c.first.add(vector * LANES), ..c };
            // The sums of six rows and a line fit into registers: 24 + 4 of 32, or 2 x 6 + 2 of 16 with half the
            // width.
            vector += match left {
                4.. if S::NUM_REGISTERS == 32 => tile::<S, W, R, 4>(num_lines, a, b, c, start),
                2.. if S::NUM_REGISTERS == 32 => tile::<S, W, R, 2>(num_lines, a, b, c, start),
                _ => tile::<S, W, R, 1>(num_lines, a, b, c, start),
            };
        }
    }
    R
}

/// `C` vectors of columns, kept in registers over all lines; returns `C`.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn tile<S: Words, W: Factor, const R: usize, const C: usize>(
    num_lines: usize,
    a: Rows<*const f32>,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    start: Start,
) -> usize {
    // SAFETY: guaranteed by the caller.
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
