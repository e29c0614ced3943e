//! Kernels on generated data and the CPU's peak rates, for `cargo bench` and `baton inspect`.

mod kernels;
mod peaks;

pub use kernels::{AttentionRun, Gemm, Weights};
pub use peaks::{CpuPeaks, Peak, Peaks};
