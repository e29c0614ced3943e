//! Products with KV in place, for the few queries of a decoding sequence: only results are written.
//!
//! The sums are the same chains as those of widened tiles. Positions are in pieces of memory that the hardware
//! prefetcher does not predict. So with each line that is read, the same line of the following tile is prefetched.
//! Prefetching all lines at once would stall, because only a limited number can be in flight.

use baton_kv_cache::KvDtype;

use super::product::Rows;
use super::widen::{Positions, by_type};
use baton_cpu_simd::{Bf16, Bf16Pair, E4m3, F16, F32, I8, Pair};
use baton_cpu_simd::{Factor, LANES, Stored, Words, kernel, pair_kernel};

/// The largest number of queries of a kernel. Memory of queries, scores and sums has room for this many.
pub(super) const MAX_QUERIES: usize = 8;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Whether the kernels support this many queries with heads of `head_dim`.
pub(super) fn is_possible(num_queries: usize, head_dim: usize, dtype: KvDtype) -> bool {
    num_queries <= MAX_QUERIES && (head_dim * dtype.size_bytes()).is_multiple_of(LANES * 4)
}

kernel! {
    /// `scores[query][t] = q[query] . k[t]` for every position; prefetches the `following` positions. There are as
    /// many queries as [`is_possible`] allows. Padding rows after them are read and written, and their values are
    /// unspecified.
    ///
    /// # Safety
    /// Positions and `q` are valid; `scores` has room for the positions, rounded up to the lanes.
    pub(super) fn score / score_any (
        num_queries: usize,
        positions: &Positions<'_>,
        following: &Positions<'_>,
        q: Rows<*const f32>,
        scores: Rows<*mut f32>,
    )
}

pair_kernel! {
    /// As [`score`], for `q` in bf16 and positions that are [multiplied in pairs](super::widen::has_pairs_of).
    ///
    /// # Safety
    /// As for [`score`]; the CPU has the instruction.
    pub(super) fn score_pairs / score_pairs_any (
        num_queries: usize,
        positions: &Positions<'_>,
        following: &Positions<'_>,
        q: Rows<*const f32>,
        scores: Rows<*mut f32>,
    )
}

kernel! {
    /// `sums[query] += sum over t of weights[query][t] v[t]`; queries and `following` as for [`score`].
    ///
    /// # Safety
    /// Positions, weights and sums are valid.
    pub(super) fn add / add_any (
        num_queries: usize,
        positions: &Positions<'_>,
        following: &Positions<'_>,
        weights: Rows<*const f32>,
        sums: Rows<*mut f32>,
    )
}

pair_kernel! {
    /// As [`add`], for weights in bf16 and positions that are [multiplied in pairs](super::widen::has_pairs_of).
    ///
    /// # Safety
    /// As for [`add`]; the CPU has the instruction.
    pub(super) fn add_pairs / add_pairs_any (
        num_queries: usize,
        positions: &Positions<'_>,
        following: &Positions<'_>,
        weights: Rows<*const f32>,
        sums: Rows<*mut f32>,
    )
}

by_type! { score_any, score_pairs_any: score_of[positions](
    num_queries: usize,
    positions: &Positions<'_>,
    following: &Positions<'_>,
    q: Rows<*const f32>,
    scores: Rows<*mut f32>,
) }

#[inline(always)]
unsafe fn score_of<S: Words, W: Factor>(
    num_queries: usize,
    positions: &Positions<'_>,
    following: &Positions<'_>,
    q: Rows<*const f32>,
    scores: Rows<*mut f32>,
) {
    let mut t = 0;
    while t < positions.rows.len() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scores = Rows { first: scores.first.add(t), ..scores };
            match num_queries {
                1..=2 => score_group::<S, W, 2, 1>(positions, following, t, q, scores),
                3..=4 => score_group::<S, W, 4, 1>(positions, following, t, q, scores),
                _ if S::NUM_REGISTERS == 32 => {
                    score_group::<S, W, MAX_QUERIES, 1>(positions, following, t, q, scores)
                }
                _ => score_group::<S, W, 4, 2>(positions, following, t, q, scores),
            }
        }
        t += LANES;
    }
}

/// Sixteen positions from `t` on: transposes them to columns and multiplies each column by a number of every query.
/// There are `N` times `R` queries, of which `R` are in registers at a time.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn score_group<S: Words, W: Factor, const R: usize, const N: usize>(
    positions: &Positions<'_>,
    following: &Positions<'_>,
    t: usize,
    q: Rows<*const f32>,
    scores: Rows<*mut f32>,
) {
    let num_bytes = positions.n * W::Number::SIZE;
    let mut done = 0;
    // SAFETY: guaranteed by the caller; rows are whole words of sixteen positions.
    unsafe {
        let mut sums = [[S::splat(0.0); R]; N];
        while done < num_bytes {
            let mut words = [S::splat(0.0); LANES];
            for r in 0..LANES {
                words[r] = S::load(positions.row(t + r).add(done).cast());
            }
            let columns = S::transpose(words);
            let numbers = q.first.add(done / 4 * W::PER_WORD);
            for part in 0..N {
                let numbers = numbers.add(part * R * q.stride);
                let mut some = sums[part];
                for c in 0..LANES {
                    if part == 0 {
                        S::prefetch_for_later(following.row(t + c).wrapping_add(done));
                    }
                    for i in 0..W::PER_WORD {
                        let column = W::unpack::<S>(columns[c], i);
                        for r in 0..R {
                            let x = S::splat(*numbers.add(r * q.stride + c * W::PER_WORD + i));
                            some[r] = W::multiply_add::<S>(x, column, some[r]);
                        }
                    }
                }
                sums[part] = some;
            }
            done += LANES * 4;
        }
        for part in 0..N {
            for r in 0..R {
                S::store(scores.first.add((part * R + r) * scores.stride), sums[part][r]);
            }
        }
    }
}

by_type! { add_any, add_pairs_any: add_of[positions](
    num_queries: usize,
    positions: &Positions<'_>,
    following: &Positions<'_>,
    weights: Rows<*const f32>,
    sums: Rows<*mut f32>,
) }

#[inline(always)]
unsafe fn add_of<S: Words, W: Factor>(
    num_queries: usize,
    positions: &Positions<'_>,
    following: &Positions<'_>,
    weights: Rows<*const f32>,
    sums: Rows<*mut f32>,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match num_queries {
            1..=2 if S::NUM_REGISTERS == 32 => add_rows::<S, W, 2, 4>(positions, following, weights, sums),
            1..=2 => add_rows::<S, W, 2, 2>(positions, following, weights, sums),
            3..=4 if S::NUM_REGISTERS == 32 => add_rows::<S, W, 4, 4>(positions, following, weights, sums),
            3..=4 => add_rows::<S, W, 4, 1>(positions, following, weights, sums),
            _ if S::NUM_REGISTERS == 32 => {
                add_rows::<S, W, MAX_QUERIES, 2>(positions, following, weights, sums)
            }
            _ => {
                add_rows::<S, W, 4, 1>(positions, following, weights, sums);
                let weights = Rows { first: weights.first.add(4 * weights.stride), ..weights };
                let sums = Rows { first: sums.first.add(4 * sums.stride), ..sums };
                add_rows::<S, W, 4, 1>(positions, following, weights, sums);
            }
        }
    }
}

/// All columns of `R` queries, `C` vectors at a time, the last ones one by one.
#[inline(always)]
unsafe fn add_rows<S: Words, W: Factor, const R: usize, const C: usize>(
    positions: &Positions<'_>,
    following: &Positions<'_>,
    weights: Rows<*const f32>,
    sums: Rows<*mut f32>,
) {
    let num_vectors = positions.n / LANES;
    let mut vector = 0;
    // SAFETY: guaranteed by the caller; column indices are in range.
    unsafe {
        while vector + C <= num_vectors {
            add_tile::<S, W, R, C>(positions, following, vector, weights, sums);
            vector += C;
        }
        while vector < num_vectors {
            add_tile::<S, W, R, 1>(positions, following, vector, weights, sums);
            vector += 1;
        }
    }
}

/// `C` vectors of columns from `vector` on, kept in registers over all positions.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn add_tile<S: Words, W: Factor, const R: usize, const C: usize>(
    positions: &Positions<'_>,
    following: &Positions<'_>,
    vector: usize,
    weights: Rows<*const f32>,
    sums: Rows<*mut f32>,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let to = sums.first.add(vector * LANES);
        let mut sum = [[S::splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                sum[r][c] = S::load(to.add(r * sums.stride + c * LANES));
            }
        }
        let mut line = [S::splat(0.0); C];
        for idx in 0..positions.rows.len().div_ceil(W::NUM) {
            let rows = [positions.row(idx * W::NUM), positions.row((idx + 1) * W::NUM - 1)];
            for i in 0..W::NUM {
                let next = following.row(idx * W::NUM + i).wrapping_add(vector * LANES * W::Number::SIZE);
                for line in 0..(C * LANES * W::Number::SIZE).div_ceil(LINE_BYTES) {
                    S::prefetch_for_later(next.wrapping_add(line * LINE_BYTES));
                }
            }
            for c in 0..C {
                line[c] = W::line::<S>(rows, (vector + c) * LANES * W::Number::SIZE);
            }
            for r in 0..R {
                let weight = S::splat(*weights.first.add(r * weights.stride + idx));
                for c in 0..C {
                    sum[r][c] = W::multiply_add::<S>(weight, line[c], sum[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                S::store(to.add(r * sums.stride + c * LANES), sum[r][c]);
            }
        }
    }
}
