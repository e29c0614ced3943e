//! Softmax over positions that come tile by tile and span by span.
//!
//! What a query has seen so far is its state: the largest score, the weights `2^(score - largest)` added up, and
//! the values added up with these weights. Scores are in units of log2, so that e^x is 2^x. A tile moves a state on;
//! two states of different positions fold into one (Milakov and Gimelshein 2018; flash decoding, Dao et al. 2023).

use super::shape::TILE;
use crate::products::bf16_bits;
use crate::rows::soft_capped;
use crate::simd::{LANES, Simd, kernel};

/// Vectors of a tile's scores.
const VECTORS: usize = TILE / LANES;

/// A query's state: `| largest, a line | weights, by lanes | sums [dim] |`.
#[derive(Clone, Copy)]
pub(super) struct State {
    first: *mut f32,
    dim: usize,
}

impl State {
    /// Numbers that a state takes.
    pub(super) fn len(dim: usize) -> usize {
        2 * LANES + dim
    }

    /// The state at `first`, whose place has [`len`](Self::len) numbers; `dim` is a multiple of the lanes.
    pub(super) fn at(first: *mut f32, dim: usize) -> State {
        State { first, dim }
    }

    /// # Safety (of all methods)
    /// The place is valid, and nobody else uses it.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: the place's first number.
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

    /// Nothing seen.
    #[inline(always)]
    pub(super) unsafe fn clear(self) {
        // SAFETY: all lies in the place.
        unsafe {
            *self.first = f32::NEG_INFINITY;
            std::slice::from_raw_parts_mut(self.weights(), LANES + self.dim).fill(0.0);
        }
    }

    /// Weights and sums times `factor`.
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, factor: S::V) {
        let mut i = 0;
        while i < LANES + self.dim {
            // SAFETY: the index stays in the place.
            unsafe {
                let at = self.weights().add(i);
                S::store(at, S::mul(S::load(at), factor));
            }
            i += LANES;
        }
    }

    /// Takes over what `later` has seen of later positions. Nothing seen changes nothing.
    #[inline(always)]
    unsafe fn fold<S: Simd>(self, later: State) {
        // SAFETY: indices stay in the places.
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

    /// Writes the weighted mean of the values, `n` of them.
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

/// What becomes of a score before it counts.
#[derive(Clone, Copy)]
pub(super) struct Scaling {
    /// Of the keys of the tile's positions, then of their values; null where KV has none. Scores and weights take
    /// them over, so that the products are of codes.
    pub(super) scales: *const f32,
    pub(super) soft_cap: Option<f32>,
    /// Weights are left in bf16, which take half of the place.
    pub(super) to_bf16: bool,
}

kernel! {
    /// Turns a query's scores of one tile into weights, moves its state on, and leaves the weights of the values,
    /// times their scales, in place of the scores. Only positions `from..to` of the tile are seen; the others weigh
    /// zero.
    ///
    /// # Safety
    /// `scores` is valid for a tile, scales for two; the state's place is the caller's.
    pub(super) fn weigh / weights (scores: *mut f32, from: usize, to: usize, scaling: &Scaling, state: State)
}

kernel! {
    /// [`State::fold`].
    ///
    /// # Safety
    /// Both places are the caller's.
    pub(super) fn fold / fold_of (state: State, later: State)
}

kernel! {
    /// Writes the weighted mean of the values that a state has seen, `n` numbers.
    ///
    /// # Safety
    /// The state's place is the caller's, `out` is valid for `n`, at most the state's.
    pub(super) fn finish / finish_of (state: State, out: *mut f32, n: usize)
}

#[inline(always)]
unsafe fn fold_of<S: Simd>(state: State, later: State) {
    // SAFETY: passed on to the caller.
    unsafe { state.fold::<S>(later) }
}

#[inline(always)]
unsafe fn finish_of<S: Simd>(state: State, out: *mut f32, n: usize) {
    // SAFETY: passed on to the caller.
    unsafe { state.finish::<S>(out, n) }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn weights<S: Simd>(scores: *mut f32, from: usize, to: usize, scaling: &Scaling, state: State) {
    // SAFETY: all indices are those of a tile.
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
            // The first tile that a query sees scales zeroes: 2^-inf is zero.
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

/// 2^x of x up to 0, within two units in the last place; zero below -126.5, where results would be denormal.
///
/// x = n + r, and a polynomial of degree five for 2^r that was fitted for the least relative error on -0.5..=0.5;
/// 2^0 is one.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
#[allow(clippy::approx_constant)] // fitted, not ln 2
unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    // SAFETY: no pointers.
    unsafe {
        // Of max the second operand survives when one is NaN.
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
    use crate::simd::{Isa, Portable};

    /// 2^x of every lane.
    unsafe fn check<S: Simd>() {
        let powers = |x: f32| {
            let mut out = [0.0; LANES];
            // SAFETY: the processor has the instructions by the caller's word; `out` holds sixteen.
            unsafe { S::store(out.as_mut_ptr(), exp2::<S>(S::splat(x))) };
            assert!(out.iter().all(|power| power.to_bits() == out[0].to_bits()), "2^{x}: {out:?}");
            out[0]
        };
        for step in 0..20_000 {
            let x = -126.0 * step as f32 / 20_000.0;
            let error = f64::from(powers(x)) / f64::from(x).exp2() - 1.0;
            assert!(error.abs() < 2.4e-7, "2^{x} is off by {error:e}");
        }
        assert_eq!(powers(0.0), 1.0);
        assert_eq!(powers(-3.0), 0.125);
        for x in [-126.6, -127.0, -1e9, f32::NEG_INFINITY] {
            assert_eq!(powers(x), 0.0, "2^{x}");
        }
        assert!(powers(f32::NAN).is_nan());
    }

    #[test]
    fn powers_of_two_match_the_formula_to_2_4e_7() {
        for isa in Isa::available() {
            // SAFETY: this processor has it.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => check::<crate::simd::Avx512>(),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => check::<crate::simd::Avx2>(),
                    Isa::Portable => check::<Portable>(),
                }
            }
        }
    }

    #[test]
    fn folding_adds_up_what_two_saw() {
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
            // SAFETY: the places are as large as states are.
            unsafe {
                first.fold::<Portable>(later);
                first.finish::<Portable>(out.as_mut_ptr(), 3);
            }
            out
        };
        // Means of 1 with weight 2^3 and of 5 with weight 2^4.
        let mut total = state(3.0, 1.0, 1.0);
        assert_eq!(fold(&mut total, state(4.0, 1.0, 5.0)), [(8.0 + 80.0) / 24.0; 3]);
        let before = total.clone();
        fold(&mut total, state(f32::NEG_INFINITY, 0.0, 0.0));
        assert_eq!(total, before, "nothing seen changes nothing");
        let mut nothing = state(f32::NEG_INFINITY, 0.0, 0.0);
        fold(&mut nothing, before.clone());
        assert_eq!(nothing, before, "to have seen nothing does not matter");
    }
}
