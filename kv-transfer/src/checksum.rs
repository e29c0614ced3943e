//! What says that a piece arrived as it left: XXH3-64 of its bytes, seeded with the generation, so
//! that a right piece of another grant is a wrong one. Guards against accidents, not against a
//! malicious peer: that one could compute it.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::message::Generation;

/// Checksum of a piece's bytes under a grant.
pub fn checksum(bytes: &[u8], generation: Generation) -> u64 {
    xxh3_64_with_seed(bytes, generation.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_generation_both_count() {
        let sum = checksum(&[1; 512], Generation(1));
        assert_eq!(sum, checksum(&[1; 512], Generation(1)));
        assert_ne!(sum, checksum(&[1; 512], Generation(2)));
        let mut flipped = [1; 512];
        flipped[300] ^= 0x40;
        assert_ne!(sum, checksum(&flipped, Generation(1)));
    }
}
