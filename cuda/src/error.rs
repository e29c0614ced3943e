//! Why a device cannot be used.

use cudarc::driver::{DriverError, result, sys};
use thiserror::Error;

use crate::NoLibrary;

/// Why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CudaError {
    /// The host has no NVIDIA driver, or this process (this container) cannot see it.
    #[error("no CUDA driver: libcuda.so.1 not found")]
    NoDriver,
    /// The driver has no device, or CUDA_VISIBLE_DEVICES hides all of them.
    #[error("no device: the CUDA driver finds none")]
    NoDevice,
    /// The device does not exist.
    #[error("no device {device}: there are {num_devices}")]
    NoSuchDevice {
        /// The requested device.
        device: u32,
        /// The number of devices.
        num_devices: usize,
    },
    /// A library that is not part of the driver.
    #[error(transparent)]
    NoLibrary(#[from] NoLibrary),
    /// The device has not enough free memory.
    #[error("{num_bytes} bytes of device memory are needed, and {num_free} are left")]
    OutOfMemory {
        /// The requested bytes.
        num_bytes: usize,
        /// Free bytes; they may be fragmented.
        num_free: usize,
    },
    /// One of the ranks of a group has ended.
    #[error("rank {rank} is gone")]
    RankGone {
        /// Its index.
        rank: usize,
    },
    /// A call failed.
    #[error("{call} failed: {why}")]
    Failed {
        /// The function of the driver or of a library.
        call: &'static str,
        /// The text of the failure.
        why: String,
    },
}

/// The error of a failed driver call.
pub fn failed(call: &'static str, error: DriverError) -> CudaError {
    CudaError::Failed { call, why: error.to_string() }
}

/// The error of a failed driver call that allocates memory.
pub(crate) fn refused(call: &'static str, error: DriverError, num_bytes: usize) -> CudaError {
    match error {
        DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
            let num_free = result::mem_get_info().map_or(0, |(num_free, _)| num_free);
            CudaError::OutOfMemory { num_bytes, num_free }
        }
        error => failed(call, error),
    }
}
