//! States of sixteen queries: `| scores that weights are relative to | sums of weights | sums [tiles x 16 dimensions] |`, each a
//! vector of the queries. The first are not always the largest scores so far, as in [`softmax`](crate::softmax), but within
//! `MAX_WEIGHT` of them.

use crate::method::ItemArgs;
use crate::softmax::exp2;
use baton_cpu_simd::{LANES, Simd, Words, kernel};

/// Numbers of a state.
pub(super) fn len(tiles: usize) -> usize {
    (2 + tiles * LANES) * LANES
}

/// The sums of a state.
pub(super) fn sums(state: *mut f32) -> *mut f32 {
    state.wrapping_add(2 * LANES)
}

/// Sets the state of no positions.
///
/// # Safety
/// The state is valid.
pub(super) unsafe fn clear(state: *mut f32, tiles: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        std::slice::from_raw_parts_mut(state, LANES).fill(f32::NEG_INFINITY);
        std::slice::from_raw_parts_mut(state.add(LANES), len(tiles) - LANES).fill(0.0);
    }
}

kernel! {
    /// Adds the positions of `later` to a state. Those of no positions change nothing.
    ///
    /// # Safety
    /// The states are valid.
    pub(super) fn fold / fold_of (state: *mut f32, later: *mut f32, tiles: usize)
}

kernel! {
    /// Writes the weighted means of the values of the queries from `first` on.
    ///
    /// # Safety
    /// The state and the results are valid.
    pub(super) fn finish / finish_of (state: *mut f32, args: &ItemArgs<'_>, first: usize)
}

#[inline(always)]
unsafe fn fold_of<S: Simd>(state: *mut f32, later: *mut f32, tiles: usize) {
    // SAFETY: indices are inside the states.
    unsafe {
        let tops = [S::load(state), S::load(later)];
        let largest = S::max(tops[0], tops[1]);
        S::store(state, largest);
        // Where both are minus infinity, the factors are zero.
        let largest = S::mul(S::max(largest, S::splat(f32::MIN)), S::splat(-1.0));
        let factors = [exp2::<S>(S::add(tops[0], largest)), exp2::<S>(S::add(tops[1], largest))];
        let mut i = LANES;
        while i < len(tiles) {
            let others = S::mul(S::load(later.add(i)), factors[1]);
            S::store(state.add(i), S::fma(S::load(state.add(i)), factors[0], others));
            i += LANES;
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn finish_of<S: Words>(state: *mut f32, args: &ItemArgs<'_>, first: usize) {
    let head_dim = args.queries.head_dim;
    let num = args.queries.len() - first;
    // SAFETY: queries and dimensions are in range.
    unsafe {
        let inverse = S::div(S::splat(1.0), S::load(state.add(LANES)));
        let mut done = 0;
        while done < head_dim {
            let mut columns = [S::splat(0.0); LANES];
            for i in 0..LANES {
                columns[i] = S::mul(S::load(sums(state).add((done + i) * LANES)), inverse);
            }
            let rows = S::transpose(columns);
            for query in 0..LANES {
                if query < num {
                    let to = args.result(first + query).add(done);
                    if done + LANES <= head_dim {
                        S::store(to, rows[query]);
                    } else {
                        S::store_part(to, rows[query], head_dim - done);
                    }
                }
            }
            done += LANES;
        }
    }
}
