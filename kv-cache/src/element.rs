//! The meaning of an element's bytes: how a vector (one head's key or value of one token) is quantised to a type and
//! dequantised. All writers of KV quantise here, so a vector has the same bytes on every path.
//!
//! Types of eight bits have a scale for each vector: a value is the code times the scale. The scale is the smallest
//! bf16 that keeps the largest value in range, so it depends on that vector alone.
//!
//! It does not know where vectors are stored (that is [`KvLayout`](crate::KvLayout)).

use crate::{KvDtype, quantise::Isa};

/// Quantises vectors to a KV element type, and dequantises them.
pub trait VectorCodec {
    /// Quantises `vector`, each number to the nearest code and ties to even, and writes it as `elements` and, for
    /// types with scales, `scale`. In types of eight bits a vector with a number that is not finite reads back as
    /// NaN.
    ///
    /// # Panics
    /// When a length does not fit: [`size_bytes`](KvDtype::size_bytes) for each element,
    /// [`scale_bytes`](KvDtype::scale_bytes).
    fn store_vector(self, vector: &[f32], elements: &mut [u8], scale: &mut [u8]);

    /// The inverse of [`store_vector`](Self::store_vector), except for the rounding error.
    ///
    /// # Panics
    /// As [`store_vector`](Self::store_vector).
    fn load_vector(self, elements: &[u8], scale: &[u8], vector: &mut [f32]);

    /// [`store_vector`](Self::store_vector) of several vectors of `head_dim` numbers. Vectors, elements and scales
    /// are contiguous.
    ///
    /// # Panics
    /// As [`store_vector`](Self::store_vector).
    fn store_vectors(self, vectors: &[f32], head_dim: usize, elements: &mut [u8], scales: &mut [u8]);

    /// The inverse of [`store_vectors`](Self::store_vectors), except for the rounding error.
    ///
    /// # Panics
    /// As [`store_vector`](Self::store_vector).
    fn load_vectors(self, elements: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]);
}

impl VectorCodec for KvDtype {
    fn store_vector(self, vector: &[f32], elements: &mut [u8], scale: &mut [u8]) {
        self.store_vectors(vector, vector.len(), elements, scale);
    }

    fn load_vector(self, elements: &[u8], scale: &[u8], vector: &mut [f32]) {
        self.load_vectors(elements, scale, vector.len(), vector);
    }

    fn store_vectors(self, vectors: &[f32], head_dim: usize, elements: &mut [u8], scales: &mut [u8]) {
        check_lengths(self, vectors.len(), head_dim, elements.len(), scales.len());
        Isa::detect().quantise(self, vectors, head_dim, elements, scales);
    }

    fn load_vectors(self, elements: &[u8], scales: &[u8], head_dim: usize, vectors: &mut [f32]) {
        check_lengths(self, vectors.len(), head_dim, elements.len(), scales.len());
        Isa::detect().dequantise(self, elements, scales, head_dim, vectors);
    }
}

fn check_lengths(dtype: KvDtype, len: usize, head_dim: usize, elements: usize, scales: usize) {
    let expected = (len * dtype.size_bytes(), len / head_dim.max(1) * dtype.scale_bytes());
    assert!(
        (elements, scales) == expected && len.is_multiple_of(head_dim.max(1)),
        "{elements} and {scales} bytes for {len} elements of {}, and scales of {head_dim} each",
        dtype.name()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(dtype: KvDtype, vector: &[f32]) -> Vec<f32> {
        let mut elements = vec![0; vector.len() * dtype.size_bytes()];
        let mut scale = vec![0; dtype.scale_bytes()];
        dtype.store_vector(vector, &mut elements, &mut scale);
        let mut read = vec![0.0; vector.len()];
        dtype.load_vector(&elements, &scale, &mut read);
        read
    }

    #[test]
    fn stored_vectors_read_back_within_half_a_step() {
        for dtype in KvDtype::ALL {
            for magnitude in [1e-30, 1e-3, 1.0, 300.0, 6e4] {
                if dtype == KvDtype::F16 && magnitude < 1e-3 {
                    continue;
                }
                let vector: Vec<f32> = (1..40).map(|n: u32| (n as f32).sin() * magnitude).collect();
                let largest = vector.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                for (read, x) in round_trip(dtype, &vector).into_iter().zip(vector) {
                    let step = match dtype {
                        KvDtype::F32 => 0.0,
                        KvDtype::F16 => (x.abs() / 1024.0).max(2f32.powi(-24)),
                        KvDtype::Bf16 => x.abs() / 128.0,
                        // Scales are up to 1/128 too large. Denormals have steps of 1/512.
                        KvDtype::Fp8 => (x.abs() / 8.0).max(largest / 448.0 / 512.0 * 1.01),
                        KvDtype::Int8 => largest / 127.0 * 1.01,
                    };
                    assert!((read - x).abs() <= step / 2.0, "{dtype:?}: {read} for {x} of {largest}");
                }
            }
        }
    }

    #[test]
    fn vectors_without_a_scale_are_zero_or_nan() {
        for dtype in [KvDtype::Fp8, KvDtype::Int8] {
            assert_eq!(round_trip(dtype, &[0.0, -1e-42, 0.0]), [0.0; 3], "{dtype:?}");
            for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let read = round_trip(dtype, &[1.0, x, -2.0]);
                assert!(read.iter().all(|x| x.is_nan()), "{dtype:?}: {read:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "3 and 0 bytes for 3 elements of int8")]
    fn a_missing_scale_is_noticed() {
        KvDtype::Int8.store_vector(&[1.0; 3], &mut [0; 3], &mut []);
    }
}
