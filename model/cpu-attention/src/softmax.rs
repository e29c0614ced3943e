//! Softmax over positions that arrive tile by tile and span by span.
//!
//! A query's state summarises the positions so far: the largest score, the sum of the weights `2^(score - largest)`,
//! and the sum of the values with these weights. Scores are in units of log2, so that e^x is 2^x. A tile advances a
//! state; two states of different positions fold into one (Milakov and Gimelshein 2018; flash decoding, Dao et al.
//! 2023).

use super::shape::TILE;
use baton_cpu_kernels::bf16_bits;
use baton_cpu_kernels::soft_capped;
use baton_cpu_simd::{LANES, Simd, kernel};

/// Vectors of a tile's scores.
const VECTORS: usize = TILE / LANES;

/// A query's state: `| largest score, one line | sum of weights, by lanes | sums [dim] |`.
#[derive(Clone, Copy)]
pub(super) struct State {
    first: *mut f32,
    dim: usize,
}

impl State {
    /// The number of numbers in a state.
    pub(super) fn len(dim: usize) -> usize {
        2 * LANES + dim
    }

    /// The state at `first`, which has room for [`len`](Self::len) numbers; `dim` is a multiple of the lanes.
    pub(super) fn at(first: *mut f32, dim: usize) -> State {
        State { first, dim }
    }

    /// # Safety (of all methods)
    /// The state's memory is valid, and no other code accesses it.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: it is the state's first number.
        unsafe { *self.first }
    }

    #[inline(always)]
    fn weights(self) -> *mut f32 {
        self.first.wrapping_add(LANES)
    }

    /// `[dim]`
    #[inline(always)]
    pub(super) fn sums(self) -> *mut f32 {
        self.first.wrapping_add(2 * LANES)
    }

    /// Sets the state of no positions.
    #[inline(always)]
    pub(super) unsafe fn clear(self) {
        // SAFETY: all accesses are inside the state.
        unsafe {
            *self.first = f32::NEG_INFINITY;
            std::slice::from_raw_parts_mut(self.weights(), LANES + self.dim).fill(0.0);
        }
    }

    /// Multiplies weights and sums by `factor`.
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, factor: S::V) {
        let mut i = 0;
        while i < LANES + self.dim {
            // SAFETY: indices are inside the state.
            unsafe {
                let at = self.weights().add(i);
                S::store(at, S::mul(S::load(at), factor));
            }
            i += LANES;
        }
    }

    /// Adds the positions of `later` to this state. A state of no positions changes nothing.
    #[inline(always)]
    unsafe fn fold<S: Simd>(self, later: State) {
        // SAFETY: indices are inside the states.
        unsafe {
            if later.largest() == f32::NEG_INFINITY {
                return;
            }
            let largest = self.largest().max(later.largest());
            let own = exp2::<S>(S::splat(self.largest() - largest));
            let others = exp2::<S>(S::splat(later.largest() - largest));
            let mut i = 0;
            while i < LANES + self.dim {
                let (at, from) = (self.weights().add(i), later.weights().add(i));
                S::store(at, S::fma(S::load(at), own, S::mul(S::load(from), others)));
                i += LANES;
            }
            *self.first = largest;
        }
    }

    /// Writes the weighted mean of the values, `n` numbers.
    #[inline(always)]
    unsafe fn finish<S: Simd>(self, out: *mut f32, n: usize) {
        // SAFETY: `n` is at most `dim`.
        unsafe {
            let inverse = S::splat(1.0 / S::sum(S::load(self.weights())));
            let mut i = 0;
            while i + LANES <= n {
                S::store(out.add(i), S::mul(S::load(self.sums().add(i)), inverse));
                i += LANES;
            }
            if i < n {
                S::store_part(out.add(i), S::mul(S::load(self.sums().add(i)), inverse), n - i);
            }
        }
    }
}

/// How scores and weights are scaled.
#[derive(Clone, Copy)]
pub(super) struct Scaling {
    /// The scales of the keys of the tile's positions, then those of the values; null if KV has no scales. They are
    /// applied to scores and weights, so that products use the quantised numbers.
    pub(super) scales: *const f32,
    pub(super) soft_cap: Option<f32>,
    /// Weights are stored in bf16, which takes half the space.
    pub(super) to_bf16: bool,
}

kernel! {
    /// Converts a query's scores of one tile to weights and advances its state. Replaces the scores by the weights
    /// times the scales of the values. Only positions `from..to` of the tile are visible; the others get weight zero.
    ///
    /// # Safety
    /// `scores` is valid for a tile, scales for two; no other code accesses the state.
    pub(super) fn weigh / weights (scores: *mut f32, from: usize, to: usize, scaling: &Scaling, state: State)
}

kernel! {
    /// [`State::fold`].
    ///
    /// # Safety
    /// No other code accesses either state.
    pub(super) fn fold / fold_of (state: State, later: State)
}

kernel! {
    /// Writes the weighted mean of the values of a state, `n` numbers.
    ///
    /// # Safety
    /// No other code accesses the state; `out` is valid for `n` numbers, at most the state's `dim`.
    pub(super) fn finish / finish_of (state: State, out: *mut f32, n: usize)
}

#[inline(always)]
unsafe fn fold_of<S: Simd>(state: State, later: State) {
    // SAFETY: guaranteed by the caller.
    unsafe { state.fold::<S>(later) }
}

#[inline(always)]
unsafe fn finish_of<S: Simd>(state: State, out: *mut f32, n: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { state.finish::<S>(out, n) }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn weights<S: Simd>(scores: *mut f32, from: usize, to: usize, scaling: &Scaling, state: State) {
    // SAFETY: all indices are inside a tile.
    unsafe {
        if from >= to {
            std::slice::from_raw_parts_mut(scores, TILE).fill(0.0);
            return;
        }
        let mut s = [S::splat(0.0); VECTORS];
        for v in 0..VECTORS {
            s[v] = S::load(scores.add(v * LANES));
        }
        if !scaling.scales.is_null() {
            for v in 0..VECTORS {
                s[v] = S::mul(s[v], S::load(scaling.scales.add(v * LANES)));
            }
        }
        if let Some(cap) = scaling.soft_cap {
            for v in 0..VECTORS {
                s[v] = S::mul(soft_capped::<S>(s[v], cap), S::splat(std::f32::consts::LOG2_E));
            }
        }
        if from > 0 || to < TILE {
            for v in 0..VECTORS {
                S::store(scores.add(v * LANES), s[v]);
            }
            std::slice::from_raw_parts_mut(scores, from).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(scores.add(to), TILE - to).fill(f32::NEG_INFINITY);
            for v in 0..VECTORS {
                s[v] = S::load(scores.add(v * LANES));
            }
        }
        let mut top = S::max(s[0], s[1]);
        for v in 2..VECTORS {
            top = S::max(top, s[v]);
        }
        let top = S::max_lane(top);
        let before = state.largest();
        let largest = if top > before {
            // At the first tile of a query this scales zeros by 2^-inf, which is zero.
            state.scale::<S>(exp2::<S>(S::splat(before - top)));
            *state.first = top;
            top
        } else {
            before
        };
        let mut total = S::load(state.weights());
        for v in 0..VECTORS {
            s[v] = exp2::<S>(S::add(s[v], S::splat(-largest)));
            total = S::add(total, s[v]);
        }
        S::store(state.weights(), total);
        if !scaling.scales.is_null() {
            for v in 0..VECTORS {
                s[v] = S::mul(s[v], S::load(scaling.scales.add(TILE + v * LANES)));
            }
        }
        for v in 0..VECTORS {
            S::store(scores.add(v * LANES), s[v]);
        }
        if scaling.to_bf16 {
            let mut rounded = [0u16; TILE];
            for i in 0..TILE {
                rounded[i] = bf16_bits(*scores.add(i));
            }
            std::ptr::copy_nonoverlapping(rounded.as_ptr(), scores.cast(), TILE);
        }
    }
}

/// 2^x for x up to 0, with an error of at most two units in the last place; zero below -126.5, where results would be
/// subnormal.
///
/// x = n + r. 2^r is a polynomial of degree five, fitted for the least relative error on -0.5..=0.5, and 2^0 is
/// exactly one.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
#[allow(clippy::approx_constant)] // fitted, not ln 2
pub(super) unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    // SAFETY: no pointers.
    unsafe {
        // `max` returns its second operand if one is NaN.
        let x = S::max(S::splat(-127.0), x);
        let n = S::round(x);
        let r = S::fma(n, S::splat(-1.0), x);
        let mut p = S::splat(1.326_472_7e-3);
        for c in [9.671_513e-3, 5.550_733_6e-2, 2.402_224_2e-1, 6.931_47e-1, 1.0] {
            p = S::fma(p, r, S::splat(c));
        }
        S::mul(p, S::pow2(n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_cpu_simd::{Isa, Portable};

    kernel! {
        /// # Safety
        /// The CPU has the instructions.
        fn check_powers / powers ()
    }

    /// Checks 2^x in every lane.
    #[inline(always)]
    unsafe fn powers<S: Simd>() {
        let power = |x: f32| {
            let mut out = [0.0; LANES];
            // SAFETY: the caller guarantees that the CPU has the instructions; `out` holds sixteen numbers.
            unsafe { S::store(out.as_mut_ptr(), exp2::<S>(S::splat(x))) };
            assert!(out.iter().all(|power| power.to_bits() == out[0].to_bits()), "2^{x}: {out:?}");
            out[0]
        };
        for step in 0..20_000 {
            let x = -126.0 * step as f32 / 20_000.0;
            let error = f64::from(power(x)) / f64::from(x).exp2() - 1.0;
            assert!(error.abs() < 2.4e-7, "2^{x} is off by {error:e}");
        }
        assert_eq!(power(0.0), 1.0);
        assert_eq!(power(-3.0), 0.125);
        for x in [-126.6, -127.0, -1e9, f32::NEG_INFINITY] {
            assert_eq!(power(x), 0.0, "2^{x}");
        }
        assert!(power(f32::NAN).is_nan());
    }

    #[test]
    fn powers_of_two_match_the_formula_to_2_4e_7() {
        for isa in Isa::available() {
            // SAFETY: this CPU has the instructions.
            unsafe { check_powers(isa) };
        }
    }

    #[test]
    fn folding_adds_the_positions_of_two_states() {
        let dim = LANES;
        let state = |largest: f32, weight: f32, sum: f32| {
            let mut numbers = vec![0.0; State::len(dim)];
            numbers[0] = largest;
            numbers[LANES..2 * LANES].fill(weight / LANES as f32);
            numbers[2 * LANES..].fill(sum);
            numbers
        };
        let fold = |first: &mut Vec<f32>, mut later: Vec<f32>| {
            let [first, later] = [first, &mut later].map(|numbers| State::at(numbers.as_mut_ptr(), dim));
            let mut out = [0.0; 3];
            // SAFETY: the buffers are as large as states.
            unsafe {
                first.fold::<Portable>(later);
                first.finish::<Portable>(out.as_mut_ptr(), 3);
            }
            out
        };
        // The mean of 1 with weight 2^3 and 5 with weight 2^4.
        let mut total = state(3.0, 1.0, 1.0);
        assert_eq!(fold(&mut total, state(4.0, 1.0, 5.0)), [(8.0 + 80.0) / 24.0; 3]);
        let before = total.clone();
        fold(&mut total, state(f32::NEG_INFINITY, 0.0, 0.0));
        assert_eq!(total, before, "folding a state of no positions changes nothing");
        let mut nothing = state(f32::NEG_INFINITY, 0.0, 0.0);
        fold(&mut nothing, before.clone());
        assert_eq!(nothing, before, "folding into a state of no positions copies");
    }
}
