//! Operations on single rows of activations: norms, rotary embedding, gated activations.

use baton_cpu_simd::{Isa, LANES, Simd, kernel};

/// Activation functions of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    /// `x / (1 + e^-x)`
    Silu,
    /// GELU with its tanh approximation.
    GeluTanh,
    /// GELU with the error function.
    GeluErf,
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`.
///
/// # Panics
/// When the lengths differ.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    // SAFETY: the lengths are equal.
    unsafe { rms_norm_kernel(isa, x.as_ptr(), weight.as_ptr(), eps, out.as_mut_ptr(), x.len()) }
}

/// As [`rms_norm`], in place.
pub fn rms_norm_in_place(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    // SAFETY: the lengths are equal, and the kernel reads an element before it writes it.
    unsafe { rms_norm_kernel(isa, x.as_ptr(), weight.as_ptr(), eps, x.as_mut_ptr(), x.len()) }
}

kernel! {
    /// # Safety
    /// Pointers are valid for `n` numbers; `out` may equal `x`.
    fn rms_norm_kernel / rms_norm_of (x: *const f32, weight: *const f32, eps: f32, out: *mut f32, n: usize)
}

#[inline(always)]
unsafe fn rms_norm_of<S: Simd>(x: *const f32, weight: *const f32, eps: f32, out: *mut f32, n: usize) {
    // SAFETY: indices are below `n`.
    unsafe {
        let whole = n - n % LANES;
        let mut acc = S::splat(0.0);
        let mut i = 0;
        while i < whole {
            let v = S::load(x.add(i));
            acc = S::fma(v, v, acc);
            i += LANES;
        }
        if i < n {
            let v = S::load_part(x.add(i), n - i);
            acc = S::fma(v, v, acc);
        }
        let scale = S::splat(1.0 / (S::sum(acc) / n as f32 + eps).sqrt());
        let mut i = 0;
        while i < whole {
            let v = S::mul(S::load(x.add(i)), scale);
            S::store(out.add(i), S::mul(v, S::load(weight.add(i))));
            i += LANES;
        }
        if i < n {
            let v = S::mul(S::load_part(x.add(i), n - i), scale);
            S::store_part(out.add(i), S::mul(v, S::load_part(weight.add(i), n - i)), n - i);
        }
    }
}

/// `gate(x) * up`. SiLU and the approximate GELU are `x` times a sigmoid: `gelu_tanh(x) = x sigmoid(2 sqrt(2/pi) (x +
/// 0.044715 x^3))`.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
pub(crate) unsafe fn gated<S: Simd>(gate: GateFunction, x: S::V, up: S::V) -> S::V {
    // SAFETY: the arrays have as many numbers as are loaded and stored.
    unsafe {
        let arg = match gate {
            GateFunction::Silu => S::mul(x, S::splat(-1.0)),
            GateFunction::GeluTanh => {
                let cube = S::mul(S::mul(x, x), x);
                let inner = S::fma(cube, S::splat(0.044_715), x);
                S::mul(inner, S::splat(-1.595_769))
            }
            GateFunction::GeluErf => {
                let mut lanes = [0.0; LANES];
                S::store(lanes.as_mut_ptr(), x);
                for i in 0..LANES {
                    lanes[i] *= 0.5 * (1.0 + erf(lanes[i] * std::f32::consts::FRAC_1_SQRT_2));
                }
                return S::mul(S::load(lanes.as_ptr()), up);
            }
        };
        S::mul(S::div(x, S::add(S::splat(1.0), S::exp(arg))), up)
    }
}

/// Replaces every element `x` by `cap * tanh(x / cap)`.
pub fn soft_cap(isa: Isa, x: &mut [f32], cap: f32) {
    // SAFETY: a slice is valid for its length.
    unsafe { soft_cap_kernel(isa, x.as_mut_ptr(), x.len(), cap) }
}

kernel! {
    /// # Safety
    /// The pointer is valid for `n` numbers.
    fn soft_cap_kernel / soft_cap_of (x: *mut f32, n: usize, cap: f32)
}

#[inline(always)]
unsafe fn soft_cap_of<S: Simd>(x: *mut f32, n: usize, cap: f32) {
    // SAFETY: indices are below `n`.
    unsafe {
        let whole = n - n % LANES;
        let mut i = 0;
        while i < whole {
            S::store(x.add(i), soft_capped::<S>(S::load(x.add(i)), cap));
            i += LANES;
        }
        if i < n {
            let v = soft_capped::<S>(S::load_part(x.add(i), n - i), cap);
            S::store_part(x.add(i), v, n - i);
        }
    }
}

/// `cap tanh(x / cap)` with `tanh(y) = 1 - 2 / (e^2y + 1)`; the absolute error is at most 2e-7 `cap`.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub unsafe fn soft_capped<S: Simd>(x: S::V, cap: f32) -> S::V {
    // SAFETY: no pointers.
    unsafe {
        let e = S::exp(S::mul(x, S::splat(2.0 / cap)));
        let tanh = S::add(S::splat(1.0), S::div(S::splat(-2.0), S::add(e, S::splat(1.0))));
        S::mul(tanh, S::splat(cap))
    }
}

/// Rotates the first `2 * cos.len()` elements of a head: element `i` with element `i + cos.len()`.
#[inline]
pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (first, second) = head[..2 * half].split_at_mut(half);
    for i in 0..half {
        let (a, b) = (first[i], second[i]);
        first[i] = a * cos[i] - b * sin[i];
        second[i] = b * cos[i] + a * sin[i];
    }
}

/// The error function with an error of at most 1.5e-7: Abramowitz and Stegun, 7.1.26, in f64.
fn erf(x: f32) -> f32 {
    let x = f64::from(x);
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let poly = t
        * (0.254_829_592
            + t * (-0.284_496_736 + t * (1.421_413_741 + t * (-1.453_152_027 + t * 1.061_405_429))));
    ((1.0 - poly * (-x * x).exp()) * x.signum()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_model_testing::{hash_of_bits, noise};

    /// Calls a function with every instruction set of the CPU.
    macro_rules! everywhere {
        ($check:ident) => {
            kernel! { fn on / $check () }
            // SAFETY: this CPU has the instruction sets.
            Isa::available().into_iter().for_each(|isa| unsafe { on(isa) });
        };
    }

    fn close(got: &[f32], expected: impl Iterator<Item = f64>, tolerance: f64, what: &str) {
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (f64::from(*got) - expected).abs();
            assert!(error <= tolerance * expected.abs().max(1.0), "{what} at {i}: {got} not {expected}");
        }
    }

    #[test]
    fn norms_match_the_formula_to_1e_6() {
        for isa in Isa::available() {
            for n in [1, 8, 16, 47, 64, 100] {
                let (x, weight) = (noise(1, n), noise(2, n));
                let mut out = vec![0.0; n];
                rms_norm(isa, &x, &weight, 1e-6, &mut out);
                let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
                let expected =
                    x.iter().zip(&weight).map(|(x, w)| f64::from(*x) / (mean + 1e-6).sqrt() * f64::from(*w));
                close(&out, expected, 1e-6, "norm");
                let mut in_place = x.clone();
                rms_norm_in_place(isa, &mut in_place, &weight, 1e-6);
                assert_eq!(in_place, out);
            }
        }
    }

    #[test]
    fn gates_match_their_formulas_to_1e_6() {
        #[inline(always)]
        unsafe fn check<S: Simd>() {
            let formula = |gate: GateFunction, x: f64| match gate {
                GateFunction::Silu => x / (1.0 + (-x).exp()),
                GateFunction::GeluTanh => {
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                    0.5 * x * (1.0 + inner.tanh())
                }
                GateFunction::GeluErf => {
                    0.5 * x * (1.0 + f64::from(erf((x / std::f64::consts::SQRT_2) as f32)))
                }
            };
            for seed in 0..20 {
                let (x, up) =
                    (noise(seed, LANES).iter().map(|x| x * 8.0).collect::<Vec<_>>(), noise(9, LANES));
                for gate in [GateFunction::Silu, GateFunction::GeluTanh, GateFunction::GeluErf] {
                    let mut out = [0.0; LANES];
                    // SAFETY: only called with the CPU's instruction sets; sixteen numbers each.
                    unsafe {
                        S::store(
                            out.as_mut_ptr(),
                            gated::<S>(gate, S::load(x.as_ptr()), S::load(up.as_ptr())),
                        );
                    }
                    let expected =
                        x.iter().zip(&up).map(|(x, up)| formula(gate, f64::from(*x)) * f64::from(*up));
                    close(&out, expected, 1e-6, &format!("{gate:?}"));
                }
            }
        }
        everywhere!(check);
    }

    #[test]
    fn the_error_function_matches_known_values() {
        for (x, expected) in [(0.0, 0.0), (0.5, 0.520_499_9), (1.0, 0.842_700_8), (-2.0, -0.995_322_3)] {
            assert!((erf(x) - expected).abs() < 3e-7, "erf({x})");
        }
    }

    #[test]
    fn soft_caps_match_tanh_to_1e_6_of_the_cap() {
        for isa in Isa::available() {
            let mut x: Vec<f32> = noise(4, 37).iter().map(|x| x * 100.0).collect();
            let expected: Vec<f64> = x.iter().map(|x| 30.0 * (f64::from(*x) / 30.0).tanh()).collect();
            soft_cap(isa, &mut x, 30.0);
            close(&x, expected.into_iter(), 3e-5, "soft cap");
        }
    }

    #[test]
    fn exponentials_match_to_1e_6_and_vanish_far_below() {
        #[inline(always)]
        unsafe fn check<S: Simd>() {
            for i in -8700..8700 {
                let x = i as f32 / 100.0;
                let mut out = [0.0; LANES];
                // SAFETY: only called with the CPU's instruction sets.
                unsafe { S::store(out.as_mut_ptr(), S::exp(S::splat(x))) };
                let expected = f64::from(x).exp();
                assert!((f64::from(out[3]) / expected - 1.0).abs() < 1e-6, "e^{x} = {}", out[3]);
            }
            for x in [-88.0, -1000.0, f32::NEG_INFINITY] {
                let mut out = [1.0; LANES];
                // SAFETY: as above.
                unsafe { S::store(out.as_mut_ptr(), S::exp(S::splat(x))) };
                assert_eq!(out, [0.0; LANES], "e^{x}");
            }
        }
        everywhere!(check);
    }

    /// Recorded with AVX-512.
    #[test]
    fn x86_and_arm_compute_rows_with_the_same_bits() {
        let isas = Isa::available().into_iter();
        for isa in isas.filter(|isa| *isa != Isa::Portable || cfg!(target_arch = "aarch64")) {
            let (x, weight) = (noise(1, 100), noise(2, 100));
            let mut out = vec![0.0; 100];
            rms_norm(isa, &x, &weight, 1e-6, &mut out);
            soft_cap(isa, &mut out, 0.5);
            assert_eq!(hash_of_bits(&out), 0x32e7_c148_f879_fef4, "{isa:?}");
        }
    }

    #[test]
    fn rotation_turns_pairs_and_keeps_the_rest() {
        let mut head = [1.0, 2.0, 3.0, 4.0, 9.0];
        rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0, 9.0]);
    }
}
