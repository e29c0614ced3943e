//! What the bytes of an element stand for: how a vector, one head's key or value of one token, is rounded to a
//! type and widened again. Everybody who writes KV rounds here, so that a vector has the same bytes whoever does.
//!
//! Types of eight bits have a scale for each vector: an element is its code times the scale. The scale is the smallest
//! bf16 that keeps the largest element in range, so it depends on that vector alone.
//!
//! It does not know where vectors lie (that is [`KvLayout`](crate::KvLayout)).

use half::{bf16, f16};

use crate::{KvDtype, e4m3};

/// The largest whole number that is used: the type is symmetric.
const INT8_MAX: f32 = 127.0;

impl KvDtype {
    /// Rounds `vector`, each number to the nearest, of two the even one, and writes it as `elements` and, where the
    /// type has one, `scale`. In types of eight bits a vector with a number that is not finite reads back as NaN.
    ///
    /// # Panics
    /// When a length does not fit: [`size_bytes`](Self::size_bytes) for each element,
    /// [`scale_bytes`](Self::scale_bytes).
    pub fn store_vector(self, vector: &[f32], elements: &mut [u8], scale: &mut [u8]) {
        self.check_lengths(vector.len(), elements.len(), scale.len());
        match self {
            KvDtype::F32 => store(elements, vector, f32::to_ne_bytes),
            KvDtype::F16 => store(elements, vector, |x| f16::from_f32(x).to_ne_bytes()),
            KvDtype::Bf16 => store(elements, vector, |x| bf16::from_f32(x).to_ne_bytes()),
            KvDtype::Fp8 => {
                let inverse = store_scale(scale, vector, e4m3::MAX);
                store(elements, vector, |x| [e4m3::from_f32(x * inverse)]);
            }
            KvDtype::Int8 => {
                let inverse = store_scale(scale, vector, INT8_MAX);
                let code = |x: f32| (x * inverse).round_ties_even().clamp(-INT8_MAX, INT8_MAX) as i8;
                store(elements, vector, |x| code(x).to_ne_bytes());
            }
        }
    }

    /// The inverse of [`store_vector`](Self::store_vector), but for what rounding took.
    ///
    /// # Panics
    /// As there.
    pub fn load_vector(self, elements: &[u8], scale: &[u8], vector: &mut [f32]) {
        self.check_lengths(vector.len(), elements.len(), scale.len());
        match self {
            KvDtype::F32 => load(vector, elements, f32::from_ne_bytes),
            KvDtype::F16 => load(vector, elements, |bytes| f16::from_ne_bytes(bytes).to_f32()),
            KvDtype::Bf16 => load(vector, elements, |bytes| bf16::from_ne_bytes(bytes).to_f32()),
            KvDtype::Fp8 => {
                let scale = load_scale(scale);
                load(vector, elements, |[code]| e4m3::to_f32(code) * scale);
            }
            KvDtype::Int8 => {
                let scale = load_scale(scale);
                load(vector, elements, |code| f32::from(i8::from_ne_bytes(code)) * scale);
            }
        }
    }

    fn check_lengths(self, head_dim: usize, elements: usize, scale: usize) {
        let expected = (head_dim * self.size_bytes(), self.scale_bytes());
        assert_eq!(
            (elements, scale),
            expected,
            "bytes of {head_dim} elements of {}, and of their scale",
            self.name()
        );
    }
}

fn store<const N: usize>(elements: &mut [u8], vector: &[f32], round: impl Fn(f32) -> [u8; N]) {
    for (to, &x) in elements.as_chunks_mut().0.iter_mut().zip(vector) {
        *to = round(x);
    }
}

fn load<const N: usize>(vector: &mut [f32], elements: &[u8], widen: impl Fn([u8; N]) -> f32) {
    for (to, &bytes) in vector.iter_mut().zip(elements.as_chunks().0) {
        *to = widen(bytes);
    }
}

/// Writes the scale, and says what to multiply with before rounding.
fn store_scale(scale: &mut [u8], vector: &[f32], largest_code: f32) -> f32 {
    let rounded = scale_of(vector, largest_code);
    scale.copy_from_slice(&bf16::from_f32(rounded).to_ne_bytes());
    1.0 / rounded
}

fn load_scale(scale: &[u8]) -> f32 {
    bf16::from_ne_bytes([scale[0], scale[1]]).to_f32()
}

/// The smallest bf16 by which `vector` can be divided to lie within `largest_code`; NaN when a number is not finite,
/// so that all of the vector reads back as NaN, whatever its codes are.
fn scale_of(vector: &[f32], largest_code: f32) -> f32 {
    if vector.iter().any(|x| !x.is_finite()) {
        return f32::NAN;
    }
    let largest = vector.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    // Small enough scales have no inverse; then all codes are zero.
    let scale = (largest / largest_code).max(f32::MIN_POSITIVE);
    f32::from_bits((scale.to_bits() + 0xffff) & 0xffff_0000)
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
    fn what_is_stored_reads_back_within_half_a_step() {
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
                        // Scales are up to 1/128 too large; denormals have steps of 1/512.
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
    #[should_panic(expected = "bytes of 3 elements of int8")]
    fn a_scale_without_a_place_is_noticed() {
        KvDtype::Int8.store_vector(&[1.0; 3], &mut [0; 3], &mut []);
    }
}
