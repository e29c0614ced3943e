//! How fast a device is, and how much of that the kernels and whole steps reach: for `cargo xtask gpu-check`.
//!
//! Ceilings are measured in the same run: a large copy, counted as bytes read and written, and a large product of bf16.
//! Times are medians, by the device's clock, or by the host's where a step is as the engine sees it. Weights and KV are
//! noise: of zeroes products are quicker than of anything else.

use baton_cuda::CudaError;
use baton_cuda_kernels::device::TimedDevice;
use baton_cuda_kernels::driver::DriverDevice;
use baton_cuda_kernels::kernel::KernelCode;

use self::ceilings::Ceilings;
use crate::error::StartError;
use crate::executor::sources_of;

pub use figure::{Amount, Figure};
pub use sizes::{Sizes, llama};

mod attention;
mod ceilings;
mod figure;
mod sizes;
mod steps;
mod timing;
mod weights;

/// What a device is.
#[derive(Clone, Debug)]
pub struct Card {
    /// "NVIDIA H100 80GB HBM3"
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Of all its memory.
    pub memory_bytes: usize,
}

/// The `ordinal`th device.
///
/// # Errors
/// What is missing.
pub fn card(ordinal: u32) -> Result<Card, CudaError> {
    let device = baton_cuda::Device::open(ordinal)?;
    let failed = |error| baton_cuda::failed("cuDeviceGetAttribute", error);
    let capability = device.context().compute_capability().map_err(failed)?;
    let name = device.context().name().map_err(failed)?;
    Ok(Card { name, capability, memory_bytes: device.memory()?.1 })
}

/// Measures a model of the shape of Llama 3.1 8B; `report` is told of each figure as it comes.
///
/// # Errors
/// When something is missing, the memory does not suffice, or the device fails.
pub fn measure(ordinal: u32, code: &KernelCode, report: &mut dyn FnMut(&Figure)) -> Result<(), StartError> {
    let sizes = Sizes::full();
    let sources = sources_of(&sizes.spec, &sizes.layout());
    measure_on(&sizes, || Ok(DriverDevice::open(ordinal, &sources, code.clone())?), report)
}

/// The same of other sizes, on a device that is opened anew for each part: what one allocates is free again for the next.
///
/// # Errors
/// As [`measure`].
pub fn measure_on<D: TimedDevice>(
    sizes: &Sizes,
    open: impl Fn() -> Result<D, StartError>,
    report: &mut dyn FnMut(&Figure),
) -> Result<(), StartError> {
    let ceilings = Ceilings::measure(&mut open()?, sizes, report)?;
    attention::measure(&mut open()?, sizes, &ceilings, report)?;
    steps::measure(open()?, sizes, &ceilings, report)
}
