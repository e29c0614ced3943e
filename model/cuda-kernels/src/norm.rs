//! Norms of rows: `kernels/norm.cu`.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "norm.cu", defines: vec![] }
}

/// `out = norm(x + added) * weight`, and x keeps the sum. Rows are `[hidden]`, a multiple of 8.
///
/// Moves 6 bytes an element, 10 with something added; a few operations each: bound by memory.
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

// SAFETY: as `AddNorm` in the file.
unsafe impl Kernel for AddNorm {
    const NAME: &'static str = "add_norm";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.hidden.is_multiple_of(8), "16 bytes at a time");
        let threads = (self.hidden / 8).next_multiple_of(32).min(1024);
        LaunchShape { grid: [self.num_rows as u32, 1, 1], threads, shared_bytes: 0 }
    }
}
