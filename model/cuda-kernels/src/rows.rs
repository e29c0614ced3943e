//! What else is done to rows by themselves: `kernels/rows.cu`. Widths are multiples of 8.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "rows.cu", defines: vec![] }
}

/// A row, a sequence, a slot, an expert or a place that stands for none: what is made of it is zero. Graphs of a fixed number
/// of rows are filled up with it.
pub const NONE: u32 = u32::MAX;

/// `out[i] = norm(x[j] + added[j]) * weight`, where j is `indices[i]`: the norm before the head, of the rows whose logits
/// are wanted alone. What is normed is rounded as [`AddNorm`](crate::norm::AddNorm) keeps it; x stays as it is.
///
/// Moves 4 bytes an element, 6 with something added: bound by memory.
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

// SAFETY: as `NormWanted` in the file.
unsafe impl Kernel for NormWanted {
    const NAME: &'static str = "norm_wanted";

    fn shape(&self) -> LaunchShape {
        by_rows(self.num_rows, self.hidden)
    }
}

/// `x += norm(added) * post_weight; out = norm(x) * weight`: what follows a part of a layer that has a norm behind it as
/// well as before (Gemma 2 and 3).
///
/// Moves 8 bytes an element: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PostNorm {
    /// `[rows][hidden]`, bf16: the residual stream.
    pub x: Address,
    /// `[rows][hidden]`, bf16: what the part made.
    pub added: Address,
    /// `[hidden]`, f32.
    pub post_weight: Address,
    /// `[hidden]`, f32; null when the next norm is of other rows ([`NormWanted`]).
    pub weight: Address,
    /// `[rows][hidden]`, bf16; null with `weight`.
    pub out: Address,
    pub hidden: u32,
    pub eps: f32,
    pub num_rows: u64,
}

// SAFETY: as `PostNorm` in the file.
unsafe impl Kernel for PostNorm {
    const NAME: &'static str = "post_norm";

    fn shape(&self) -> LaunchShape {
        by_rows(self.num_rows, self.hidden)
    }
}

/// `x += bias`, for products whose library does not add it.
///
/// Moves 4 bytes an element: bound by memory.
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

// SAFETY: as `AddBias` in the file.
unsafe impl Kernel for AddBias {
    const NAME: &'static str = "add_bias";

    fn shape(&self) -> LaunchShape {
        by_eights(self.num_rows, self.width)
    }
}

/// `x = cap * tanh(x / cap)` of logits, in place.
///
/// Moves 8 bytes a number: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SoftCap {
    /// `[len]`, f32, aligned to 16 bytes.
    pub x: Address,
    pub len: u64,
    pub cap: f32,
    pub unused: u32,
}

// SAFETY: as `SoftCap` in the file.
unsafe impl Kernel for SoftCap {
    const NAME: &'static str = "soft_cap";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.len.div_ceil(4 * 256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// A thread for each eight elements of each row.
pub fn by_eights(num_rows: u32, width: u32) -> LaunchShape {
    debug_assert!(width.is_multiple_of(8), "16 bytes at a time");
    let chunks = width / 8;
    let threads = chunks.next_multiple_of(32).min(256);
    LaunchShape { grid: [num_rows, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
}

/// A block for each row.
fn by_rows(num_rows: u64, hidden: u32) -> LaunchShape {
    debug_assert!(hidden.is_multiple_of(8), "16 bytes at a time");
    let threads = (hidden / 8).next_multiple_of(32).min(1024);
    LaunchShape { grid: [num_rows as u32, 1, 1], threads, shared_bytes: 0 }
}
