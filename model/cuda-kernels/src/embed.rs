//! Rows of the embedding: `kernels/embed.cu`.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "embed.cu", defines: vec![] }
}

/// `x = table[token] * scale`. Rows are `[hidden]`, a multiple of 8.
///
/// The table holds all tokens, or those of one rank; the rows of others become zero, so that the sum over ranks is whole.
///
/// Moves 4 bytes an element: bound by memory.
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
    /// The table's first row is this token's.
    pub first_token: u32,
    /// Rows of the table.
    pub num_held: u32,
    pub scale: f32,
    pub num_rows: u64,
}

// SAFETY: as `Embed` in the file.
unsafe impl Kernel for Embed {
    const NAME: &'static str = "embed";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.hidden.is_multiple_of(8), "16 bytes at a time");
        let chunks = self.hidden / 8;
        let threads = chunks.next_multiple_of(32).min(256);
        LaunchShape { grid: [self.num_rows as u32, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
    }
}
