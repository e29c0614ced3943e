//! Integers in registers of AVX-512 and AVX2.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction

use std::arch::x86_64::*;

use super::operations::IntegerSimd;
use baton_cpu_simd::{Avx2, Avx512};

/// AVX-512 with VNNI, which sums four products per instruction.
pub(super) struct Vnni;

impl IntegerSimd for Vnni {
    type Floats = Avx512;
    type I = __m512i;
    type Levels = __m512i;
    type Activations = __m512i;
    const ROWS: usize = 6;
    const HALVES: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn levels(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [__m512i; 2] {
        unsafe {
            let both = _mm512_loadu_si512(p.cast());
            let mask = _mm512_set1_epi8(15);
            [_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask)]
        }
    }
    #[inline(always)]
    unsafe fn activations(p: *const u8) -> __m512i {
        unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn dot(sums: __m512i, levels: __m512i, activations: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sums, levels, activations) }
    }
    #[inline(always)]
    unsafe fn to_floats(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
}

/// AVX2 with products of 16 bits: products of 8 bits would saturate.
pub(super) struct Avx2Integers;

impl IntegerSimd for Avx2Integers {
    type Floats = Avx2;
    /// Outputs 0 to 7 and 8 to 15.
    type I = (__m256i, __m256i);
    /// For each half, levels 0 and 2, and levels 1 and 3, as pairs of i16.
    type Levels = [[__m256i; 2]; 2];
    /// Activations 0 and 2, and 1 and 3, as pairs of i16.
    type Activations = [__m256i; 2];
    const ROWS: usize = 2;
    const HALVES: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self::I {
        unsafe { (_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn levels(p: *const u8) -> Self::Levels {
        unsafe { [pairs(_mm256_loadu_si256(p.cast())), pairs(_mm256_loadu_si256(p.add(32).cast()))] }
    }
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [Self::Levels; 2] {
        unsafe {
            let (low, high) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast()));
            let mask = _mm256_set1_epi8(15);
            let (next_low, next_high) = (_mm256_srli_epi16::<4>(low), _mm256_srli_epi16::<4>(high));
            [
                [pairs(_mm256_and_si256(low, mask)), pairs(_mm256_and_si256(high, mask))],
                [pairs(_mm256_and_si256(next_low, mask)), pairs(_mm256_and_si256(next_high, mask))],
            ]
        }
    }
    #[inline(always)]
    unsafe fn activations(p: *const u8) -> Self::Activations {
        unsafe {
            let four = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(four)), _mm256_srai_epi16::<8>(four)]
        }
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::I, levels: Self::Levels, x: Self::Activations) -> Self::I {
        unsafe { (add_products(sums.0, levels[0], x), add_products(sums.1, levels[1], x)) }
    }
    #[inline(always)]
    unsafe fn to_floats(sums: Self::I) -> (__m256, __m256) {
        unsafe { (_mm256_cvtepi32_ps(sums.0), _mm256_cvtepi32_ps(sums.1)) }
    }
}

/// Adds four products to each of eight sums.
#[inline(always)]
unsafe fn add_products(sums: __m256i, levels: [__m256i; 2], x: [__m256i; 2]) -> __m256i {
    unsafe {
        let (even, odd) = (_mm256_madd_epi16(levels[0], x[0]), _mm256_madd_epi16(levels[1], x[1]));
        _mm256_add_epi32(sums, _mm256_add_epi32(even, odd))
    }
}

/// Bytes as i16: the even ones, then the odd ones.
#[inline(always)]
unsafe fn pairs(bytes: __m256i) -> [__m256i; 2] {
    unsafe { [_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(bytes)] }
}
