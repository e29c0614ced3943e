//! What a measurement says.

/// What was measured of one thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// "decode attention, 32 x 4096"
    pub what: String,
    /// Seconds, the median.
    pub seconds: f64,
    /// Bytes, or operations, in that time.
    pub amount: Amount,
    /// Of the ceiling; `None` of a ceiling itself.
    pub share: Option<f64>,
    /// What the share is to be at least.
    pub target: Option<f64>,
}

impl Figure {
    /// Whether it is below what it is to be.
    pub fn is_missed(&self) -> bool {
        // Not a number is no success.
        matches!((self.share, self.target), (Some(share), Some(target)) if share.is_nan() || share < target)
    }
}

/// What takes time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// Through the device's memory.
    Bytes(f64),
    /// Of the matrix units.
    Operations(f64),
}
