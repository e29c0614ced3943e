//! Bounds on what grammars may take.

use std::time::Duration;

use crate::watch::GrammarTime;

/// Bounds on what grammars may take.
#[derive(Clone, Copy, Debug)]
pub struct GrammarLimits {
    /// How long a grammar may be compiled. The thread of one that takes longer still counts as compiling until it ends.
    pub compile_time: Duration,
    /// Grammars that are compiled at a time. Others wait, at most for `compile_time`.
    pub max_compiling: usize,
    /// Callers that wait at a time, each with a thread, also for the vocabulary, and there at most for `compile_time`. More are
    /// refused at once.
    pub max_waiting: usize,
    /// Compiled grammars that are kept.
    pub max_cached: usize,
    /// How long the masks of one sequence may take. Most take less than 0.1 ms.
    pub time: GrammarTime,
}

impl Default for GrammarLimits {
    fn default() -> GrammarLimits {
        let time = GrammarTime { ahead: Duration::from_millis(500), per_token: Duration::from_millis(2) };
        GrammarLimits {
            compile_time: Duration::from_secs(5),
            max_compiling: 4,
            // Half of tokio's threads for blocking work.
            max_waiting: 256,
            max_cached: 64,
            time,
        }
    }
}
