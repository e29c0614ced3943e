//! Choice of the instruction set. It is detected at run time.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::portable;
#[cfg(doc)]
use crate::INT4_GROUP;
use crate::KvDtype;

/// An instruction set that the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The best instruction set of this processor. The standard library caches the detection.
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

    /// Quantises vectors of `head_dim` numbers to `dtype`. [`store_vectors`](crate::VectorCodec::store_vectors) checks the lengths.
    pub(crate) fn quantise(
        self,
        dtype: KvDtype,
        vectors: &[f32],
        head_dim: usize,
        elements: &mut [u8],
        scales: &mut [u8],
    ) {
        match self {
            // SAFETY: `detect` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { quantise_avx512(dtype, vectors, head_dim, elements, scales) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { quantise_avx2(dtype, vectors, head_dim, elements, scales) },
            Isa::Portable => portable::quantise(dtype, vectors, head_dim, elements, scales),
        }
    }

    /// Dequantises vectors of `head_dim` numbers of `dtype`. [`load_vectors`](crate::VectorCodec::load_vectors) checks the lengths.
    pub(crate) fn dequantise(
        self,
        dtype: KvDtype,
        elements: &[u8],
        scales: &[u8],
        head_dim: usize,
        vectors: &mut [f32],
    ) {
        match self {
            // SAFETY: `detect` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { dequantise_avx512(dtype, elements, scales, head_dim, vectors) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { dequantise_avx2(dtype, elements, scales, head_dim, vectors) },
            Isa::Portable => portable::dequantise(dtype, elements, scales, head_dim, vectors),
        }
    }

    /// Quantises vectors of `head_dim` numbers to INT4. Every [`INT4_GROUP`] numbers of a vector share a scale.
    pub(crate) fn quantise_int4(self, vectors: &[f32], head_dim: usize, codes: &mut [u8], scales: &mut [u8]) {
        match self {
            // SAFETY: `detect` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::quantise_int4(vectors, head_dim, codes, scales) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { quantise_int4_avx2(vectors, head_dim, codes, scales) },
            Isa::Portable => portable::quantise_int4(vectors, head_dim, codes, scales),
        }
    }

    /// The inverse of [`quantise_int4`](Self::quantise_int4), except for the rounding error.
    pub(crate) fn dequantise_int4(self, codes: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
        match self {
            // SAFETY: `detect` found the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::dequantise_int4(codes, scales, head_dim, vectors) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { dequantise_int4_avx2(codes, scales, head_dim, vectors) },
            Isa::Portable => portable::dequantise_int4(codes, scales, head_dim, vectors),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantise_int4_avx2(vectors: &[f32], head_dim: usize, codes: &mut [u8], scales: &mut [u8]) {
    portable::quantise_int4(vectors, head_dim, codes, scales);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn dequantise_int4_avx2(codes: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    portable::dequantise_int4(codes, scales, head_dim, vectors);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
fn quantise_avx512(dtype: KvDtype, vectors: &[f32], head_dim: usize, elements: &mut [u8], scales: &mut [u8]) {
    if dtype == KvDtype::Fp8 {
        return avx512::quantise_fp8(vectors, head_dim, elements, scales);
    }
    portable::quantise(dtype, vectors, head_dim, elements, scales);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantise_avx2(dtype: KvDtype, vectors: &[f32], head_dim: usize, elements: &mut [u8], scales: &mut [u8]) {
    portable::quantise(dtype, vectors, head_dim, elements, scales);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
fn dequantise_avx512(dtype: KvDtype, elements: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    portable::dequantise(dtype, elements, scales, head_dim, vectors);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn dequantise_avx2(dtype: KvDtype, elements: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
    portable::dequantise(dtype, elements, scales, head_dim, vectors);
}
