//! What kernels and models run on in tests: an emulated GPU, fake libraries of CUDA's, or the GPU that `BATON_KERNELS_ON` names.
//!
//! Kernels are compiled by g++ over `cpp/emulator.h` and run in a process of their own ([`session`]); [`emulated_device`] is a
//! device over that, [`test_device`] either that or a GPU with guards about its buffers. For tests alone: no production crate
//! depends on it.

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
