//! Kernels for NVIDIA GPUs.
//!
//! Each file of `kernels/` has a module here: the arguments of its kernels, how they are launched, and tests against a plain
//! reference. Where there is no GPU the tests run them by an emulator.

mod embed;
mod gate;
mod kernel;
mod norm;
mod pool;
mod rope;
mod rows;

#[cfg(test)]
mod emulator;
#[cfg(test)]
mod testing;
