//! The deadlines of a handoff.

use std::time::Duration;

/// How long a handoff may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// From `Begin`, the last `Progress` of either side, or the last pieces that were written, to the outcome. D's travels in `Begin` and binds P too.
    pub total: Duration,
    /// While KV is expected to move: from one sign of progress to the next.
    pub stall: Duration,
    /// After the outcome: for the peer (D) or the own data plane (P) to stop.
    pub stop: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            total: Duration::from_secs(120),
            stall: Duration::from_secs(30),
            stop: Duration::from_secs(10),
        }
    }
}
