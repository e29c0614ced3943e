//! Kernels on generated data and the CPU's peak rates, for `cargo bench`. Not part of the crate's interface.

mod kernels;
mod peaks;

pub use kernels::{AttentionRun, Gemm, Weights};
pub use peaks::{Peak, Peaks};
