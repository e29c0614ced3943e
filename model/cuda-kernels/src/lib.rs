//! Kernels for NVIDIA's GPUs, and the device that runs them.
//!
//! Each file of `kernels/` has a module here. The module holds the arguments of the kernels and their launch shapes.
//! [`device`] is the seam: the calls that a forward pass makes. [`driver`] implements it with a GPU,
//! `baton-cuda-emulator` with an emulated device.
//!
//! The text of the kernels is not part of this crate ([`kernel::KernelFiles`]). A changed kernel therefore does not
//! rebuild the code that launches it. This crate does not know models: shapes and addresses are arguments.

// Arguments have the names of the kernel files. A comment explains an argument where the name does not.
#![allow(missing_docs)]

pub mod kernel;

pub mod device;

pub mod compile;
pub mod shipped;

pub mod check;
pub mod driver;
pub mod kv_type;
pub mod loops;
pub mod noise;
pub mod sources;

pub mod attention;
pub mod blend;
pub mod blocks;
pub mod checksum;
pub mod codes;
pub mod embed;
pub mod expert_products;
pub mod experts;
pub mod gate;
pub mod norm;
pub mod one_row;
pub mod products;
pub mod ranks;
pub mod rope;
pub mod rows;
pub mod sample;
