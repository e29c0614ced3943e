//! What says that a piece arrived as it left: XXH3-64 of its bytes, seeded with the generation, so
//! that a right piece of another grant is a wrong one. Guards against accidents, not against a
//! malicious peer: that one could compute it.

mod stored;
#[cfg(target_arch = "x86_64")]
mod wide;

pub(crate) use stored::Hasher;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::message::Generation;

/// Checksum of a piece's bytes under a grant.
pub fn checksum(bytes: &[u8], generation: Generation) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = wide::Kernel::best(bytes.len()) {
        return kernel.hash(bytes, generation.0);
    }
    xxh3_64_with_seed(bytes, generation.0)
}

/// Copies a piece and returns its [`checksum`], in one pass. Large pieces are written past the caches where the
/// processor can: the lines of the target need not be read first, and the copier's caches stay its own.
///
/// # Safety
/// `target` is valid for writes of as many bytes as `source` has, does not overlap it, and nobody else uses it.
pub(crate) unsafe fn copy(source: &[u8], target: *mut u8, generation: Generation) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = wide::Kernel::best(source.len()) {
        // SAFETY: by the caller's word.
        return unsafe { kernel.copy(source, target, generation.0) };
    }
    // SAFETY: by the caller's word.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
    checksum(source, generation)
}

/// Has the processor fetch the beginning of what is copied or summed next: between two pieces it finds out by itself too
/// late. The pointer may point anywhere.
pub(crate) fn fetch_ahead(next: *const u8) {
    // As far as the kernels ask ahead.
    #[cfg(target_arch = "x86_64")]
    for line in (0..wide::PREFETCH_BYTES).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = next;
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

    #[test]
    fn a_copy_is_whole_and_has_the_checksum_of_its_source() {
        let source: Vec<u8> = (0..70_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in [0, 1, 240, 241, 1000, 4096, 65_535] {
            let mut target = vec![0xEE; len + 1];
            // SAFETY: the target has room and is this test's.
            let sum = unsafe { copy(&source[..len], target.as_mut_ptr(), Generation(9)) };
            assert_eq!(sum, xxh3_64_with_seed(&source[..len], 9), "{len}");
            assert!(target[..len] == source[..len] && target[len] == 0xEE, "{len}");
        }
    }
}
