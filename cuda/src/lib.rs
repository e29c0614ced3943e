//! CUDA devices through cudarc's driver API, loaded at run time: whether there are any, memory on them, and memory of the
//! host that they copy through; and the libraries of NVRTC, cuBLASLt and NCCL, likewise.
//!
//! cudarc's functions panic where the driver is absent, so that everything here begins with [`num_devices`] or
//! [`Device::open`]. Everything that is called is older than CUDA 11, so that any driver in use has it. It does not know
//! what the memory is for, nor kernels.
//!
//! What was run: that a missing driver and a missing device are said, and what of the libraries needs no device. The rest
//! was not run on one yet.

pub mod cublaslt;
mod device;
mod error;
mod library;
mod memory;
pub mod nccl;
pub mod nvrtc;

pub use device::{Device, num_devices};
pub use error::{CudaError, failed};
pub use library::{CudaVersion, NoLibrary, majors};
pub use memory::{Allocation, Copier, Pinned};
