//! One result of a measurement.

use baton_cuda::CudaError;
use baton_cuda_kernels::device::KernelDevice;

/// What a measurement reports.
#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// It was measured.
    Measured(Figure),
    /// It was not measured: the device has too little memory.
    LeftOut {
        /// As [`Figure::what`].
        what: String,
        /// Bytes that it takes.
        needed_bytes: usize,
        /// Bytes that are free on the device.
        free_bytes: usize,
    },
}

/// A rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// "decode attention, 32 x 4096"
    pub what: String,
    /// Median of the seconds.
    pub seconds: f64,
    /// Bytes or operations in that time.
    pub amount: Amount,
    /// Share of the ceiling. `None` for a ceiling itself.
    pub share: Option<f64>,
    /// The share that is expected at least.
    pub target: Option<f64>,
}

impl Figure {
    /// Whether the share is below the expected one.
    pub fn is_missed(&self) -> bool {
        // NaN is a failure.
        matches!((self.share, self.target), (Some(share), Some(target)) if share.is_nan() || share < target)
    }
}

/// The amount of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// Bytes to and from the device's memory.
    Bytes(f64),
    /// Operations of the tensor cores.
    Operations(f64),
}

/// Whether a measurement fits into the memory. Reports one that does not.
pub fn fits<D: KernelDevice>(
    device: &mut D,
    what: &str,
    needed_bytes: usize,
    report: &mut dyn FnMut(&Finding),
) -> Result<bool, CudaError> {
    let free_bytes = device.free_bytes()?;
    let fits = needed_bytes <= free_bytes;
    if !fits {
        report(&Finding::LeftOut { what: what.to_owned(), needed_bytes, free_bytes });
    }
    Ok(fits)
}
