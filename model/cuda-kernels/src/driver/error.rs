//! Why a device cannot be opened.

use baton_cuda::CudaError;
use thiserror::Error;

use crate::compile::CompileError;

/// Why a device cannot be opened. The message says what to do, where something can be done.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The device or a library is missing, out of memory, or broken.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The kernels could not be compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The device does not support bf16.
    #[error("device {device} has compute capability {major}.{minor}, expected 8.0 (A100) or newer")]
    TooOld {
        /// The driver's index of the device.
        device: u32,
        /// Major part of the compute capability.
        major: u32,
        /// Minor part of the compute capability.
        minor: u32,
    },
}
