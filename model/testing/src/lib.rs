//! Test data for the model's crates.
//!
//! Only tests depend on it. It does not know models.

#![forbid(unsafe_code)]

/// `n` pseudo-random numbers in -1..1, the same for the same seed.
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

/// A hash of the bits of `numbers`: the same on kinds of processor that no test has together.
pub fn hash_of_bits(numbers: &[f32]) -> u64 {
    numbers
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, x| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x100_0000_01b3))
}
