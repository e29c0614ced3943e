//! Why no executor on a device can be had.

use baton_cuda::CudaError;
use baton_cuda::nccl::NcclError;
use baton_cuda_kernels::driver::OpenError;
use baton_model_spec::Rank;
use thiserror::Error;

/// Why a model cannot be computed on a device. Each says what to do, where something can be done.
#[derive(Debug, Error)]
pub enum StartError {
    /// The device, or a library, is missing, full, or broken.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The device has too little memory.
    #[error("no room for {what}: {why}; {remedy}")]
    NoRoom {
        /// "the weights"
        what: &'static str,
        /// How much is missing: in the message, too.
        why: CudaError,
        /// What takes less.
        remedy: &'static str,
    },
    /// Several devices compute together by NCCL.
    #[error("several devices compute one model by NCCL: {0}")]
    Nccl(#[from] NcclError),
    /// One of several ranks cannot be had.
    #[error("rank {rank} on {device}: {why}")]
    Rank {
        /// Which.
        rank: usize,
        /// "cuda:1"
        device: String,
        /// Why: in the message, so no source besides.
        why: Box<StartError>,
    },
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Kernels are not written for such a model.
    #[error("{what} is {found}, expected {expected} on a device")]
    Shape {
        /// "head_dim"
        what: &'static str,
        /// In the model.
        found: usize,
        /// What there are kernels for.
        expected: &'static str,
    },
}

impl StartError {
    /// That of taking memory for `what`.
    pub fn taking(what: &'static str, remedy: &'static str) -> impl Fn(CudaError) -> StartError + Copy {
        move |error| match error {
            why @ CudaError::OutOfMemory { .. } => StartError::NoRoom { what, why, remedy },
            error => error.into(),
        }
    }

    /// Says which of several ranks it is of, and on which device. One that is alone needs no telling apart.
    pub fn of(self, rank: Rank, device: String) -> StartError {
        match rank {
            Rank::ONLY => self,
            Rank { idx: rank, .. } => StartError::Rank { rank, device, why: Box::new(self) },
        }
    }
}
