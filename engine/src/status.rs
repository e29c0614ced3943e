//! What an engine publishes about itself: its load, its progress, and whether everything was returned.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{block_pool::IntegrityError, events::DraftCounts};

/// How busy an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLoad {
    /// Sequences and reservations in the queue. They wait for blocks or for one of the `max_running` slots.
    pub num_waiting: usize,
    /// Sequences that hold blocks, reservations included.
    pub num_running: usize,
    /// Blocks without an owner. The prefix cache may use them meanwhile.
    pub num_free_blocks: usize,
    /// All blocks.
    pub num_total_blocks: usize,
    /// Tokens to compute before every sequence here decodes.
    pub num_queued_tokens: usize,
}

/// Why an engine is not idle and whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdleError {
    /// Something was not returned.
    #[error("not idle: {num_waiting} waiting, {num_running} running or reserved, {num_holds} held")]
    Busy {
        /// Sequences in the queue.
        num_waiting: usize,
        /// Sequences that hold blocks.
        num_running: usize,
        /// Holds on blocks from outside the engine.
        num_holds: usize,
    },
    /// The block accounting is wrong: a bug.
    #[error(transparent)]
    Integrity(#[from] IntegrityError),
    /// The engine has ended.
    #[error("the engine has ended")]
    Ended,
}

/// Counters that the engine thread writes and other threads read.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) num_computed: AtomicU64,
    /// Tokens per second, as the bits of an `f64`. 0 until the first step was measured.
    pub(crate) prefill_rate: AtomicU64,
}

/// [`DraftCounts`] since the start of the engine.
#[derive(Debug, Default)]
pub(crate) struct DraftCounters {
    drafted: AtomicU64,
    accepted: AtomicU64,
}

impl EngineLoad {
    pub(crate) fn idle(num_blocks: usize) -> EngineLoad {
        EngineLoad {
            num_waiting: 0,
            num_running: 0,
            num_free_blocks: num_blocks,
            num_total_blocks: num_blocks,
            num_queued_tokens: 0,
        }
    }
}

impl DraftCounters {
    pub(crate) fn add(&self, counts: DraftCounts) {
        self.drafted.fetch_add(counts.drafted, Ordering::Relaxed);
        self.accepted.fetch_add(counts.accepted, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> DraftCounts {
        // Reading `accepted` first keeps it at most `drafted`.
        let accepted = self.accepted.load(Ordering::Acquire);
        DraftCounts { drafted: self.drafted.load(Ordering::Acquire), accepted }
    }
}
