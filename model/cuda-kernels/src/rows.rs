//! Other operations on single rows: `kernels/rows.cu`. Widths are multiples of 8.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "rows.cu", defines: vec![] }
}

/// A missing row, sequence, slot, expert or place. Its result is zero. Graphs of a fixed number of rows are padded
/// with it.
pub const NONE: u32 = u32::MAX;

/// `out[i] = norm(x[j] + added[j]) * weight` with `j = indices[i]`: the norm before the head, only for rows whose
/// logits are wanted. The sum is rounded as in [`AddNorm`](crate::norm::AddNorm); x does not change.
///
/// Moves 4 bytes per element, 6 with `added`: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NormWanted {
    /// `[..][hidden]`, bf16.
    pub x: Address,
    /// `[..][hidden]`, bf16, or null.
    pub added: Address,
    /// `[hidden]`, f32.
    pub weight: Address,
    /// `[rows]`, u32; may be [`NONE`].
    pub indices: Address,
    /// `[rows][hidden]`, bf16.
    pub out: Address,
    pub hidden: u32,
    pub eps: f32,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `NormWanted` in the kernel file.
unsafe impl Kernel for NormWanted {
    const NAME: &'static str = "norm_wanted";

    fn shape(&self) -> LaunchShape {
        by_rows(self.num_rows, self.hidden)
    }
}

/// `x += norm(added) * post_weight; out = norm(x) * weight`, for models with a norm before and after each part of a
/// layer (Gemma 2 and 3).
///
/// Moves 8 bytes per element: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PostNorm {
    /// `[rows][hidden]`, bf16: the residual stream.
    pub x: Address,
    /// `[rows][hidden]`, bf16: the output of the part.
    pub added: Address,
    /// `[hidden]`, f32.
    pub post_weight: Address,
    /// `[hidden]`, f32. Null: other rows are normed next ([`NormWanted`]).
    pub weight: Address,
    /// `[rows][hidden]`, bf16. Null if `weight` is null.
    pub out: Address,
    pub hidden: u32,
    pub eps: f32,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `PostNorm` in the kernel file.
unsafe impl Kernel for PostNorm {
    const NAME: &'static str = "post_norm";

    fn shape(&self) -> LaunchShape {
        by_rows(self.num_rows, self.hidden)
    }
}

/// `x += bias`, for products of a library that does not add it.
///
/// Moves 4 bytes per element: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AddBias {
    /// `[rows][width]`, bf16.
    pub x: Address,
    /// `[width]`, f32.
    pub bias: Address,
    pub width: u32,
    pub num_rows: u32,
}

// SAFETY: the fields are those of `AddBias` in the kernel file.
unsafe impl Kernel for AddBias {
    const NAME: &'static str = "add_bias";

    fn shape(&self) -> LaunchShape {
        by_eights(self.num_rows, self.width)
    }
}

/// `x = cap * tanh(x / cap)` for logits, in place.
///
/// Moves 8 bytes per number: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SoftCap {
    /// `[len]`, f32, aligned to 16 bytes.
    pub x: Address,
    pub len: u64,
    pub cap: f32,
    pub unused: u32,
}

// SAFETY: the fields are those of `SoftCap` in the kernel file.
unsafe impl Kernel for SoftCap {
    const NAME: &'static str = "soft_cap";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.len.div_ceil(4 * 256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// One thread per 8 elements of a row.
pub fn by_eights(num_rows: u32, width: u32) -> LaunchShape {
    debug_assert!(width.is_multiple_of(8), "16 bytes at a time");
    let chunks = width / 8;
    let threads = chunks.next_multiple_of(32).min(256);
    LaunchShape { grid: [num_rows, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
}

/// One block of threads per row.
fn by_rows(num_rows: u64, hidden: u32) -> LaunchShape {
    debug_assert!(hidden.is_multiple_of(8), "16 bytes at a time");
    let threads = (hidden / 8).next_multiple_of(32).min(1024);
    LaunchShape { grid: [num_rows as u32, 1, 1], threads, shared_bytes: 0 }
}
