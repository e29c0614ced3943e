//! The two deadlines of a handoff: one for all of it, and a shorter one while KV is expected to move.

use std::time::Instant;

/// When a running handoff gives up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadlines {
    /// For the whole handoff.
    pub(crate) total: Instant,
    /// Until the next sign of progress; `None` while no KV is expected to move.
    pub(crate) stall: Option<Instant>,
}

impl Deadlines {
    /// The earlier one.
    pub(crate) fn next(&self) -> Instant {
        // Invariant 6: `total` is always set, so no state of a handoff waits for ever.
        self.stall.map_or(self.total, |stall| stall.min(self.total))
    }
}
