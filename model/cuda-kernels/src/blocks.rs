//! Copies KV between pools and staging buffers of a device: `kernels/blocks.cu`.
//!
//! What moves is what [`KvMapping`](baton_kv_cache::KvMapping) finds where the two sides have the same type: pieces, ranges
//! of heads, parts of heads where block sizes differ.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "blocks.cu", defines: vec![] }
}

/// Bytes that are contiguous on both sides: offsets from the two sides' beginnings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ByteRun {
    pub from: u64,
    pub to: u64,
    pub num_bytes: u64,
}

// SAFETY: three words.
unsafe impl bytemuck::NoUninit for ByteRun {}

/// Copies runs, none of which overlap.
///
/// Moves each byte twice, 16 at a time where all is aligned: bound by memory, or by the link that one side is behind.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyRuns {
    pub from: Address,
    pub to: Address,
    /// `[runs]`, [`ByteRun`].
    pub runs: Address,
    pub num_runs: u32,
    /// How many blocks of threads share a run; one for each 16 KiB of the longest is enough.
    pub num_parts: u32,
}

// SAFETY: as `CopyRuns` in the file.
unsafe impl Kernel for CopyRuns {
    const NAME: &'static str = "copy_runs";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_runs, self.num_parts, 1], threads: 256, shared_bytes: 0 }
    }
}
