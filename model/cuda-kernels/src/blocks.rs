//! Copies KV between pools and staging buffers of a device: `kernels/blocks.cu`.
//!
//! [`KvMapping`](baton_kv_cache::KvMapping) computes the runs for two sides of the same element type: pieces, ranges
//! of heads, or parts of heads where block sizes differ.

use baton_kv_cache::DeviceCopy;

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "blocks.cu", defines: vec![] }
}

/// A run of contiguous bytes, as offsets from the start of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ByteRun {
    pub from: u64,
    pub to: u64,
    pub num_bytes: u64,
}

impl From<&DeviceCopy> for ByteRun {
    /// Of addresses: both sides start at address 0.
    fn from(&DeviceCopy { source, target, len }: &DeviceCopy) -> ByteRun {
        ByteRun { from: source, to: target, num_bytes: len as u64 }
    }
}

// SAFETY: three words without padding.
unsafe impl bytemuck::NoUninit for ByteRun {}

/// Copies runs. Runs do not overlap.
///
/// Moves each byte twice, 16 bytes at a time where everything is aligned. Bound by memory bandwidth, or by the link
/// to one of the sides.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyRuns {
    pub from: Address,
    pub to: Address,
    /// `[runs]`, [`ByteRun`].
    pub runs: Address,
    pub num_runs: u32,
    /// Blocks of threads that share a run. One for each 16 KiB of the longest run is enough.
    pub num_parts: u32,
}

// SAFETY: the fields are those of `CopyRuns` in the kernel file.
unsafe impl Kernel for CopyRuns {
    const NAME: &'static str = "copy_runs";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_runs, self.num_parts, 1], threads: 256, shared_bytes: 0 }
    }
}
