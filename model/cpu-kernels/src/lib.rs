//! Kernels of a forward pass on CPUs: products, attention and row operations.
//!
//! Kernels read weights from packed panels ([`PanelsRef`]) and KV from its blocks. Every sum has a fixed order, so a
//! row's result does not depend on other rows, on tiles or on threads.
//!
//! This crate does not know models, weight files or the order of operations.

mod attention;
mod cpu;
mod kv;
mod loops;
mod products;
mod rows;

pub use attention::{AttentionShape, attend};
pub use baton_cpu_simd::tiles::{TILE_OPERATIONS, tiles_loop};
pub use baton_cpu_simd::{CHAINS, Isa, LANES};
pub use cpu::Cpu;
pub use kv::store_rows;
pub use loops::{fma_loop, read_loop};
pub use products::{
    Output, PANEL, PanelFormat, PanelsRef, RowOrder, has_pairs, integers_loop, multiply, pack_floats,
    pack_integers, pairs_loop,
};
pub use rows::{GateFunction, rms_norm, rms_norm_in_place, rotate, soft_cap};
