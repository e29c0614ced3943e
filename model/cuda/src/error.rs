//! Why a model cannot start on a device.

use baton_cuda::CudaError;
use baton_cuda::nccl::NcclError;
use baton_cuda_kernels::driver::OpenError;
use baton_model_spec::Rank;
use thiserror::Error;

/// Why a model cannot be computed on a device. The message says what to do, where something can be done.
#[derive(Debug, Error)]
pub enum StartError {
    /// The device or a library is missing, out of memory, or broken.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The device has too little memory.
    #[error("no room for {what}: {why}; {remedy}")]
    NoRoom {
        /// "the weights"
        what: &'static str,
        /// The failed allocation. It is part of the message.
        why: CudaError,
        /// A setting that needs less memory.
        remedy: &'static str,
    },
    /// NCCL, which several devices need, is missing or failed.
    #[error("a model on several devices needs NCCL: {0}")]
    Nccl(#[from] NcclError),
    /// One of several ranks failed to start.
    #[error("rank {rank} on {device}: {why}")]
    Rank {
        /// Its index.
        rank: usize,
        /// "cuda:1"
        device: String,
        /// The cause. It is part of the message and therefore not a source.
        why: Box<StartError>,
    },
    /// The device could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There are no kernels for a model of this shape.
    #[error("{what} is {found}, expected {expected} on a device")]
    Shape {
        /// "head_dim"
        what: &'static str,
        /// The model's value.
        found: usize,
        /// The values that kernels support.
        expected: &'static str,
    },
}

impl StartError {
    /// Converts an error of allocating memory for `what`.
    pub fn taking(what: &'static str, remedy: &'static str) -> impl Fn(CudaError) -> StartError + Copy {
        move |error| match error {
            why @ CudaError::OutOfMemory { .. } => StartError::NoRoom { what, why, remedy },
            error => error.into(),
        }
    }

    /// Adds the rank and its device to the error. A single rank needs no such addition.
    pub fn of(self, rank: Rank, device: String) -> StartError {
        match rank {
            Rank::ONLY => self,
            Rank { idx: rank, .. } => StartError::Rank { rank, device, why: Box::new(self) },
        }
    }
}
