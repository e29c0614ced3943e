//! Steps in flight, and results of a step.

use crate::samplings::{Results, SamplingParts};

/// Number of layers that were reported during the launch, and whether the others have marks. Layers without marks are
/// ready when the step is done.
#[derive(Clone, Copy)]
pub struct Reported {
    pub num_layers: usize,
    pub is_marked: bool,
}

/// A step in flight.
pub struct Launched {
    /// The return place of its tokens.
    pub place: usize,
    pub results: Results,
    /// The inputs of its sampling, until that is queued.
    pub unsampled: Option<SamplingParts>,
    /// Rows with a sampled token, over all ranks.
    pub num_sampled: usize,
    pub reported: Reported,
}

/// The results of a step.
#[derive(Default)]
pub struct Collected {
    pub place: usize,
    pub results: Results,
    pub bytes: Vec<u8>,
}
