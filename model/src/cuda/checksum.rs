//! Checksums of pieces where they lie: `kernels/checksum.cu`.

use super::kernel::{Address, Kernel, LaunchShape, Source};

pub(crate) fn source() -> Source {
    Source { file: "checksum.cu", text: include_str!("kernels/checksum.cu"), defines: vec![] }
}

/// Shorter inputs have an algorithm of their own, which is left to the host.
pub(crate) const MIN_BYTES: u64 = 241;

/// XXH3-64 of pieces of the same length, as the handoff takes it.
///
/// Reads each byte once: bound by memory when there are pieces for all multiprocessors.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ChecksumPieces {
    pub(crate) base: Address,
    /// `[pieces]`, u64: where each begins.
    pub(crate) offsets: Address,
    /// `[pieces]`, u64, written.
    pub(crate) sums: Address,
    /// Of a piece: at least [`MIN_BYTES`].
    pub(crate) num_bytes: u64,
    pub(crate) num_pieces: u64,
    pub(crate) secret: Secret,
}

/// The words of a seeded secret that the algorithm takes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Secret {
    words: [u64; 24],
    last: [u64; 8],
    merge: [u64; 8],
}

impl Secret {
    /// Of XXH3's default secret and a seed: the grant's generation.
    pub(crate) fn new(default: &[u8; 192], seed: u64) -> Secret {
        let mut secret = *default;
        for (idx, word) in secret.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let x = u64::from_le_bytes(*word);
            *word = if idx % 2 == 0 { x.wrapping_add(seed) } else { x.wrapping_sub(seed) }.to_le_bytes();
        }
        let word = |at: usize| u64::from_le_bytes(secret[at..at + 8].try_into().expect("eight bytes"));
        Secret {
            words: std::array::from_fn(|idx| word(8 * idx)),
            last: std::array::from_fn(|idx| word(121 + 8 * idx)),
            merge: std::array::from_fn(|idx| word(11 + 8 * idx)),
        }
    }
}

// SAFETY: as `ChecksumPieces` in the file.
unsafe impl Kernel for ChecksumPieces {
    const NAME: &'static str = "checksum_pieces";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.num_bytes >= MIN_BYTES, "of long inputs");
        LaunchShape { grid: [self.num_pieces as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use xxhash_rust::const_xxh3::const_custom_default_secret;
    use xxhash_rust::xxh3::xxh3_64_with_seed;

    use super::*;
    use crate::cuda::emulator::Emulator;

    #[test]
    fn pieces_have_the_checksums_that_the_host_takes() {
        let bytes: Vec<u8> = (0..150_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let default = const_custom_default_secret(0);
        // A last stripe alone, whole and not; KiB that are whole and not; more than are summed up at once.
        for num_bytes in [241, 256, 1024, 1025, 1088, 1089, 2048, 3000, 4096, 65_536, 66_600, 140_001] {
            for (seed, offsets) in [(0, [0, 17]), (0x9000_0000_0000_0007, [9000, 8])] {
                let mut emulator = Emulator::new(source());
                let kernel = ChecksumPieces {
                    base: emulator.buffer(&bytes),
                    offsets: emulator.buffer(bytemuck::cast_slice(&offsets)),
                    sums: emulator.poisoned(offsets.len() * 8),
                    num_bytes,
                    num_pieces: offsets.len() as u64,
                    secret: Secret::new(&default, seed),
                };
                emulator.launch(&kernel);
                let expected: Vec<u8> = offsets
                    .iter()
                    .flat_map(|&offset: &u64| {
                        let piece = &bytes[offset as usize..][..num_bytes as usize];
                        xxh3_64_with_seed(piece, seed).to_le_bytes()
                    })
                    .collect();
                assert_eq!(emulator.run().of(kernel.sums), expected, "{num_bytes} bytes, seed {seed}");
            }
        }
    }
}
