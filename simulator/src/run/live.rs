//! One request under way.

use baton_kv_cache::{BlockHash, HashRoot};
use baton_planner::{Plan, Retry, WorkerKey};
use baton_scheduler::SequenceId;

use crate::{
    time::SimTime,
    trace::{Arrival, Trace},
    worker::RequestIdx,
};

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Live {
    /// Of the full blocks of its prompt; none, if the trace knows no prefixes.
    pub(super) hashes: Vec<BlockHash>,
    pub(super) router: u32,
    pub(super) retry: Retry,
    pub(super) num_attempts: u32,
    pub(super) attempt: Option<Attempt>,
}

/// One plan of it, carried out.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) plan: Plan,
    /// Which attempt of the request.
    pub(super) number: u32,
    /// It takes over a running request that migrates, and finds that request's own KV.
    pub(super) is_arriving: bool,
    /// Tokens whose KV is needed.
    pub(super) num_tokens: usize,
    pub(super) decode: usize,
    pub(super) prefill: Option<usize>,
    /// Numbers in the ledgers.
    pub(super) decode_ticket: u64,
    pub(super) prefill_ticket: Option<u64>,
    /// What it has at workers.
    pub(super) decode_sequence: Option<Held>,
    pub(super) prefill_sequence: Option<Held>,
    pub(super) recall: Option<Recalling>,
    /// From where a prefix is fetched, until that begins.
    pub(super) source: Option<WorkerKey>,
    pub(super) fetch: Option<Fetch>,
    /// Of a handoff.
    pub(super) prefill_began: SimTime,
    pub(super) granted: Option<Granted>,
    pub(super) computed: Option<SimTime>,
    pub(super) is_decoding: bool,
}

/// A sequence, a reservation or a hold at one life of a worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) worker: usize,
    pub(super) life: u32,
    pub(super) id: SequenceId,
}

/// The front of a prompt that is read from the tiers of a worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recalling {
    pub(super) worker: usize,
    pub(super) life: u32,
    /// Blocks from `first` on, which follow those in its pool, up to `num_blocks`.
    pub(super) first: usize,
    pub(super) num_blocks: usize,
    /// It gives a prefix, and computes nothing.
    pub(super) is_source: bool,
}

/// A prefix that is being fetched, or the end of a prompt that is read from tiers while its beginning is computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    /// `None`: from tiers.
    pub(super) from: Option<Held>,
    pub(super) to: Held,
    /// Blocks of the prefix from `first` on, up to `num_blocks`.
    pub(super) first: usize,
    pub(super) num_blocks: usize,
    /// Those of them that come. The others were cached already.
    pub(super) num_coming: usize,
    /// The word to the scheduler, if the prompt is computed meanwhile.
    pub(super) expected: Option<Held>,
}

/// Blocks that are set aside at the decode worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granted {
    pub(super) at: SimTime,
    pub(super) num_cached_blocks: usize,
}

impl Attempt {
    /// Blocks of its prompt that a cache may supply: the last token is computed in any case.
    pub(super) fn num_sharable(&self, block_size: usize) -> usize {
        self.num_tokens.saturating_sub(1) / block_size
    }

    /// The worker that computes the prompt.
    pub(super) fn computes(&self) -> usize {
        self.prefill.unwrap_or(self.decode)
    }
}

/// Hashes of the full blocks of a prompt. Blocks are parts of the trace's blocks, whose ids name whole prefixes: so each hash
/// is made from an id alone.
pub(super) fn block_hashes(
    trace: &Trace,
    arrival: &Arrival,
    root: HashRoot,
    block_size: usize,
) -> Vec<BlockHash> {
    let request = &trace.requests[arrival.request_idx as usize];
    let ids = trace.hash_ids(request);
    if ids.is_empty() {
        return Vec::new();
    }
    let hash = |block_idx: usize| {
        let start = block_idx * block_size;
        let part = (start % trace.block_tokens / block_size) as u32;
        root.hash().child(&[ids[start / trace.block_tokens], part])
    };
    (0..request.num_prompt_tokens as usize / block_size).map(hash).collect()
}

/// The hashes of all full blocks of a request that has delivered tokens: every token that is not in a block of `hashes` has the
/// request's own number.
pub(super) fn with_output(
    hashes: &[BlockHash],
    request: RequestIdx,
    num_tokens: usize,
    block_size: usize,
) -> Vec<BlockHash> {
    let mut all = hashes.to_vec();
    while let Some(&parent) = all.last()
        && all.len() < num_tokens / block_size
    {
        all.push(parent.child(&vec![request; block_size]));
    }
    all
}
