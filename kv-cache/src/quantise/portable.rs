//! The loops that quantise and dequantise vectors. They have no branches, so the compiler vectorises them.
//!
//! `isa.rs` compiles each loop for AVX-512, for AVX2 and for the baseline. A few loops that the compiler vectorises badly
//! are written by hand in `avx512.rs`. Every version computes in the same order with the same rounding, so all results
//! agree bit for bit, and any version can be the reference of the others.

use crate::{KvDtype, e4m3};

/// Numbers that share a scale in INT4.
pub const INT4_GROUP: usize = 32;

/// The largest code that is used: the type is symmetric.
const INT8_MAX: f32 = 127.0;

/// The largest code of four bits.
pub(super) const INT4_MAX: f32 = 7.0;
/// Added to a number, this makes a float with steps of one whose lowest bits are the number plus eight.
pub(super) const INT4_SHIFTED: f32 = 12_582_912.0 + 8.0;

#[inline(always)]
pub(super) fn quantise(
    dtype: KvDtype,
    vectors: &[f32],
    head_dim: usize,
    elements: &mut [u8],
    scales: &mut [u8],
) {
    match dtype {
        KvDtype::F32 => quantise_each(elements, vectors, f32::to_ne_bytes),
        KvDtype::F16 => quantise_each(elements, vectors, |x| f16_bits(x).to_ne_bytes()),
        KvDtype::Bf16 => quantise_each(elements, vectors, |x| bf16_bits(x).to_ne_bytes()),
        KvDtype::Fp8 | KvDtype::Int8 => {
            let scales = scales.as_chunks_mut::<2>().0;
            let elements = elements.chunks_exact_mut(head_dim);
            for ((vector, elements), scale) in vectors.chunks_exact(head_dim).zip(elements).zip(scales) {
                let largest_code = if dtype == KvDtype::Fp8 { e4m3::MAX } else { INT8_MAX };
                let rounded = scale_of(vector, largest_code);
                *scale = bf16_bits(rounded).to_ne_bytes();
                let inverse = 1.0 / rounded;
                if rounded.is_nan() {
                    // The whole vector reads back as NaN, whatever its codes are.
                    elements.fill(0);
                } else if dtype == KvDtype::Fp8 {
                    quantise_each(elements, vector, |x| [e4m3::from_f32(x * inverse)]);
                } else {
                    // The sum has steps of one: its low bits are the rounded number.
                    quantise_each(elements, vector, |x| [(x * inverse + 12_582_912.0).to_bits() as u8]);
                }
            }
        }
    }
}

#[inline(always)]
pub(super) fn dequantise(
    dtype: KvDtype,
    elements: &[u8],
    scales: &[u8],
    head_dim: usize,
    vectors: &mut [f32],
) {
    match dtype {
        KvDtype::F32 => dequantise_each(vectors, elements, f32::from_ne_bytes),
        KvDtype::F16 => dequantise_each(vectors, elements, |bytes| f16_value(u16::from_ne_bytes(bytes))),
        KvDtype::Bf16 => dequantise_each(vectors, elements, |bytes| bf16_value(u16::from_ne_bytes(bytes))),
        KvDtype::Fp8 | KvDtype::Int8 => {
            let scales = scales.as_chunks::<2>().0;
            let elements = elements.chunks_exact(head_dim);
            for ((vector, elements), scale) in vectors.chunks_exact_mut(head_dim).zip(elements).zip(scales) {
                let scale = bf16_value(u16::from_ne_bytes(*scale));
                if dtype == KvDtype::Fp8 {
                    dequantise_each(vector, elements, |[code]| e4m3::to_f32(code) * scale);
                } else {
                    dequantise_each(vector, elements, |[code]| f32::from(code as i8) * scale);
                }
            }
        }
    }
}

#[inline(always)]
pub(super) fn quantise_int4(vectors: &[f32], head_dim: usize, codes: &mut [u8], scales: &mut [u8]) {
    let codes = codes.chunks_exact_mut(head_dim.div_ceil(2));
    let scales = scales.chunks_exact_mut(head_dim.div_ceil(INT4_GROUP) * 2);
    for ((vector, codes), scales) in vectors.chunks_exact(head_dim).zip(codes).zip(scales) {
        let (groups, part) = vector.as_chunks::<INT4_GROUP>();
        let group_codes = codes.as_chunks_mut::<{ INT4_GROUP / 2 }>().0;
        let scales = scales.as_chunks_mut::<2>().0;
        for ((numbers, codes), scale) in groups.iter().zip(group_codes).zip(scales.iter_mut()) {
            *scale = quantise_int4_group(numbers, codes);
        }
        // A partial group, perhaps with as many codes as a full one.
        if !part.is_empty() {
            let codes = &mut codes[groups.len() * INT4_GROUP / 2..];
            scales[groups.len()] = quantise_int4_group(part, codes);
        }
    }
}

/// Quantises one group. The first half of its numbers are the low nibbles of its bytes, so that vector code needs no
/// shuffle.
#[inline(always)]
pub(super) fn quantise_int4_group(numbers: &[f32], codes: &mut [u8]) -> [u8; 2] {
    let scale = scale_of(numbers, INT4_MAX);
    // With a scale of NaN the codes do not matter.
    let inverse = if scale.is_nan() { 0.0 } else { 1.0 / scale };
    let (low, high) = numbers.split_at(codes.len());
    for (code, &x) in codes.iter_mut().zip(low) {
        *code = int4_bits(x, inverse);
    }
    for (code, &x) in codes.iter_mut().zip(high) {
        *code |= int4_bits(x, inverse) << 4;
    }
    bf16_bits(scale).to_ne_bytes()
}

#[inline(always)]
pub(super) fn dequantise_int4(codes: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    let codes = codes.chunks_exact(head_dim.div_ceil(2));
    let scales = scales.chunks_exact(head_dim.div_ceil(INT4_GROUP) * 2);
    for ((vector, codes), scales) in vectors.chunks_exact_mut(head_dim).zip(codes).zip(scales) {
        let groups = vector.chunks_mut(INT4_GROUP).zip(codes.chunks(INT4_GROUP / 2));
        for ((numbers, codes), scale) in groups.zip(scales.as_chunks::<2>().0) {
            dequantise_int4_group(codes, *scale, numbers);
        }
    }
}

#[inline(always)]
pub(super) fn dequantise_int4_group(codes: &[u8], scale: [u8; 2], numbers: &mut [f32]) {
    let scale = bf16_value(u16::from_ne_bytes(scale));
    let (low, high) = numbers.split_at_mut(codes.len());
    for (x, &code) in low.iter_mut().zip(codes) {
        *x = (f32::from(code & 15) - 8.0) * scale;
    }
    for (x, &code) in high.iter_mut().zip(codes) {
        *x = (f32::from(code >> 4) - 8.0) * scale;
    }
}

/// The nearest integer plus eight.
#[inline(always)]
fn int4_bits(x: f32, inverse: f32) -> u8 {
    // The sum has steps of one: its low bits are the rounded number. The code of NaN is arbitrary.
    (x * inverse + INT4_SHIFTED).to_bits() as u8 & 15
}

#[inline(always)]
fn quantise_each<const N: usize>(elements: &mut [u8], vector: &[f32], quantise: impl Fn(f32) -> [u8; N]) {
    for (to, &x) in elements.as_chunks_mut().0.iter_mut().zip(vector) {
        *to = quantise(x);
    }
}

#[inline(always)]
fn dequantise_each<const N: usize>(vector: &mut [f32], elements: &[u8], dequantise: impl Fn([u8; N]) -> f32) {
    for (to, &bytes) in vector.iter_mut().zip(elements.as_chunks().0) {
        *to = dequantise(bytes);
    }
}

/// The smallest bf16 scale for which `vector` divided by it is within `largest_code`; NaN when a number is not
/// finite.
#[inline(always)]
pub(super) fn scale_of(vector: &[f32], largest_code: f32) -> f32 {
    // Magnitudes have the order of their bits.
    let mut largest = 0;
    for x in vector {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    scale_from(largest, largest_code)
}

/// The scale for the bits of the largest magnitude.
#[inline(always)]
pub(super) fn scale_from(largest: u32, largest_code: f32) -> f32 {
    if largest >= f32::INFINITY.to_bits() {
        return f32::NAN;
    }
    // Without the bound, tiny scales would have no finite inverse. At the bound all codes are zero.
    let scale = (f32::from_bits(largest) / largest_code).max(f32::MIN_POSITIVE);
    f32::from_bits((scale.to_bits() + 0xffff) & 0xffff_0000)
}

/// As `half::bf16::from_f32`.
#[inline(always)]
pub(super) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    (if x.is_nan() { nan } else { rounded }) as u16
}

/// As `half::bf16::to_f32`, which keeps quiet NaNs.
#[inline(always)]
pub(super) fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// As `half::f16::from_f32`.
#[inline(always)]
pub(super) fn f16_bits(x: f32) -> u16 {
    let sign = x.to_bits() >> 16 & 0x8000;
    let bits = x.to_bits() & 0x7fff_ffff;
    // Steps of 2^-24, the steps of an f32 at 1/2: the addition rounds.
    let denormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + (bits >> 13 & 1)) >> 13;
    let nan = 0x7e00 | bits >> 13 & 0x3ff;
    let magnitude = if bits < 113 << 23 { denormal } else { normal };
    let magnitude = if bits >= 143 << 23 { 0x7c00 } else { magnitude };
    let magnitude = if bits > 0x7f80_0000 { nan } else { magnitude };
    (sign | magnitude) as u16
}

/// As `half::f16::to_f32`.
#[inline(always)]
pub(super) fn f16_value(bits: u16) -> f32 {
    let (sign, magnitude) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    // Read as an f32, the number is too small by the ratio of the biases, denormal numbers included.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = 0x7f80_0000 | magnitude << 13;
    let special = if magnitude > 0x7c00 { special | 0x40_0000 } else { special };
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}
