//! The product of one row with a matrix in bf16: `kernels/one_row.cu`.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "one_row.cu", defines: vec![] }
}

/// Outputs of a block of threads: one of each warp.
const OUTPUTS: u32 = 8;

/// `out[n] = sum over k of x[k] weights[n][k] + bias[n]`. The sum is in f32 and has one order, always.
///
/// Reads each weight once, 2 bytes for two operations: bound by memory bandwidth. The first weights are read before the
/// kernel ahead has ended, so nothing on the device may write weights.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MultiplyRow {
    /// `[k]`, bf16. `k` is a multiple of 8.
    pub x: Address,
    /// `[n][k]`, bf16.
    pub weights: Address,
    /// `[n]`, f32, or null.
    pub bias: Address,
    /// `[n]`: f32 if `is_f32`, otherwise bf16.
    pub out: Address,
    pub k: u32,
    pub n: u32,
    /// 0 or 1.
    pub is_f32: u32,
    /// Always 0.
    pub unused: u32,
}

// SAFETY: the fields are those of `MultiplyRow` in the kernel file.
unsafe impl Kernel for MultiplyRow {
    const NAME: &'static str = "multiply_row";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.k.is_multiple_of(8), "16 bytes at a time");
        LaunchShape { grid: [self.n.div_ceil(OUTPUTS), 1, 1], threads: 256, shared_bytes: 0 }
    }
}
