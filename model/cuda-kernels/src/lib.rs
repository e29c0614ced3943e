//! Kernels for NVIDIA's GPUs, and the device that they run on.
//!
//! Each file of `kernels/` has a module here: the arguments of its kernels and how they are launched. [`device`] is the seam: what
//! a forward pass asks of a device. [`driver`] is a GPU behind it, `baton-cuda-emulator` an emulated device.
//!
//! Texts of kernels are not part of this crate ([`kernel::KernelFiles`]): one can be changed without rebuilding those that launch
//! it. It does not know models: shapes and addresses are arguments.

// Fields of arguments are named as in the kernel files, which say what they are where the name does not.
#![allow(missing_docs)]

pub mod kernel;

pub mod device;

pub mod compile;

pub mod check;
pub mod driver;
pub mod kv_type;
pub mod noise;
pub mod sources;

pub mod attention;
pub mod blocks;
pub mod checksum;
pub mod codes;
pub mod embed;
pub mod expert_products;
pub mod experts;
pub mod gate;
pub mod norm;
pub mod products;
pub mod ranks;
pub mod rope;
pub mod rows;
pub mod sample;
