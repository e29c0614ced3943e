//! RMS norms of rows: `kernels/norm.cu`.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "norm.cu", defines: vec![] }
}

/// `x += added; out = norm(x) * weight`. Rows are `[hidden]`, a multiple of 8.
///
/// Moves 6 bytes per element, 10 with `added`, and takes a few operations: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AddNorm {
    /// `[rows][hidden]`, bf16.
    pub x: Address,
    /// `[rows][hidden]`, bf16, or null.
    pub added: Address,
    /// `[hidden]`, f32.
    pub weight: Address,
    /// `[rows][hidden]`, bf16.
    pub out: Address,
    pub hidden: u32,
    pub eps: f32,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `AddNorm` in the kernel file.
unsafe impl Kernel for AddNorm {
    const NAME: &'static str = "add_norm";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.hidden.is_multiple_of(8), "16 bytes at a time");
        let threads = (self.hidden / 8).next_multiple_of(32).min(1024);
        LaunchShape { grid: [self.num_rows as u32, 1, 1], threads, shared_bytes: 0 }
    }
}

/// [`AddNorm`], then [`QuantiseRows`](crate::products::QuantiseRows) or
/// [`QuantiseGroups`](crate::products::QuantiseGroups) of its output, with the same bits.
///
/// Moves 7 bytes per element, 11 with `added`: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AddNormQuantise {
    pub norm: AddNorm,
    /// `[rows][hidden]`, E4M3.
    pub quantised: Address,
    /// `[rows]`, or `[hidden / 128][stride]`, f32: the factors that restore the numbers.
    pub scales: Address,
    /// 0: a scale for each row. Otherwise one for each 128 numbers of a row.
    pub stride: u32,
    pub unused: u32,
}

// SAFETY: the fields are those of `AddNormQuantise` in the kernel file.
unsafe impl Kernel for AddNormQuantise {
    const NAME: &'static str = "add_norm_rows";

    fn name(&self) -> &'static str {
        if self.stride == 0 { Self::NAME } else { "add_norm_groups" }
    }

    fn shape(&self) -> LaunchShape {
        self.norm.shape()
    }
}
