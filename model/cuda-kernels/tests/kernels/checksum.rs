//! `kernels/checksum.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_kernels::checksum::*;
use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::xxh3_64_with_seed;

#[test]
fn checksums_match_the_host() {
    let bytes: Vec<u8> = (0..150_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let default = const_custom_default_secret(0);
    // Only a last stripe, complete or not; whole KiB and partial ones; more KiB than are summed at once.
    for num_bytes in [241, 256, 1024, 1025, 1088, 1089, 2048, 3000, 4096, 65_536, 66_600, 140_001] {
        for (seed, offsets) in [(0, [0, 17]), (0x9000_0000_0000_0007, [9000, 8])] {
            let mut emulator = Emulator::new(source());
            let kernel = ChecksumPieces {
                base: emulator.buffer(&bytes),
                offsets: emulator.buffer(bytemuck::cast_slice(&offsets)),
                sums: emulator.poisoned(offsets.len() * 8),
                num_bytes,
                num_pieces: offsets.len() as u64,
                secret: HashSecret::new(&default, seed),
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
