//! Embedding lookup: `kernels/embed.cu`.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "embed.cu", defines: vec![] }
}

/// `x = table[token] * scale`. Rows are `[hidden]`, a multiple of 8.
///
/// The table holds all tokens, or the tokens of one rank. Tokens of other ranks become rows of zeros, so that the sum
/// over the ranks is complete.
///
/// Moves 4 bytes per element: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Embed {
    /// `[num_held][hidden]`, bf16.
    pub table: Address,
    /// `[rows]`, u32.
    pub tokens: Address,
    /// `[rows][hidden]`, bf16.
    pub x: Address,
    pub hidden: u32,
    /// The token of the table's first row.
    pub first_token: u32,
    /// Rows of the table.
    pub num_held: u32,
    pub scale: f32,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `Embed` in the kernel file.
unsafe impl Kernel for Embed {
    const NAME: &'static str = "embed";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.hidden.is_multiple_of(8), "16 bytes at a time");
        let chunks = self.hidden / 8;
        let threads = chunks.next_multiple_of(32).min(256);
        LaunchShape { grid: [self.num_rows as u32, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
    }
}
