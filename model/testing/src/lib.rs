//! Numbers that the tests of the model's crates compute with.
//!
//! Tests alone depend on it. It knows nothing of models.

#![forbid(unsafe_code)]

/// `n` numbers in -1..1 that look random, the same for the same seed.
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}
