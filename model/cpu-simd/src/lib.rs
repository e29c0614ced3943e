//! Sixteen lanes of f32 on every instruction set.
//!
//! Every kernel is written once over [`Simd`] and compiled for AVX-512, for AVX2 with FMA, for NEON, and as portable
//! Rust. All compute with sixteen lanes and reduce them in the same order, so AVX-512, AVX2 and NEON agree bit for bit,
//! and portable Rust with them where the compiler may use fused multiply-adds.
//!
//! Tile registers are in [`tiles`], with a software model of them for tests.
//!
//! [`Words`] adds what attention does with rows of memory: transposing them, and products of pairs of bf16.
//!
//! This crate does not know tensors.

mod isa;
mod kernel;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod stored;
#[cfg(test)]
mod tests;
pub mod tiles;
mod words;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use isa::Isa;
pub use lanes::{CHAINS, LANES, Portable, Simd};
#[cfg(target_arch = "aarch64")]
pub use neon::{Neon, bfdot};
pub use stored::{Bf16, E4M3_BITS, E4M3_SCALE, E4m3, F16, F32, I8, Stored};
pub use words::{Bf16Pair, Factor, Pair, Words};
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};
