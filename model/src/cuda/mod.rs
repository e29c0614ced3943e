//! Kernels for NVIDIA GPUs.
//!
//! Each file of `kernels/` has a module here: the arguments of its kernels, how they are launched, and tests against a plain
//! reference. Where there is no GPU the tests run them by an emulator.

mod attention;
pub mod check;
mod compile;
mod device;
mod driver;
mod kernel;
mod lt;
mod norm;
mod products;
mod sample;
mod start;
mod weights;

#[cfg(test)]
mod emulated;
#[cfg(test)]
mod emulator;
#[cfg(test)]
mod testing;

/// Every file, for the shapes that models have.
fn sources() -> Vec<kernel::Source> {
    [attention::sources(), vec![norm::source(), sample::source()], products::sources()].concat()
}
