//! Models on NVIDIA GPUs: weights, the forward pass and its executor, on top of the kernels of `baton-cuda-kernels`.
//!
//! Hidden modules are for tests and for `baton-cuda-emulator`.
//!
//! This crate does not know how kernels are written, nor whether the device is a GPU or emulated.

pub use block_queue::block_kernels;
pub use error::StartError;
pub use limits::BatchLimits;
pub use on_devices::ModelOnDevices;
pub use weights::DeviceWeightBytes;

mod blend_buffers;
#[doc(hidden)]
pub mod block_queue;
#[doc(hidden)]
pub mod block_tables;
#[doc(hidden)]
pub mod buffers;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod executor;
#[doc(hidden)]
pub mod form;
#[doc(hidden)]
pub mod forward_pass;
#[doc(hidden)]
pub mod inputs;
mod limits;
pub mod measure;
mod mlp;
#[doc(hidden)]
pub mod multiply;
#[doc(hidden)]
pub mod on_devices;
#[doc(hidden)]
pub mod parallel;
#[doc(hidden)]
pub mod part;
#[doc(hidden)]
pub mod pool;
#[doc(hidden)]
pub mod samplings;
#[doc(hidden)]
pub mod weights;
