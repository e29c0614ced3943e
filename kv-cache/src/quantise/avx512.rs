//! AVX-512 code for the loops that the compiler vectorises badly: quantising to FP8, and INT4 in both directions.
//! The loops in `portable.rs` are the reference, bit for bit.

#![allow(clippy::undocumented_unsafe_blocks)] // each load and store covers sixteen elements of a slice of that length

use std::arch::x86_64::*;

use super::portable::{
    INT4_GROUP, INT4_MAX, INT4_SHIFTED, bf16_bits, bf16_value, dequantise_int4_group, quantise_int4_group,
    scale_from, scale_of,
};
use crate::e4m3;

/// Quantises vectors to FP8, each with its own scale.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
pub(super) fn quantise_fp8(vectors: &[f32], head_dim: usize, elements: &mut [u8], scales: &mut [u8]) {
    let scales = scales.as_chunks_mut::<2>().0;
    let elements = elements.chunks_exact_mut(head_dim);
    for ((vector, elements), scale) in vectors.chunks_exact(head_dim).zip(elements).zip(scales) {
        let rounded = scale_of(vector, e4m3::MAX);
        *scale = bf16_bits(rounded).to_ne_bytes();
        if rounded.is_nan() {
            elements.fill(0);
            continue;
        }
        let inverse = 1.0 / rounded;
        let (numbers, rest) = vector.as_chunks::<16>();
        let (codes, rest_codes) = elements.as_chunks_mut::<16>();
        for (numbers, codes) in numbers.iter().zip(codes) {
            let x = unsafe { _mm512_loadu_ps(numbers.as_ptr()) };
            let bytes = _mm512_cvtepi32_epi8(e4m3_codes(_mm512_mul_ps(x, _mm512_set1_ps(inverse))));
            unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), bytes) };
        }
        for (code, &x) in rest_codes.iter_mut().zip(rest) {
            *code = e4m3::from_f32(x * inverse);
        }
    }
}

/// [`e4m3::from_f32`] of sixteen finite numbers.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
#[inline]
fn e4m3_codes(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let sign = _mm512_and_si512(_mm512_srli_epi32::<24>(bits), _mm512_set1_epi32(0x80));
    let magnitude = _mm512_abs_ps(x);
    let steps = _mm512_castps_si512(_mm512_add_ps(magnitude, _mm512_set1_ps(16384.0)));
    let denormal = _mm512_sub_epi32(steps, _mm512_set1_epi32(16384.0f32.to_bits() as i32));
    let bits = _mm512_castps_si512(_mm512_min_ps(magnitude, _mm512_set1_ps(e4m3::MAX)));
    let odd = _mm512_and_si512(_mm512_srli_epi32::<20>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7_ffff)), odd);
    let normal = _mm512_sub_epi32(_mm512_srli_epi32::<20>(rounded), _mm512_set1_epi32(120 << 3));
    let is_denormal = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitude, _mm512_set1_ps(1.0 / 64.0));
    _mm512_or_si512(sign, _mm512_mask_blend_epi32(is_denormal, normal, denormal))
}

/// See [`Isa::quantise_int4`](super::Isa::quantise_int4).
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
pub(super) fn quantise_int4(vectors: &[f32], head_dim: usize, codes: &mut [u8], scales: &mut [u8]) {
    let codes = codes.chunks_exact_mut(head_dim.div_ceil(2));
    let scales = scales.chunks_exact_mut(head_dim.div_ceil(INT4_GROUP) * 2);
    for ((vector, codes), scales) in vectors.chunks_exact(head_dim).zip(codes).zip(scales) {
        let groups = vector.chunks(INT4_GROUP).zip(codes.chunks_mut(INT4_GROUP / 2));
        for ((numbers, codes), to) in groups.zip(scales.as_chunks_mut::<2>().0) {
            let (Ok(numbers), Ok(codes)) =
                (<&[f32; INT4_GROUP]>::try_from(numbers), <&mut [u8; 16]>::try_from(&mut *codes))
            else {
                *to = quantise_int4_group(numbers, codes);
                continue;
            };
            let (low, high) =
                unsafe { (_mm512_loadu_ps(numbers.as_ptr()), _mm512_loadu_ps(numbers.as_ptr().add(16))) };
            let magnitude = |x| _mm512_castps_si512(_mm512_abs_ps(x));
            let largest = _mm512_reduce_max_epu32(_mm512_max_epu32(magnitude(low), magnitude(high)));
            let scale = scale_from(largest, INT4_MAX);
            *to = bf16_bits(scale).to_ne_bytes();
            let inverse = _mm512_set1_ps(if scale.is_nan() { 0.0 } else { 1.0 / scale });
            let code = |x| {
                let shifted = _mm512_add_ps(_mm512_mul_ps(x, inverse), _mm512_set1_ps(INT4_SHIFTED));
                _mm512_and_si512(_mm512_castps_si512(shifted), _mm512_set1_epi32(15))
            };
            let bytes = _mm512_or_si512(code(low), _mm512_slli_epi32::<4>(code(high)));
            unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(bytes)) };
        }
    }
}

/// See [`Isa::dequantise_int4`](super::Isa::dequantise_int4).
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
pub(super) fn dequantise_int4(codes: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    let codes = codes.chunks_exact(head_dim.div_ceil(2));
    let scales = scales.chunks_exact(head_dim.div_ceil(INT4_GROUP) * 2);
    for ((vector, codes), scales) in vectors.chunks_exact_mut(head_dim).zip(codes).zip(scales) {
        let groups = vector.chunks_mut(INT4_GROUP).zip(codes.chunks(INT4_GROUP / 2));
        for ((numbers, codes), &scale) in groups.zip(scales.as_chunks::<2>().0) {
            let (Ok(numbers), Ok(codes)) =
                (<&mut [f32; INT4_GROUP]>::try_from(&mut *numbers), <&[u8; 16]>::try_from(codes))
            else {
                dequantise_int4_group(codes, scale, numbers);
                continue;
            };
            let scale = _mm512_set1_ps(bf16_value(u16::from_ne_bytes(scale)));
            let words = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) });
            let number =
                |code| _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(8))), scale);
            let low = number(_mm512_and_si512(words, _mm512_set1_epi32(15)));
            let high = number(_mm512_srli_epi32::<4>(words));
            unsafe {
                _mm512_storeu_ps(numbers.as_mut_ptr(), low);
                _mm512_storeu_ps(numbers.as_mut_ptr().add(16), high);
            }
        }
    }
}
