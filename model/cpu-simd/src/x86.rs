//! Sixteen lanes in one register of AVX-512, or in two of AVX2.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction

use std::arch::x86_64::*;

use super::lanes::Simd;
use super::stored::{E4M3_BITS, E4M3_SCALE};

/// One 512-bit register.
#[derive(Clone, Copy)]
pub struct Avx512;

impl Simd for Avx512 {
    type V = __m512;
    const NUM_REGISTERS: usize = 32;
    const PANEL_ROWS: usize = 14;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        unsafe {
            let half = _mm256_loadu_si256(p.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        unsafe {
            let words = _mm512_slli_epi32::<20>(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())));
            let bits = _mm512_and_si512(words, _mm512_set1_epi32(E4M3_BITS));
            _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(E4M3_SCALE))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i32(p: *const i32) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_loadu_si512(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u16) -> [__m512; 2] {
        unsafe {
            let both = _mm512_loadu_si512(p.cast());
            let first = _mm512_slli_epi32::<16>(both);
            let second = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)]
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_for_later(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_to_write(p: *mut f32) {
        // The intrinsic with a hint to write compiles to nothing without the feature that names it.
        unsafe { std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn store_past_caches(p: *mut f32, v: __m512) {
        unsafe { _mm512_stream_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn pow2(a: __m512) -> __m512 {
        unsafe {
            let bits = _mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(bits))
        }
    }
    #[inline(always)]
    unsafe fn fraction(a: __m512) -> __m512 {
        unsafe { _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn times_pow2(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sum(a: __m512) -> f32 {
        unsafe { sum8(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps(((1u32 << n) - 1) as __mmask16, p) }
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: __m512, n: usize) {
        unsafe { _mm512_mask_storeu_ps(p, ((1u32 << n) - 1) as __mmask16, v) }
    }
    #[inline(always)]
    unsafe fn max_lane(a: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(a) }
    }
}

/// Two 256-bit registers.
#[derive(Clone, Copy)]
pub struct Avx2;

impl Simd for Avx2 {
    type V = (__m256, __m256);
    const NUM_REGISTERS: usize = 16;
    const PANEL_ROWS: usize = 6;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { (_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        unsafe { (widen8(p), widen8(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        unsafe {
            (_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())))
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        unsafe {
            let (low, high) = (_mm_loadl_epi64(p.cast()), _mm_loadl_epi64(p.add(8).cast()));
            let low = _mm256_slli_epi32::<20>(_mm256_cvtepi8_epi32(low));
            let high = _mm256_slli_epi32::<20>(_mm256_cvtepi8_epi32(high));
            let (mask, scale) = (_mm256_set1_epi32(E4M3_BITS), _mm256_set1_ps(E4M3_SCALE));
            (
                _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(low, mask)), scale),
                _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(high, mask)), scale),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self::V {
        unsafe {
            let (low, high) = (_mm_loadl_epi64(p.cast()), _mm_loadl_epi64(p.add(8).cast()));
            (_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)))
        }
    }
    #[inline(always)]
    unsafe fn load_i32(p: *const i32) -> Self::V {
        unsafe {
            let (low, high) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast()));
            (_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u16) -> [Self::V; 2] {
        unsafe {
            let (low, high) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(16).cast()));
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            [
                (
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ),
                (
                    _mm256_castsi256_ps(_mm256_and_si256(low, mask)),
                    _mm256_castsi256_ps(_mm256_and_si256(high, mask)),
                ),
            ]
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_for_later(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { (_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { (_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        unsafe { (_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe {
            (
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.0),
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn pow2(a: Self::V) -> Self::V {
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let lo = _mm256_add_epi32(_mm256_cvtps_epi32(a.0), bias);
            let hi = _mm256_add_epi32(_mm256_cvtps_epi32(a.1), bias);
            (
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(lo)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(hi)),
            )
        }
    }
    #[inline(always)]
    unsafe fn sum(a: Self::V) -> f32 {
        unsafe { sum8(_mm256_add_ps(a.0, a.1)) }
    }
}

/// Widens eight bf16.
#[inline(always)]
unsafe fn widen8(p: *const u16) -> __m256 {
    unsafe {
        let eight = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(eight))
    }
}

#[inline(always)]
unsafe fn sum8(a: __m256) -> f32 {
    unsafe {
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
    }
}
