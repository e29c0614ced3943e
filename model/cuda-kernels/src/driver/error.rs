//! Why a device cannot be opened.

use baton_cuda::CudaError;
use thiserror::Error;

use crate::compile::CompileError;

/// Why a device cannot be opened for some kernels. Each says what to do, where something can be done.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The device, or a library, is missing, full, or broken.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// There is no code of the kernels.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The device has no bf16.
    #[error("device {device} has compute capability {major}.{minor}, expected 8.0 (A100) or newer")]
    TooOld {
        /// As the driver counts.
        device: u32,
        /// Of its capability.
        major: u32,
        /// Of its capability.
        minor: u32,
    },
}
