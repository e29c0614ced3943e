//! The checksum that proves that a piece arrived unchanged: XXH3-64 of its bytes, seeded with the generation, so that a
//! piece of another grant does not match. It guards against accidents. It does not guard against a malicious peer,
//! which could compute it.
//!
//! If the decode worker's blocks are on several devices, no device holds a whole piece. Then each device hashes its own
//! heads, and the checksum is XXH3-64 of the heads' checksums ([`SumOf`]). The welcome tells the sender which of the
//! two applies.

mod stored;
#[cfg(target_arch = "x86_64")]
mod wide;

pub use stored::Hasher;

use baton_kv_cache::KvLayout;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use baton_handoff::Generation;

/// What the checksums of a pool's pieces cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumOf {
    /// The bytes of the piece.
    Pieces,
    /// The checksums of the piece's heads, first K's and then V's. A head has so many bytes.
    Heads(usize),
}

impl SumOf {
    /// For a pool of this layout on `num_ranks` ranks.
    pub fn new(layout: &KvLayout, num_ranks: usize) -> SumOf {
        match num_ranks {
            1 => SumOf::Pieces,
            _ => SumOf::Heads(layout.head_bytes()),
        }
    }

    /// Checksum of a piece.
    pub fn sum(self, piece: &[u8], generation: Generation) -> u64 {
        match self {
            SumOf::Pieces => checksum(piece, generation),
            SumOf::Heads(head_bytes) => {
                let heads: Vec<u64> =
                    piece.chunks_exact(head_bytes).map(|head| checksum(head, generation)).collect();
                of_heads(&heads, generation)
            }
        }
    }
}

/// The checksum of a piece whose heads have these checksums.
fn of_heads(sums: &[u64], generation: Generation) -> u64 {
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    checksum(&bytes, generation)
}

/// Checksum of a piece's bytes under a grant.
pub fn checksum(bytes: &[u8], generation: Generation) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = wide::Kernel::best(bytes.len()) {
        return kernel.hash(bytes, generation.0);
    }
    xxh3_64_with_seed(bytes, generation.0)
}

/// Copies a piece and returns its [`checksum`], in one pass. Large pieces are written with streaming stores if the
/// processor has them: these do not read the target's cache lines first, and they do not evict the copier's data.
///
/// # Safety
/// `target` is valid for writes of as many bytes as `source` has, does not overlap it, and is used only by this call.
pub unsafe fn copy(source: &[u8], target: *mut u8, generation: Generation) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = wide::Kernel::best(source.len()) {
        // SAFETY: by the caller's word.
        return unsafe { kernel.copy(source, target, generation.0) };
    }
    // SAFETY: by the caller's word.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
    checksum(source, generation)
}

/// Prefetches the beginning of the piece that is copied or hashed next. The hardware prefetcher starts too late between
/// two pieces. The pointer may point anywhere.
pub fn fetch_ahead(next: *const u8) {
    // The same distance that the kernels prefetch.
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
