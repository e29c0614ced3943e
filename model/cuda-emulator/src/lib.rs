//! Runs kernels and models in tests: on an emulated GPU, on fake CUDA libraries, or on the GPU that
//! `BATON_KERNELS_ON` names.
//!
//! g++ compiles the kernels with `cpp/emulator.h`, and a separate process runs them ([`session`]).
//! [`emulated_device`] is a device on top of that. [`test_device`] is either the emulated device or a GPU with guards
//! around its buffers. This crate is for tests only; no production crate depends on it.

#![allow(missing_docs)] // for tests

pub mod emulated_device;
pub mod emulator;
pub mod fake_libraries;
pub mod files;
pub mod models;
pub mod numbers;
mod program;
pub mod session;
pub mod test_device;
pub mod tested;
