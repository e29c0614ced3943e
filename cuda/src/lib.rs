//! CUDA devices through cudarc's driver API: their number, their memory, and pinned host memory. Also the libraries
//! NVRTC, cuBLASLt and NCCL. The driver and the libraries are loaded at run time.
//!
//! cudarc's functions panic without a driver, so everything starts with [`num_devices`] or [`Device::open`]. All called
//! driver functions are older than CUDA 11, so every driver in use has them. This crate does not know kernels,
//! nor the use of the memory.
//!
//! Tested so far: the errors for a missing driver and a missing device, and the parts of the libraries that need no
//! device. The rest has not been run on a device yet.

mod connections;
pub mod cublaslt;
mod device;
mod error;
mod library;
mod memory;
pub mod nccl;
pub mod nvrtc;

pub use connections::set_connections;
pub use device::{Device, device_name, num_devices};
pub use error::{CudaError, failed};
pub use library::{CudaVersion, NoLibrary, majors};
pub use memory::{Allocation, Copier, Pinned};
