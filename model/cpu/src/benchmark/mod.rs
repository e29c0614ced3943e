//! Kernels on made-up data, and the processor's ceilings, for `cargo bench`. Not part of the crate's interface.

mod kernels;
mod peaks;

pub use kernels::{Attention, Gemm, Weights};
pub use peaks::{Peak, Peaks};
