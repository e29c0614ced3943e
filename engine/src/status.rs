//! What an engine publishes about itself: its load, its progress, and whether everything was returned.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use baton_cost::StepLine;
use baton_scheduler::{IntegrityError, Sequence};

use crate::events::DraftCounts;

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
    /// Blocks that must be available to admit the whole queue, as if nothing of it were cached.
    pub num_queued_blocks: usize,
    /// Requests that the engine has taken from its callers since it started, and what they bring. What was submitted and is
    /// not taken yet waits for the end of a step.
    pub(crate) taken: Submitted,
}

/// Requests, the tokens that they bring to compute, and the blocks that they need to be admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Submitted {
    pub(crate) num_requests: u64,
    pub(crate) num_tokens: u64,
    pub(crate) num_blocks: u64,
}

/// What an engine's steps took and what it computes now, after its newest step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EnginePace {
    /// Seconds of a step. `None` without a prior and before the first step.
    pub step: Option<StepLine>,
    /// Steps that it was measured by.
    pub num_steps: u64,
    /// Sequences that decode.
    pub num_decoding: usize,
    /// Their tokens, all together.
    pub num_context_tokens: usize,
    /// Pairs of a queued prompt token and a token that it will see.
    pub num_queued_pairs: f64,
    /// Between two tokens of a sequence that decodes, by the newest steps; 0 when the newest step decoded nothing, and
    /// while there is nothing to compute. Drafting counts, and so do accepted drafts.
    pub recent_itl_seconds: f64,
    /// Tokens that a step yields for such a sequence, by the same steps; kept while nothing decodes. 0 before the first one.
    pub(crate) recent_tokens: f64,
    /// When the newest step ended. `None` before the first.
    pub(crate) stepped_at: Option<Instant>,
}

/// A step for the sequences that decode in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeStep {
    /// Seconds that they wait for its tokens: from the step before, or since it was planned and drafted for.
    pub(crate) seconds: f64,
    /// Tokens that it yields for each, on average.
    pub(crate) num_tokens: f64,
}

/// What an engine has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineTotals {
    /// Times that a sequence lost its blocks to others.
    pub num_preempted: u64,
    /// Prompt tokens of admitted sequences. What arrives computed is not counted.
    pub num_prompt_tokens: u64,
    /// Of those, the tokens that the prefix cache supplied.
    pub num_cached_tokens: u64,
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
    pub(crate) num_preempted: AtomicU64,
    num_prompt_tokens: AtomicU64,
    pub(crate) num_cached_tokens: AtomicU64,
    /// Tokens per second, as the bits of an `f64`. 0 until the first step was measured.
    pub(crate) prefill_rate: AtomicU64,
    /// Locked for a copy only.
    pace: Mutex<EnginePace>,
    /// What callers have submitted.
    num_submitted: AtomicU64,
    num_submitted_tokens: AtomicU64,
    num_submitted_blocks: AtomicU64,
}

/// Weight of the newest step in the means of which the recent time between tokens is the quotient.
const NEWEST_ITL: f64 = 0.2;

impl Progress {
    pub(crate) fn totals(&self) -> EngineTotals {
        let [num_preempted, num_prompt_tokens, num_cached_tokens] =
            [&self.num_preempted, &self.num_prompt_tokens, &self.num_cached_tokens]
                .map(|count| count.load(Ordering::Relaxed));
        EngineTotals { num_preempted, num_prompt_tokens, num_cached_tokens }
    }

    /// Counts a sequence that is admitted for the first time.
    pub(crate) fn admit(&self, num_prompt_tokens: usize, num_cached_tokens: usize) {
        self.num_prompt_tokens.fetch_add(num_prompt_tokens as u64, Ordering::Relaxed);
        self.num_cached_tokens.fetch_add(num_cached_tokens as u64, Ordering::Relaxed);
    }

    pub(crate) fn pace(&self) -> EnginePace {
        *self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes what the scheduler says now. `newest`: the newest step, if it decoded.
    pub(crate) fn set_pace(&self, now: EnginePace, newest: Option<DecodeStep>) {
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let (recent_itl_seconds, recent_tokens) = match newest {
            None => (0.0, pace.recent_tokens),
            Some(newest) if pace.recent_itl_seconds == 0.0 => {
                (newest.seconds / newest.num_tokens, newest.num_tokens)
            }
            Some(newest) => {
                let seconds = pace.recent_itl_seconds * pace.recent_tokens;
                let seconds = seconds + NEWEST_ITL * (newest.seconds - seconds);
                let num_tokens = pace.recent_tokens + NEWEST_ITL * (newest.num_tokens - pace.recent_tokens);
                (seconds / num_tokens, num_tokens)
            }
        };
        let stepped_at = now.stepped_at.or(pace.stepped_at);
        *pace = EnginePace { recent_itl_seconds, recent_tokens, stepped_at, ..now };
    }

    /// Counts a request before it is sent to the engine.
    pub(crate) fn submit(&self, sequence: &Sequence) {
        self.num_submitted_tokens.fetch_add(sequence.num_prompt_tokens_left() as u64, Ordering::Relaxed);
        self.num_submitted_blocks.fetch_add(sequence.num_blocks_to_admit() as u64, Ordering::Relaxed);
        self.num_submitted.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn submitted(&self) -> Submitted {
        let num_requests = self.num_submitted.load(Ordering::Acquire);
        let [num_tokens, num_blocks] = [&self.num_submitted_tokens, &self.num_submitted_blocks]
            .map(|count| count.load(Ordering::Relaxed));
        Submitted { num_requests, num_tokens, num_blocks }
    }
}

/// What was drafted since the start of the engine.
#[derive(Debug, Default)]
pub(crate) struct DraftCounters {
    /// By the drafter.
    pub(crate) proposed: DraftCounter,
    /// Of text that grammars force.
    pub(crate) forced: DraftCounter,
}

/// [`DraftCounts`] that grow.
#[derive(Debug, Default)]
pub(crate) struct DraftCounter {
    drafted: AtomicU64,
    accepted: AtomicU64,
}

impl Submitted {
    pub(crate) fn add(&mut self, sequence: &Sequence) {
        self.num_requests += 1;
        self.num_tokens += sequence.num_prompt_tokens_left() as u64;
        self.num_blocks += sequence.num_blocks_to_admit() as u64;
    }
}

impl EngineLoad {
    /// With what was submitted and is not taken yet, as part of the queue.
    pub(crate) fn with_submitted(self, submitted: Submitted) -> EngineLoad {
        let num_requests = submitted.num_requests.saturating_sub(self.taken.num_requests);
        let num_tokens = submitted.num_tokens.saturating_sub(self.taken.num_tokens);
        let num_blocks = submitted.num_blocks.saturating_sub(self.taken.num_blocks);
        EngineLoad {
            num_waiting: self.num_waiting + num_requests as usize,
            num_queued_tokens: self.num_queued_tokens + num_tokens as usize,
            num_queued_blocks: self.num_queued_blocks + num_blocks as usize,
            ..self
        }
    }

    pub(crate) fn idle(num_blocks: usize) -> EngineLoad {
        EngineLoad {
            num_waiting: 0,
            num_running: 0,
            num_free_blocks: num_blocks,
            num_total_blocks: num_blocks,
            num_queued_tokens: 0,
            num_queued_blocks: 0,
            taken: Submitted::default(),
        }
    }
}

impl DraftCounter {
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
