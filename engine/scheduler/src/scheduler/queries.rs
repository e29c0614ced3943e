//! What a scheduler tells about its sequences and blocks. Nothing here changes them.

use baton_cost::{PromptWork, StepLine, StepWork};
use baton_kv_cache::BlockHash;

use super::Scheduler;
use crate::{
    block_pool::{IntegrityError, PoolReport},
    sequence::{Sequence, SequenceId, SequenceRole},
};

impl Scheduler {
    /// A sequence that holds blocks.
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.running.get(id).or_else(|| self.holds.reservation(id))
    }

    /// Sequences and reservations in the queue.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that hold blocks, reservations included.
    pub fn num_running(&self) -> usize {
        self.running.len() + self.holds.reserved().len()
    }

    /// Prefilled prompts, prefixes and reservations without a slot whose blocks are held from outside, or will be.
    pub fn num_holds(&self) -> usize {
        self.holds.tables().len()
    }

    /// Blocks without an owner.
    pub fn num_free_blocks(&self) -> usize {
        self.pool.num_available()
    }

    /// Blocks that must be available to admit every waiting sequence, as if nothing of theirs were cached.
    pub fn num_queued_blocks(&self) -> usize {
        self.waiting.iter().map(Sequence::num_blocks_to_admit).sum()
    }

    /// Blocks at the front of a sequence that are cached, by its hashes in order.
    pub fn num_cached(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.pool.find(hash).is_some()).count()
    }

    /// All blocks.
    pub fn num_total_blocks(&self) -> usize {
        self.pool.num_blocks()
    }

    /// The first so many blocks contain all that were ever in use.
    pub fn num_used_blocks(&self) -> usize {
        self.pool.num_used()
    }

    /// Tokens that this engine will compute before every sequence here decodes.
    pub fn num_queued_tokens(&self) -> usize {
        self.prompts().map(|(num_tokens, num_done)| num_tokens - num_done).sum()
    }

    /// Pairs of those tokens and the tokens that each will see.
    pub fn num_queued_pairs(&self) -> f64 {
        self.prompts().map(|(num_tokens, num_done)| PromptWork::new(num_tokens, num_done).num_pairs).sum()
    }

    /// One step of the sequences that decode now.
    pub fn decoding(&self) -> StepWork {
        let decoding = self.running.iter().filter(|sequence| sequence.num_left() == 1);
        let work = |sequence: &Sequence| StepWork::decode(1.0, (sequence.num_computed + 1) as f64);
        decoding.map(work).fold(StepWork::default(), StepWork::plus)
    }

    /// What a step takes; `None` without a prior and before the first measured step.
    pub fn step_line(&self) -> Option<StepLine> {
        self.calibration.line()
    }

    /// Steps that the line was measured by.
    pub fn num_measured_steps(&self) -> u64 {
        self.calibration.num_steps()
    }

    /// The tokens of each sequence that waits for computing or is in the midst of it, and how many of them are computed. Of one
    /// that waits, these are in the prefix cache.
    fn prompts(&self) -> impl Iterator<Item = (usize, usize)> {
        let waiting = self.waiting.iter().filter(|sequence| sequence.role != SequenceRole::Decode);
        let running = self.running.iter().filter(|sequence| sequence.num_left() > 1);
        waiting.map(|sequence| (sequence.num_left(), sequence.num_cached_in_queue)).chain(
            running.map(|sequence| (sequence.num_computed + sequence.num_left(), sequence.num_computed)),
        )
    }

    /// Whether nothing waits, runs, is reserved or held.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.num_running() == 0 && self.num_holds() == 0
    }

    /// Checks the pool's block accounting against every table here.
    ///
    /// # Errors
    /// When they disagree.
    pub fn check_integrity(&self) -> Result<PoolReport, IntegrityError> {
        let sequences = self.running.iter().chain(self.holds.reserved()).chain(self.waiting.iter());
        let tables = sequences.map(|sequence| &sequence.blocks[..]).chain([self.ahead.retired()]);
        self.pool.check_integrity(tables.chain(self.holds.tables()))
    }
}
