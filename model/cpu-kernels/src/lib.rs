//! Kernels of a forward pass on CPUs: products and row operations.
//!
//! Kernels read weights from packed panels ([`PanelsRef`]). Every sum has a fixed order, so a
//! row's result does not depend on other rows, on tiles or on threads.
//!
//! This crate does not know models, weight files or the order of operations.

mod cpu;
mod loops;
mod products;
mod rows;

pub use baton_cpu_simd::tiles::{TILE_OPERATIONS, tiles_loop};
pub use baton_cpu_simd::{CHAINS, Isa, LANES};
pub use cpu::Cpu;
pub use loops::{fma_loop, read_loop};
pub use products::{
    Output, PANEL, PanelFormat, PanelsRef, RowOrder, bf16_bits, has_pairs, integers_loop,
    level_tiles_multiply, multiply, nibbles_differ, pack_floats, pack_integers, pairs_loop,
};
pub use rows::{GateFunction, add_scaled, rms_norm, rms_norm_in_place, rotate, soft_cap, soft_capped};

/// Internals that the tests of this crate check, and the instruction sets to test.
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing {
    pub use crate::products::testing::{SLAB, UNCUT, Unpacked, cut, tiles_of_rows};
    pub use crate::rows::{erf, gated};
    pub use baton_cpu_simd::tiles::tested_isas;
}
