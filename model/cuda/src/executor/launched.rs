//! Steps under way, and what came of one.

use crate::samplings::Results;

/// Layers that were told of, and whether the others are marked; else they are ready when the step is.
#[derive(Clone, Copy)]
pub struct Told {
    pub num_layers: usize,
    pub is_marked: bool,
}

/// A step under way.
pub struct Launched {
    /// That its tokens are sent to.
    pub place: usize,
    pub results: Results,
    /// Rows after which tokens are sampled, by whichever rank.
    pub num_sampled: usize,
    pub told: Told,
}

/// What came of a step.
#[derive(Default)]
pub struct Collected {
    pub place: usize,
    pub results: Results,
    pub bytes: Vec<u8>,
}
