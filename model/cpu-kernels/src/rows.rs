//! Operations on single rows of activations: norms, sums, rotary embedding, gated activations.

use crate::cpu::Cpu;
use baton_cpu_simd::{LANES, Simd, kernel};

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
pub fn rms_norm(cpu: &Cpu, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    // SAFETY: `Cpu::on` has checked the instruction set; the lengths are equal.
    unsafe { rms_norm_kernel(cpu.isa, x.as_ptr(), weight.as_ptr(), eps, out.as_mut_ptr(), x.len()) }
}

/// As [`rms_norm`], in place.
pub fn rms_norm_in_place(cpu: &Cpu, x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    // SAFETY: as in `rms_norm`, and the kernel reads an element before it writes it.
    unsafe { rms_norm_kernel(cpu.isa, x.as_ptr(), weight.as_ptr(), eps, x.as_mut_ptr(), x.len()) }
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

/// `to = to + from * factor`, product and sum each rounded.
///
/// # Panics
/// When the lengths differ.
pub fn add_scaled(cpu: &Cpu, to: &mut [f32], from: &[f32], factor: f32) {
    assert_eq!(to.len(), from.len());
    // SAFETY: `Cpu::on` has checked the instruction set; the lengths are equal.
    unsafe { add_scaled_kernel(cpu.isa, to.as_mut_ptr(), from.as_ptr(), factor, to.len()) }
}

kernel! {
    /// # Safety
    /// Pointers are valid for `n` numbers.
    fn add_scaled_kernel / add_scaled_of (to: *mut f32, from: *const f32, factor: f32, n: usize)
}

#[inline(always)]
unsafe fn add_scaled_of<S: Simd>(to: *mut f32, from: *const f32, factor: f32, n: usize) {
    // SAFETY: indices are below `n`.
    unsafe {
        let factor = S::splat(factor);
        let whole = n - n % LANES;
        let mut i = 0;
        while i < whole {
            let v = S::mul(S::load(from.add(i)), factor);
            S::store(to.add(i), S::add(S::load(to.add(i)), v));
            i += LANES;
        }
        if i < n {
            let v = S::mul(S::load_part(from.add(i), n - i), factor);
            S::store_part(to.add(i), S::add(S::load_part(to.add(i), n - i), v), n - i);
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
pub unsafe fn gated<S: Simd>(gate: GateFunction, x: S::V, up: S::V) -> S::V {
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
pub fn soft_cap(cpu: &Cpu, x: &mut [f32], cap: f32) {
    // SAFETY: `Cpu::on` has checked the instruction set; a slice is valid for its length.
    unsafe { soft_cap_kernel(cpu.isa, x.as_mut_ptr(), x.len(), cap) }
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

/// Rotates the first `2 * cos.len()` elements of each head of `head_dim`: element `i` with element `i + cos.len()`.
///
/// # Panics
/// When heads are shorter or not whole, or `cos` and `sin` differ in length.
pub fn rotate(cpu: &Cpu, heads: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    assert!(2 * half <= head_dim && half == sin.len() && heads.len().is_multiple_of(head_dim));
    // SAFETY: `Cpu::on` has checked the instruction set; the lengths were checked.
    unsafe {
        rotate_kernel(cpu.isa, heads.as_mut_ptr(), heads.len(), head_dim, cos.as_ptr(), sin.as_ptr(), half)
    }
}

kernel! {
    /// # Safety
    /// `heads` is valid for `n` numbers, a multiple of `head_dim`, which is at least `2 * half`; `cos` and `sin` are valid
    /// for `half`.
    fn rotate_kernel / rotate_of (
        heads: *mut f32,
        n: usize,
        head_dim: usize,
        cos: *const f32,
        sin: *const f32,
        half: usize,
    )
}

#[inline(always)]
unsafe fn rotate_of<S: Simd>(
    heads: *mut f32,
    n: usize,
    head_dim: usize,
    cos: *const f32,
    sin: *const f32,
    half: usize,
) {
    let whole = half - half % LANES;
    let mut done = 0;
    while done < n {
        // SAFETY: indices are inside the head, or below `half`.
        unsafe {
            let first = heads.add(done);
            let second = first.add(half);
            let mut i = 0;
            while i < whole {
                let (a, b) = (S::load(first.add(i)), S::load(second.add(i)));
                let [a, b] = rotated::<S>(a, b, S::load(cos.add(i)), S::load(sin.add(i)));
                S::store(first.add(i), a);
                S::store(second.add(i), b);
                i += LANES;
            }
            if i < half {
                let n = half - i;
                let (a, b) = (S::load_part(first.add(i), n), S::load_part(second.add(i), n));
                let [a, b] = rotated::<S>(a, b, S::load_part(cos.add(i), n), S::load_part(sin.add(i), n));
                S::store_part(first.add(i), a, n);
                S::store_part(second.add(i), b, n);
            }
        }
        done += head_dim;
    }
}

/// `[a cos - b sin, b cos + a sin]`, each product and sum rounded.
#[inline(always)]
unsafe fn rotated<S: Simd>(a: S::V, b: S::V, cos: S::V, sin: S::V) -> [S::V; 2] {
    // SAFETY: no pointers.
    unsafe {
        let negative = S::mul(b, S::splat(-1.0));
        [S::add(S::mul(a, cos), S::mul(negative, sin)), S::add(S::mul(b, cos), S::mul(a, sin))]
    }
}

/// The error function with an error of at most 1.5e-7: Abramowitz and Stegun, 7.1.26, in f64.
pub fn erf(x: f32) -> f32 {
    let x = f64::from(x);
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let poly = t
        * (0.254_829_592
            + t * (-0.284_496_736 + t * (1.421_413_741 + t * (-1.453_152_027 + t * 1.061_405_429))));
    ((1.0 - poly * (-x * x).exp()) * x.signum()) as f32
}
