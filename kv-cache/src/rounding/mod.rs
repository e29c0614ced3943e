//! How vectors are rounded and widened, for every instruction set that the processor may have.
//!
//! Each operation is written once, as loops without branches, and compiled for AVX-512, for AVX2 and for what every
//! processor has; the compiler makes vectors of them, but for a few (`avx512.rs`). Nothing is computed in another order or with another rounding,
//! so that all agree to the bit, and any of them can be the others' reference.

#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::{KvDtype, e4m3, wire::INT4_GROUP};

/// The largest whole number that is used: the type is symmetric.
const INT8_MAX: f32 = 127.0;

/// Likewise, of four bits.
const INT4_MAX: f32 = 7.0;
/// To this a number is added to have steps of one: its lowest bits are then eight more than the number.
const INT4_SHIFTED: f32 = 12_582_912.0 + 8.0;

/// What the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The best one that this processor runs. The standard library remembers what it found.
    #[inline]
    pub(crate) fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
            {
                return Isa::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }

    /// Rounds vectors of `head_dim` numbers; see [`KvDtype::store_vectors`], which checks the lengths.
    pub(crate) fn store(
        self,
        dtype: KvDtype,
        vectors: &[f32],
        head_dim: usize,
        elements: &mut [u8],
        scales: &mut [u8],
    ) {
        match self {
            // SAFETY: `detect` has found the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { store_avx512(dtype, vectors, head_dim, elements, scales) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { store_avx2(dtype, vectors, head_dim, elements, scales) },
            Isa::Portable => store(dtype, vectors, head_dim, elements, scales),
        }
    }

    /// Widens vectors of `head_dim` numbers; see [`KvDtype::load_vectors`], which checks the lengths.
    pub(crate) fn load(
        self,
        dtype: KvDtype,
        elements: &[u8],
        scales: &[u8],
        head_dim: usize,
        vectors: &mut [f32],
    ) {
        match self {
            // SAFETY: `detect` has found the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { load_avx512(dtype, elements, scales, head_dim, vectors) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { load_avx2(dtype, elements, scales, head_dim, vectors) },
            Isa::Portable => load(dtype, elements, scales, head_dim, vectors),
        }
    }
}

impl Isa {
    /// Rounds vectors of `head_dim` numbers to four bits, each [`INT4_GROUP`] of a vector with a scale of their own.
    pub(crate) fn store_int4(self, vectors: &[f32], head_dim: usize, codes: &mut [u8], scales: &mut [u8]) {
        match self {
            // SAFETY: `detect` has found the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::store_int4(vectors, head_dim, codes, scales) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { store_int4_avx2(vectors, head_dim, codes, scales) },
            Isa::Portable => store_int4(vectors, head_dim, codes, scales),
        }
    }

    /// The inverse of [`store_int4`](Self::store_int4), but for what rounding took.
    pub(crate) fn load_int4(self, codes: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
        match self {
            // SAFETY: `detect` has found the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::load_int4(codes, scales, head_dim, vectors) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { load_int4_avx2(codes, scales, head_dim, vectors) },
            Isa::Portable => load_int4(codes, scales, head_dim, vectors),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn store_int4_avx2(vectors: &[f32], head_dim: usize, codes: &mut [u8], scales: &mut [u8]) {
    store_int4(vectors, head_dim, codes, scales);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn load_int4_avx2(codes: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    load_int4(codes, scales, head_dim, vectors);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
fn store_avx512(dtype: KvDtype, vectors: &[f32], head_dim: usize, elements: &mut [u8], scales: &mut [u8]) {
    if dtype == KvDtype::Fp8 {
        return avx512::store_fp8(vectors, head_dim, elements, scales);
    }
    store(dtype, vectors, head_dim, elements, scales);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn store_avx2(dtype: KvDtype, vectors: &[f32], head_dim: usize, elements: &mut [u8], scales: &mut [u8]) {
    store(dtype, vectors, head_dim, elements, scales);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
fn load_avx512(dtype: KvDtype, elements: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    load(dtype, elements, scales, head_dim, vectors);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn load_avx2(dtype: KvDtype, elements: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    load(dtype, elements, scales, head_dim, vectors);
}

#[inline(always)]
fn store(dtype: KvDtype, vectors: &[f32], head_dim: usize, elements: &mut [u8], scales: &mut [u8]) {
    match dtype {
        KvDtype::F32 => store_each(elements, vectors, f32::to_ne_bytes),
        KvDtype::F16 => store_each(elements, vectors, |x| f16_bits(x).to_ne_bytes()),
        KvDtype::Bf16 => store_each(elements, vectors, |x| bf16_bits(x).to_ne_bytes()),
        KvDtype::Fp8 | KvDtype::Int8 => {
            let scales = scales.as_chunks_mut::<2>().0;
            let elements = elements.chunks_exact_mut(head_dim);
            for ((vector, elements), scale) in vectors.chunks_exact(head_dim).zip(elements).zip(scales) {
                let largest_code = if dtype == KvDtype::Fp8 { e4m3::MAX } else { INT8_MAX };
                let rounded = scale_of(vector, largest_code);
                *scale = bf16_bits(rounded).to_ne_bytes();
                let inverse = 1.0 / rounded;
                if rounded.is_nan() {
                    // All of the vector reads back as NaN, whatever its codes are.
                    elements.fill(0);
                } else if dtype == KvDtype::Fp8 {
                    store_each(elements, vector, |x| [e4m3::from_f32(x * inverse)]);
                } else {
                    // The sum has steps of one, and ends with the whole number.
                    store_each(elements, vector, |x| [(x * inverse + 12_582_912.0).to_bits() as u8]);
                }
            }
        }
    }
}

#[inline(always)]
fn load(dtype: KvDtype, elements: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    match dtype {
        KvDtype::F32 => load_each(vectors, elements, f32::from_ne_bytes),
        KvDtype::F16 => load_each(vectors, elements, |bytes| f16_value(u16::from_ne_bytes(bytes))),
        KvDtype::Bf16 => load_each(vectors, elements, |bytes| bf16_value(u16::from_ne_bytes(bytes))),
        KvDtype::Fp8 | KvDtype::Int8 => {
            let scales = scales.as_chunks::<2>().0;
            let elements = elements.chunks_exact(head_dim);
            for ((vector, elements), scale) in vectors.chunks_exact_mut(head_dim).zip(elements).zip(scales) {
                let scale = bf16_value(u16::from_ne_bytes(*scale));
                if dtype == KvDtype::Fp8 {
                    load_each(vector, elements, |[code]| e4m3::to_f32(code) * scale);
                } else {
                    load_each(vector, elements, |[code]| f32::from(code as i8) * scale);
                }
            }
        }
    }
}

#[inline(always)]
fn store_int4(vectors: &[f32], head_dim: usize, codes: &mut [u8], scales: &mut [u8]) {
    let codes = codes.chunks_exact_mut(head_dim.div_ceil(2));
    let scales = scales.chunks_exact_mut(head_dim.div_ceil(INT4_GROUP) * 2);
    for ((vector, codes), scales) in vectors.chunks_exact(head_dim).zip(codes).zip(scales) {
        let (groups, part) = vector.as_chunks::<INT4_GROUP>();
        let group_codes = codes.as_chunks_mut::<{ INT4_GROUP / 2 }>().0;
        let scales = scales.as_chunks_mut::<2>().0;
        for ((numbers, codes), scale) in groups.iter().zip(group_codes).zip(scales.iter_mut()) {
            *scale = store_int4_group(numbers, codes);
        }
        // A group that is not full, perhaps with as many codes as a full one.
        if !part.is_empty() {
            let codes = &mut codes[groups.len() * INT4_GROUP / 2..];
            scales[groups.len()] = store_int4_group(part, codes);
        }
    }
}

/// The first half of a group's numbers are the low halves of its bytes, so that vectors need no shuffle.
#[inline(always)]
fn store_int4_group(numbers: &[f32], codes: &mut [u8]) -> [u8; 2] {
    let scale = scale_of(numbers, INT4_MAX);
    // A scale that is no number leaves none of the group.
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
fn load_int4(codes: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    let codes = codes.chunks_exact(head_dim.div_ceil(2));
    let scales = scales.chunks_exact(head_dim.div_ceil(INT4_GROUP) * 2);
    for ((vector, codes), scales) in vectors.chunks_exact_mut(head_dim).zip(codes).zip(scales) {
        let groups = vector.chunks_mut(INT4_GROUP).zip(codes.chunks(INT4_GROUP / 2));
        for ((numbers, codes), scale) in groups.zip(scales.as_chunks::<2>().0) {
            load_int4_group(codes, *scale, numbers);
        }
    }
}

#[inline(always)]
fn load_int4_group(codes: &[u8], scale: [u8; 2], numbers: &mut [f32]) {
    let scale = bf16_value(u16::from_ne_bytes(scale));
    let (low, high) = numbers.split_at_mut(codes.len());
    for (x, &code) in low.iter_mut().zip(codes) {
        *x = (f32::from(code & 15) - 8.0) * scale;
    }
    for (x, &code) in high.iter_mut().zip(codes) {
        *x = (f32::from(code >> 4) - 8.0) * scale;
    }
}

/// Eight more than the nearest whole number.
#[inline(always)]
fn int4_bits(x: f32, inverse: f32) -> u8 {
    // The sum has steps of one, and ends with the whole number. What is no number becomes any.
    (x * inverse + INT4_SHIFTED).to_bits() as u8 & 15
}

#[inline(always)]
fn store_each<const N: usize>(elements: &mut [u8], vector: &[f32], round: impl Fn(f32) -> [u8; N]) {
    for (to, &x) in elements.as_chunks_mut().0.iter_mut().zip(vector) {
        *to = round(x);
    }
}

#[inline(always)]
fn load_each<const N: usize>(vector: &mut [f32], elements: &[u8], widen: impl Fn([u8; N]) -> f32) {
    for (to, &bytes) in vector.iter_mut().zip(elements.as_chunks().0) {
        *to = widen(bytes);
    }
}

/// The smallest bf16 by which `vector` can be divided to lie within `largest_code`; NaN when a number is not finite.
#[inline(always)]
fn scale_of(vector: &[f32], largest_code: f32) -> f32 {
    // Magnitudes are ordered as their bits are.
    let mut largest = 0;
    for x in vector {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    scale_from(largest, largest_code)
}

/// The same by the bits of the largest magnitude.
#[inline(always)]
fn scale_from(largest: u32, largest_code: f32) -> f32 {
    if largest >= f32::INFINITY.to_bits() {
        return f32::NAN;
    }
    // Small enough scales have no inverse; then all codes are zero.
    let scale = (f32::from_bits(largest) / largest_code).max(f32::MIN_POSITIVE);
    f32::from_bits((scale.to_bits() + 0xffff) & 0xffff_0000)
}

/// As `half::bf16::from_f32`.
#[inline(always)]
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    (if x.is_nan() { nan } else { rounded }) as u16
}

/// As `half::bf16::to_f32`, which keeps quiet NaNs.
#[inline(always)]
fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// As `half::f16::from_f32`.
#[inline(always)]
fn f16_bits(x: f32) -> u16 {
    let sign = x.to_bits() >> 16 & 0x8000;
    let bits = x.to_bits() & 0x7fff_ffff;
    // Steps of 2^-24, as 1/2 has them: the addition rounds.
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
fn f16_value(bits: u16) -> f32 {
    let (sign, magnitude) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    // Too small by the ratio of the biases, denormal numbers included.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = 0x7f80_0000 | magnitude << 13;
    let special = if magnitude > 0x7c00 { special | 0x40_0000 } else { special };
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// All that this processor runs, the plain one last.
    fn available() -> Vec<Isa> {
        let mut found = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        if Isa::detect() != Isa::Portable {
            found.insert(0, Isa::Avx2);
        }
        if found[0] != Isa::detect() {
            found.insert(0, Isa::detect());
        }
        found
    }

    #[test]
    fn numbers_of_two_bytes_are_those_of_the_half_crate() {
        for bits in 0..=u16::MAX {
            assert_eq!(f16_value(bits).to_bits(), f16::from_bits(bits).to_f32().to_bits(), "{bits:#x}");
            assert_eq!(f32::from_bits(u32::from(bits) << 16).to_bits(), bf16_value(bits).to_bits());
            // Every number of either type, the middles between two, and their neighbours.
            for x in [f16_value(bits), bf16_value(bits)] {
                for offset in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001] {
                    let x = f32::from_bits(x.to_bits().wrapping_add(offset));
                    assert_eq!(f16_bits(x), f16::from_f32(x).to_bits(), "{x} ({:#x})", x.to_bits());
                    assert_eq!(bf16_bits(x), bf16::from_f32(x).to_bits(), "{x} ({:#x})", x.to_bits());
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state
        };
        for dtype in KvDtype::ALL {
            for head_dim in [1, 3, 16, 31, 64, 80, 128] {
                for num_vectors in [1, 2, 5] {
                    let len = head_dim * num_vectors;
                    // Any bits at all, or numbers of one magnitude.
                    let wild: Vec<f32> = (0..len).map(|_| f32::from_bits(random())).collect();
                    let tame: Vec<f32> =
                        (0..len).map(|_| (random() as i32) as f32 / (1u32 << 30) as f32).collect();
                    for vectors in [wild, tame] {
                        check(dtype, &vectors, head_dim);
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_four_bits() {
        for head_dim in [1usize, 17, 32, 33, 64, 80, 128] {
            let mut vectors: Vec<f32> = (0..3 * head_dim).map(|n| (n as f32).sin() * 3.0).collect();
            vectors[head_dim / 2] = f32::INFINITY;
            let results = available().into_iter().map(|isa| {
                let mut codes = vec![0xa5; 3 * head_dim.div_ceil(2)];
                let mut scales = vec![0xa5; 3 * head_dim.div_ceil(INT4_GROUP) * 2];
                isa.store_int4(&vectors, head_dim, &mut codes, &mut scales);
                let mut read = vec![0.0; vectors.len()];
                isa.load_int4(&codes, &scales, head_dim, &mut read);
                (codes, scales, read.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            });
            let results: Vec<_> = results.collect();
            assert!(results.iter().all(|result| *result == results[0]), "{head_dim}");
        }
    }

    fn check(dtype: KvDtype, vectors: &[f32], head_dim: usize) {
        let mut results = Vec::new();
        for isa in available() {
            let mut elements = vec![0xa5; vectors.len() * dtype.size_bytes()];
            let mut scales = vec![0xa5; vectors.len() / head_dim * dtype.scale_bytes()];
            isa.store(dtype, vectors, head_dim, &mut elements, &mut scales);
            let mut read = vec![0.0; vectors.len()];
            isa.load(dtype, &elements, &scales, head_dim, &mut read);
            let read: Vec<u32> = read.iter().map(|x| x.to_bits()).collect();
            results.push((isa, elements, scales, read));
        }
        let (_, elements, scales, read) = results.pop().expect("there is always one");
        for result in results {
            assert_eq!(
                result,
                (result.0, elements.clone(), scales.clone(), read.clone()),
                "{dtype:?} {head_dim}"
            );
        }
    }
}
