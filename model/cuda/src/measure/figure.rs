//! One result of a measurement.

/// One result of a measurement.
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
