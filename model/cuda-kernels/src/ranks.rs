//! Joins results of several ranks: `kernels/ranks.cu`.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "ranks.cu", defines: vec![] }
}

/// Numbers reserved for a row of a rank's logits: the same for each rank, aligned to 16 bytes.
pub fn logit_stride(vocab_size: usize, num_ranks: usize) -> usize {
    vocab_size.div_ceil(num_ranks).next_multiple_of(4)
}

/// `out[row][token] = parts[rank of token][row][token of rank]`
///
/// Moves 8 bytes per number: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct JoinLogits {
    /// `rows * stride` f32 numbers per rank, of which `[rows][tokens of the rank]` are used. The last ranks may have
    /// fewer tokens than the others, or none.
    pub parts: Address,
    /// `[rows][vocab]`, f32.
    pub out: Address,
    /// Tokens of the first rank.
    pub part: u32,
    /// [`logit_stride`]
    pub stride: u32,
    pub vocab: u32,
    pub num_rows: u32,
}

// SAFETY: the fields are those of `JoinLogits` in the kernel file.
unsafe impl Kernel for JoinLogits {
    const NAME: &'static str = "join_logits";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_rows, self.vocab.div_ceil(256), 1], threads: 256, shared_bytes: 0 }
    }
}
