//! What one step does. The scheduler decides it, and the step loop carries it out.

use baton_cost::StepWork;

use crate::sequence::{Sequence, SequenceId};

/// What the next step does. Reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Tokens to compute, in the order of the batch.
    pub chunks: Vec<Chunk>,
    /// Sequences that left the queue and hold blocks now.
    pub admitted: Vec<Admission>,
    /// Tokens that running prompts need not compute any more.
    pub adopted: Vec<Adoption>,
    /// Sequences that lost their blocks and wait again.
    pub preempted: Vec<SequenceId>,
}

/// A run of tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The sequence.
    pub id: SequenceId,
    /// Position of the first token.
    pub start_idx: usize,
    /// Number of tokens, at least one.
    pub num_tokens: usize,
    /// So many of them at the end are a draft.
    pub num_drafts: usize,
    /// After so many of its tokens, the next token of the prompt is scored. Besides them, only the last one may have logits.
    pub num_scored: usize,
    /// Whether these are the last known tokens, so that the next token is sampled.
    pub wants_token: bool,
}

/// A sequence that was given blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The sequence.
    pub id: SequenceId,
    /// Whole blocks at its front that the prefix cache supplied.
    pub num_cached_blocks: usize,
    /// False when the sequence comes back after a preemption.
    pub is_first: bool,
    /// Whether its other blocks are loaded from outside before it runs; see `Scheduler::resume`.
    pub is_recalled: bool,
}

/// Blocks of a running prompt, right after what was computed, that the prefix cache got meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adoption {
    /// The sequence. They count as computed.
    pub id: SequenceId,
    /// Index of the first in its table.
    pub first_block_idx: usize,
    /// At least one.
    pub num_blocks: usize,
    /// False when the sequence was preempted: its blocks were cached or computed before.
    pub is_first: bool,
}

impl StepPlan {
    /// Whether the step computes and changes nothing. Then the next one will not either, until a command arrives.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
            && self.admitted.is_empty()
            && self.adopted.is_empty()
            && self.preempted.is_empty()
    }

    /// Tokens that the step computes, drafts included.
    pub fn num_tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.num_tokens).sum()
    }

    /// Drafted tokens among them.
    pub fn num_drafts(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.num_drafts).sum()
    }

    /// What the step computes.
    pub fn work(&self) -> StepWork {
        let work = |chunk: &Chunk| StepWork::chunk(chunk.start_idx as f64, chunk.num_tokens as f64);
        self.chunks.iter().map(work).fold(StepWork::default(), StepWork::plus)
    }

    /// Whether a sequence in it decodes, or ends its prompt.
    pub fn has_decodes(&self) -> bool {
        self.num_decodes() > 0
    }

    /// How many do.
    pub fn num_decodes(&self) -> usize {
        let decodes = |chunk: &&Chunk| chunk.num_tokens == 1 + chunk.num_drafts && chunk.wants_token;
        self.chunks.iter().filter(decodes).count()
    }

    pub(crate) fn clear(&mut self) {
        self.chunks.clear();
        self.admitted.clear();
        self.adopted.clear();
        self.preempted.clear();
    }
}

impl Chunk {
    /// The number of its last tokens whose logits are needed: those that are scored, then those that a token is sampled after.
    pub fn num_rows(&self) -> usize {
        self.num_scored + if self.wants_token { self.num_drafts + 1 } else { 0 }
    }

    /// The next `num_tokens` of a sequence.
    pub(crate) fn of(sequence: &Sequence, num_tokens: usize) -> Chunk {
        Chunk {
            id: sequence.id,
            start_idx: sequence.num_computed,
            num_tokens,
            num_drafts: 0,
            num_scored: sequence.scored_ahead().num_in(num_tokens),
            wants_token: num_tokens == sequence.num_left(),
        }
    }
}
