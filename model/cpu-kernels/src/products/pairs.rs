//! Products of bf16 with bf16, in pairs, for CPUs whose instruction for it is faster than that for f32.
//!
//! An output is one chain in the order of K, so results do not depend on tiles or threads. Products and sums are f32, and
//! subnormal numbers count as zero. How a pair is added is up to the instruction:
//!
//! - AVX-512: two fused multiply-adds, the second product of the pair first.
//! - Arm: the sum of both products, then that sum, each rounded to odd. `bfmmla` is two such steps for each output, so one
//!   row by `bfdot` has the same bits as among several.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod none;
#[cfg(target_arch = "x86_64")]
mod x86;

use baton_cpu_simd::Isa;
#[cfg(target_arch = "aarch64")]
use neon as kernels;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use none as kernels;
#[cfg(target_arch = "x86_64")]
use x86 as kernels;

pub use kernels::pairs_loop;
pub(super) use kernels::{TILE_ROWS, tile_kernel};

/// Prefetch distance in bytes.
const PREFETCH: usize = 4096;

/// Whether there is a kernel for this instruction set: of vectors, or of tiles.
pub fn has_pairs(isa: Isa) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => true,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => is_x86_feature_detected!("avx512bf16"),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => std::arch::is_aarch64_feature_detected!("bf16"),
        Isa::TileModel => true,
        _ => false,
    }
}
