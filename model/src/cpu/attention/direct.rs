//! Products with KV where it lies, for the few queries of a sequence that decodes: nothing is written but what is
//! found.
//!
//! The sums are the same chains as those of widened tiles. Positions lie in pieces of memory that the processor does
//! not see coming: while one tile is read, the one that follows is asked for.

use baton_kv_cache::KvDtype;

use super::product::Rows;
use super::widen::Positions;
use super::words::{Unpack, Words};
use crate::cpu::simd::{Bf16, E4m3, F16, F32, I8, LANES, Simd, Stored, kernel};

/// Queries that a kernel takes at most; memory of queries, scores and sums is there for so many.
pub(super) const MAX_QUERIES: usize = 8;

/// Whether the kernels can take so many queries with heads of `head_dim`.
pub(super) fn is_possible(num_queries: usize, head_dim: usize, dtype: KvDtype) -> bool {
    num_queries <= MAX_QUERIES && (head_dim * dtype.size_bytes()).is_multiple_of(LANES * 4)
}

kernel! {
    /// `scores[query][t] = q[query] . k[t]` for every position, asking for what lies at `following`. Of the queries
    /// there are as many as [`is_possible`] allows; rows behind them are read and written, too, and mean nothing.
    ///
    /// # Safety
    /// Positions and `q` are valid; `scores` for the positions, rounded up to the lanes.
    pub(super) fn score / score_any (
        num_queries: usize,
        positions: &Positions<'_>,
        following: [&[*const u8]; 2],
        q: Rows<*const f32>,
        scores: Rows<*mut f32>,
    )
}

kernel! {
    /// `sums[query] += sum over t of weights[query][t] v[t]`; queries as in [`score`].
    ///
    /// # Safety
    /// Positions, weights and sums are valid.
    pub(super) fn add / add_any (
        num_queries: usize,
        positions: &Positions<'_>,
        weights: Rows<*const f32>,
        sums: Rows<*mut f32>,
    )
}

#[inline(always)]
unsafe fn score_any<S: Words>(
    num_queries: usize,
    positions: &Positions<'_>,
    following: [&[*const u8]; 2],
    q: Rows<*const f32>,
    scores: Rows<*mut f32>,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        match positions.dtype {
            KvDtype::F32 => score_of::<S, F32>(num_queries, positions, following, q, scores),
            KvDtype::F16 => score_of::<S, F16>(num_queries, positions, following, q, scores),
            KvDtype::Bf16 => score_of::<S, Bf16>(num_queries, positions, following, q, scores),
            KvDtype::Fp8 => score_of::<S, E4m3>(num_queries, positions, following, q, scores),
            KvDtype::Int8 => score_of::<S, I8>(num_queries, positions, following, q, scores),
        }
    }
}

#[inline(always)]
unsafe fn score_of<S: Words, W: Unpack>(
    num_queries: usize,
    positions: &Positions<'_>,
    following: [&[*const u8]; 2],
    q: Rows<*const f32>,
    scores: Rows<*mut f32>,
) {
    let mut t = 0;
    while t < positions.rows.len() {
        for rows in following {
            for &row in &rows[t.min(rows.len())..(t + LANES).min(rows.len())] {
                // SAFETY: what is asked for need not be valid.
                unsafe { ask_for::<S>(row, positions.n * W::SIZE) };
            }
        }
        // SAFETY: passed on to the caller.
        unsafe {
            let scores = Rows { first: scores.first.add(t), ..scores };
            match num_queries {
                1..=2 => score_group::<S, W, 2, 1>(positions, t, q, scores),
                3..=4 => score_group::<S, W, 4, 1>(positions, t, q, scores),
                _ if S::NUM_REGISTERS == 32 => score_group::<S, W, MAX_QUERIES, 1>(positions, t, q, scores),
                _ => score_group::<S, W, 4, 2>(positions, t, q, scores),
            }
        }
        t += LANES;
    }
}

/// Sixteen positions from `t` on: turned to columns, and each column times a number of every query, of which there
/// are `N` times as many as `R` in registers.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn score_group<S: Words, W: Unpack, const R: usize, const N: usize>(
    positions: &Positions<'_>,
    t: usize,
    q: Rows<*const f32>,
    scores: Rows<*mut f32>,
) {
    let per_word = 4 / W::SIZE;
    let num_bytes = positions.n * W::SIZE;
    let mut done = 0;
    // SAFETY: passed on to the caller; bytes are whole words of sixteen.
    unsafe {
        let mut sums = [[S::splat(0.0); R]; N];
        while done < num_bytes {
            let mut words = [S::splat(0.0); LANES];
            for r in 0..LANES {
                words[r] = S::load(positions.row(t + r).add(done).cast());
            }
            let columns = S::transpose(words);
            let numbers = q.first.add(done / W::SIZE);
            for part in 0..N {
                let numbers = numbers.add(part * R * q.stride);
                let mut some = sums[part];
                for c in 0..LANES {
                    for i in 0..per_word {
                        let column = W::unpack::<S>(columns[c], i);
                        for r in 0..R {
                            let x = S::splat(*numbers.add(r * q.stride + c * per_word + i));
                            some[r] = S::fma(x, column, some[r]);
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

#[inline(always)]
unsafe fn add_any<S: Simd>(
    num_queries: usize,
    positions: &Positions<'_>,
    weights: Rows<*const f32>,
    sums: Rows<*mut f32>,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        match positions.dtype {
            KvDtype::F32 => add_of::<S, F32>(num_queries, positions, weights, sums),
            KvDtype::F16 => add_of::<S, F16>(num_queries, positions, weights, sums),
            KvDtype::Bf16 => add_of::<S, Bf16>(num_queries, positions, weights, sums),
            KvDtype::Fp8 => add_of::<S, E4m3>(num_queries, positions, weights, sums),
            KvDtype::Int8 => add_of::<S, I8>(num_queries, positions, weights, sums),
        }
    }
}

#[inline(always)]
unsafe fn add_of<S: Simd, W: Stored>(
    num_queries: usize,
    positions: &Positions<'_>,
    weights: Rows<*const f32>,
    sums: Rows<*mut f32>,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        match num_queries {
            1..=2 if S::NUM_REGISTERS == 32 => add_rows::<S, W, 2, 4>(positions, weights, sums),
            1..=2 => add_rows::<S, W, 2, 2>(positions, weights, sums),
            3..=4 if S::NUM_REGISTERS == 32 => add_rows::<S, W, 4, 4>(positions, weights, sums),
            3..=4 => add_rows::<S, W, 4, 1>(positions, weights, sums),
            _ if S::NUM_REGISTERS == 32 => add_rows::<S, W, MAX_QUERIES, 2>(positions, weights, sums),
            _ => {
                add_rows::<S, W, 4, 1>(positions, weights, sums);
                let weights = Rows { first: weights.first.add(4 * weights.stride), ..weights };
                let sums = Rows { first: sums.first.add(4 * sums.stride), ..sums };
                add_rows::<S, W, 4, 1>(positions, weights, sums);
            }
        }
    }
}

/// All columns of `R` queries, `C` vectors at a time, the last ones one by one.
#[inline(always)]
unsafe fn add_rows<S: Simd, W: Stored, const R: usize, const C: usize>(
    positions: &Positions<'_>,
    weights: Rows<*const f32>,
    sums: Rows<*mut f32>,
) {
    let num_vectors = positions.n / LANES;
    let mut vector = 0;
    // SAFETY: passed on to the caller; columns stay below their number.
    unsafe {
        while vector + C <= num_vectors {
            add_tile::<S, W, R, C>(positions, vector, weights, sums);
            vector += C;
        }
        while vector < num_vectors {
            add_tile::<S, W, R, 1>(positions, vector, weights, sums);
            vector += 1;
        }
    }
}

/// `C` vectors of columns from `vector` on, in registers over all positions.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn add_tile<S: Simd, W: Stored, const R: usize, const C: usize>(
    positions: &Positions<'_>,
    vector: usize,
    weights: Rows<*const f32>,
    sums: Rows<*mut f32>,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        let to = sums.first.add(vector * LANES);
        let mut sum = [[S::splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                sum[r][c] = S::load(to.add(r * sums.stride + c * LANES));
            }
        }
        let mut line = [S::splat(0.0); C];
        for (t, &row) in positions.rows.iter().enumerate() {
            let at = row.add(vector * LANES * W::SIZE);
            for c in 0..C {
                line[c] = W::load::<S>(at.add(c * LANES * W::SIZE));
            }
            for r in 0..R {
                let weight = S::splat(*weights.first.add(r * weights.stride + t));
                for c in 0..C {
                    sum[r][c] = S::fma(weight, line[c], sum[r][c]);
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

/// Asks for the lines of `num_bytes`, which need not be valid.
#[inline(always)]
unsafe fn ask_for<S: Simd>(first: *const u8, num_bytes: usize) {
    const LINE: usize = 64;
    let mut at = 0;
    while at < num_bytes {
        // SAFETY: passed on to the caller.
        unsafe { S::prefetch_for_later(first.wrapping_add(at)) };
        at += LINE;
    }
}
