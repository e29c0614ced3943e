//! Measures a device, and how close the kernels and whole steps come to its limits, for `cargo xtask gpu-check`.
//!
//! The same run measures the ceilings: a large copy, counted in bytes read and written, and a large bf16 product.
//! Times are medians, measured with the device's clock, or with the host's clock for steps as the engine sees them.
//! Weights and KV are noise, because products of zeros are faster than others. What does not fit into the device's memory is
//! left out, and the report says so.

use baton_cuda::CudaError;
use baton_cuda_kernels::device::TimedDevice;
use baton_cuda_kernels::driver::DriverDevice;
use baton_cuda_kernels::kernel::KernelCode;

use self::ceilings::Ceilings;
use crate::error::StartError;

pub use figure::{Amount, Figure, Finding};
pub use sizes::{ExpertSizes, Sizes, llama};

mod attention;
mod ceilings;
mod experts;
mod few_rows;
mod figure;
mod sizes;
mod steps;
mod timing;
mod weights;

/// Properties of a device.
#[derive(Clone, Debug)]
pub struct Card {
    /// "NVIDIA H100 80GB HBM3"
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Bytes of all its memory.
    pub memory_bytes: usize,
}

/// The device with index `ordinal`.
///
/// # Errors
/// When the driver or the device is missing.
pub fn card(ordinal: u32) -> Result<Card, CudaError> {
    let device = baton_cuda::Device::open(ordinal)?;
    let failed = |error| baton_cuda::failed("cuDeviceGetAttribute", error);
    let capability = device.context().compute_capability().map_err(failed)?;
    let name = device.context().name().map_err(failed)?;
    Ok(Card { name, capability, memory_bytes: device.memory()?.1 })
}

/// What is measured, beside the limits of the device, with which everything is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Nothing else.
    Ceilings,
    /// Attention of decode steps and of a prompt.
    Attention,
    /// Products of routed experts.
    Experts,
    /// Products of quantised weights with few rows.
    FewRows,
    /// Whole steps, and their products.
    Steps,
    /// All of it.
    All,
}

impl Scope {
    /// Each scope and its name on the command line.
    pub const NAMES: [(&str, Scope); 6] = [
        ("ceilings", Scope::Ceilings),
        ("attention", Scope::Attention),
        ("experts", Scope::Experts),
        ("few-rows", Scope::FewRows),
        ("steps", Scope::Steps),
        ("all", Scope::All),
    ];
}

/// Measures a model of the shape of Llama 3.1 8B. Calls `report` for each finding, when it is known.
///
/// # Errors
/// When a library is missing, or the device fails.
pub fn measure(
    ordinal: u32,
    code: &KernelCode,
    scope: Scope,
    report: &mut dyn FnMut(&Finding),
) -> Result<(), StartError> {
    // Keeps the device's context, with what the libraries have loaded, from part to part.
    let _device = baton_cuda::Device::open(ordinal)?;
    let sizes = Sizes::full();
    let sources = sizes.sources();
    measure_on(&sizes, scope, || Ok(DriverDevice::open(ordinal, &sources, code.clone())?), report)
}

/// Like [`measure`], for other sizes. The device is opened again for each part, which frees the memory of the part
/// before.
///
/// # Errors
/// As for [`measure`].
pub fn measure_on<D: TimedDevice>(
    sizes: &Sizes,
    scope: Scope,
    open: impl Fn() -> Result<D, StartError>,
    report: &mut dyn FnMut(&Finding),
) -> Result<(), StartError> {
    let Some(ceilings) = Ceilings::measure(&mut open()?, sizes, report)? else { return Ok(()) };
    let includes = |part| scope == part || scope == Scope::All;
    if includes(Scope::Attention) {
        for &num_sequences in &sizes.attention_batches {
            attention::measure_decode(&mut open()?, sizes, num_sequences, &ceilings, report)?;
        }
        attention::measure_prefill(&mut open()?, sizes, &ceilings, report)?;
    }
    if includes(Scope::Experts) {
        for experts in &sizes.experts {
            experts::measure(&mut open()?, sizes, experts, &ceilings, report)?;
        }
    }
    if includes(Scope::FewRows) {
        few_rows::measure(&mut open()?, sizes, &ceilings, report)?;
    }
    if includes(Scope::Steps) {
        steps::measure(open()?, sizes, &ceilings, report)?;
    }
    Ok(())
}
