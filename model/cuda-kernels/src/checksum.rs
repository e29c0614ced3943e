//! Checksums of pieces that stay in the pool: `kernels/checksum.cu`.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "checksum.cu", defines: vec![] }
}

/// XXH3 has other algorithms for shorter inputs. The host computes those.
pub const MIN_BYTES: u64 = 241;

/// XXH3-64 of pieces of equal length, as the handoff defines it.
///
/// Reads each byte once. Bound by memory bandwidth when there are enough pieces for all multiprocessors.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ChecksumPieces {
    pub base: Address,
    /// `[pieces]`, u64: the start of each piece, counted from `base`.
    pub offsets: Address,
    /// `[pieces]`, u64, output.
    pub sums: Address,
    /// Bytes of a piece, at least [`MIN_BYTES`].
    pub num_bytes: u64,
    pub num_pieces: u64,
    pub secret: HashSecret,
}

/// The words of a seeded secret that the algorithm reads.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HashSecret {
    words: [u64; 24],
    last: [u64; 8],
    merge: [u64; 8],
}

impl HashSecret {
    /// Mixes the seed into XXH3's default secret. The seed is the generation of the grant.
    pub fn new(default: &[u8; 192], seed: u64) -> HashSecret {
        let mut secret = *default;
        for (idx, word) in secret.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let x = u64::from_le_bytes(*word);
            *word = if idx % 2 == 0 { x.wrapping_add(seed) } else { x.wrapping_sub(seed) }.to_le_bytes();
        }
        let word = |at: usize| u64::from_le_bytes(secret[at..at + 8].try_into().expect("eight bytes"));
        HashSecret {
            words: std::array::from_fn(|idx| word(8 * idx)),
            last: std::array::from_fn(|idx| word(121 + 8 * idx)),
            merge: std::array::from_fn(|idx| word(11 + 8 * idx)),
        }
    }
}

// SAFETY: the fields are those of `ChecksumPieces` in the kernel file.
unsafe impl Kernel for ChecksumPieces {
    const NAME: &'static str = "checksum_pieces";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.num_bytes >= MIN_BYTES, "of long inputs");
        LaunchShape { grid: [self.num_pieces as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}
