//! Which tokens are computed in the next step. Plain synchronous code: sequences in, a [`StepPlan`] out.
//! It does not know the meaning of tokens, sampling, clocks or threads.
//!
//! ```text
//!                    admit: a slot and all blocks of its tokens         end
//!   add --> waiting ------------------------------------> running ----------->
//!              ^  |      (role Decode) --> reserved --^ start_decode
//!              |  +-----------------------------------+
//!              +------------ preempt: blocks taken away, recomputed or recalled later
//! ```
//!
//! A step, in this order:
//! 1. Every sequence with one token left gets it, oldest first. A sequence that needs a block when none is available
//!    takes the blocks of the *youngest* running sequence, at worst its own. So the oldest sequence always advances,
//!    and two sequences cannot preempt each other for ever.
//! 2. Prompts get chunks of the remaining token budget, whether they run or wait ([`budget`]). Preempted prompts come
//!    first, then prompts with far fewer tokens left, then the oldest. The oldest always gets a quarter of the budget.
//!    A chunk that does not reach the end of its prompt stops at a block boundary: only full blocks can be shared or
//!    pushed. The head of a blended prompt is one chunk of any length.
//! 3. A waiting sequence is admitted if it has a chunk, or is a reservation, which computes nothing here, and if there
//!    are a slot (`max_running`) and enough blocks: those of its tokens, and one for each present sequence that may
//!    still grow. So admitted sequences run for a while before one is preempted. No sequence passes one that lacks
//!    blocks, so none starves. Admission preempts nothing, and a step with a preemption admits nothing.
//!
//! Where the tokens of a prompt are scored, each has a row of logits, of which a step has few. Prompts share these as they
//! share tokens, and such a prompt takes no more tokens than it gets rows for.
//!
//! Then [`Scheduler::plan_drafts`] may add drafted tokens, as far as budget and blocks are left over. Blocks that only
//! rejected drafts needed return after the step. So drafts change neither admission nor preemption.
//!
//! An executor that samples on its device can compute the next step before this one's tokens are known
//! ([`Scheduler::step_ahead`]). A sequence that meets a stop meanwhile was computed in vain, and its blocks return when
//! that step is over. Waiting sequences are admitted as soon as no step is ahead.
//!
//! All of this goes by the ids of sequences: "older" means a lower priority number, and among equal ones an earlier
//! arrival. So a sequence waits for as long as others of lower numbers take the slots, blocks or tokens, and loses its
//! blocks to them. A newcomer takes no block of a running sequence, whatever their priorities.
//!
//! A running prompt adopts blocks that the prefix cache gets from outside meanwhile ([`Scheduler::cache_prefix`]), wherever they are in it. Its
//! chunks end where such blocks begin, or are [expected](Scheduler::expect), and the next step goes on behind them.
//!
//! With [`Scheduler::recall_preempted`] a preempted sequence that lost full blocks is admitted as a reservation. Its owner loads
//! what it has of them and calls [`Scheduler::resume`]. The scheduler does not know where they come from.
//!
//! Blocks of a prefill's prompt are never taken away (see [`Sequence`]), and reserved blocks neither: their owners
//! return them by a deadline of their own. Until then a sequence that cannot grow waits. A reservation that will not decode
//! [gives up its slot](Scheduler::give_up_slot) before its blocks return: a writer may keep these for long.

mod adopt;
mod ahead;
mod budget;
mod drafts;
mod holds;
mod queries;
mod sequence_list;

use std::{collections::BTreeMap, time::Duration};

use baton_cost::{StepCalibration, StepLine};
use baton_kv_cache::{BlockHash, BlockId};
use baton_kv_events::CacheEvent;

use crate::{
    block_pool::BlockPool,
    plan::{Admission, Chunk, StepPlan},
    sequence::{Sequence, SequenceId, SequenceRole},
    step_time::{PrefillBudget, StepTime},
};
use ahead::StepAhead;
use budget::{BudgetClaim, StepShare, share_budget};
use holds::Holds;
use sequence_list::SequenceList;

pub use holds::PrefixBlocks;

/// So many sequences at the front of the queue are considered in a step, and more while these leave some of it over.
const WINDOW: usize = 16;

/// Tokens after a head that are computed with it at most. A step of their own would read all weights once more.
pub const MAX_REST: usize = 256;

/// Limits of one scheduler.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerConfig {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Sequences that hold blocks at a time, reservations included.
    pub max_running: usize,
    /// Tokens computed in one step.
    pub token_budget: usize,
    /// Target time between two tokens of a sequence while prompts are computed beside it.
    pub itl_target: Option<Duration>,
}

/// The sequences of one engine and their blocks.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    prefill_budget: PrefillBudget,
    /// What a step takes, for routers.
    calibration: StepCalibration,
    pool: BlockPool,
    waiting: SequenceList,
    running: SequenceList,
    holds: Holds,
    ahead: StepAhead,
    recalls_preempted: bool,
    /// Whether the prefix cache got blocks from outside since the last step.
    has_new_prefix: bool,
    /// Blocks that are on their way: the index and the hash of the first one.
    expected: BTreeMap<SequenceId, (usize, BlockHash)>,
}

impl Scheduler {
    /// A scheduler with all blocks free.
    pub fn new(config: SchedulerConfig) -> Scheduler {
        Scheduler {
            config,
            prefill_budget: PrefillBudget::new(config.itl_target),
            calibration: StepCalibration::new(None),
            pool: BlockPool::new(config.num_blocks),
            waiting: SequenceList::default(),
            running: SequenceList::default(),
            holds: Holds::default(),
            ahead: StepAhead::default(),
            recalls_preempted: false,
            has_new_prefix: false,
            expected: BTreeMap::new(),
        }
    }

    /// The same, with what a step takes before any was measured.
    #[must_use]
    pub fn with_step_prior(mut self, prior: Option<StepLine>) -> Scheduler {
        self.calibration = StepCalibration::new(prior);
        self
    }

    /// The same, and it keeps what its prefix cache stores and evicts, for [`take_cache_events`](Self::take_cache_events).
    #[must_use]
    pub fn with_cache_events(mut self) -> Scheduler {
        self.pool.record_events();
        self
    }

    /// From now on, a preempted sequence waits for [`resume`](Self::resume) when it gets blocks again and lacks full ones.
    pub fn recall_preempted(&mut self) {
        self.recalls_preempted = true;
    }

    /// What the prefix cache has stored and evicted since the last call.
    pub fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.pool.take_events()
    }

    /// The time since any fixed moment: blocks are [kept](Sequence::with_retention) for so long.
    /// Invariant 12: the scheduler reads no clock.
    pub fn set_time(&mut self, now: Duration) {
        self.pool.set_time(now);
    }

    /// Puts a sequence into the queue. A prefill's blocks get their hold with it; see [`release`](Self::release).
    ///
    /// # Panics
    /// When the sequence would not fit into an empty pool: it could never be admitted.
    pub fn add(&mut self, sequence: Sequence) {
        assert!(sequence.max_num_blocks() <= self.pool.num_blocks(), "{} can never fit", sequence.id);
        if sequence.role == SequenceRole::Prefill {
            self.holds.register(sequence.id);
        }
        self.queue(sequence);
    }

    /// Decides the next step. Blocks move at once; [`advance`](Self::advance) counts the computed tokens.
    pub fn step(&mut self, plan: &mut StepPlan) {
        plan.clear();
        let is_new = std::mem::take(&mut self.has_new_prefix);
        adopt::plan(&mut self.running, &mut self.holds, &mut self.pool, is_new, plan);
        let mut budget = self.config.token_budget;
        self.plan_decodes(plan, &mut budget);
        if !plan.chunks.is_empty() {
            // At least a block, or a prompt would never finish.
            let beside = self.prefill_budget.num_tokens_beside(plan.chunks.len());
            budget = budget.min(beside.max(self.config.block_size));
        }
        self.plan_prompts(plan, budget);
    }

    /// Decides the step after that of `plan`, which is being computed, before its tokens are known: one more token of
    /// every sequence that its length does not end. False when the step cannot be decided yet: a waiting sequence can
    /// be admitted, a running sequence is not in `plan` or does not decode after it, or no block is left.
    ///
    /// `follows` is, for each chunk, the row of `plan` after which its token is sampled.
    pub fn step_ahead(&mut self, plan: &StepPlan, next: &mut StepPlan, follows: &mut Vec<usize>) -> bool {
        next.clear();
        follows.clear();
        !self.can_admit()
            && ahead::plan(&mut self.running, &mut self.pool, self.config.block_size, plan, next, follows)
    }

    /// A step was computed. `is_ahead` says whether the step after it is already being computed. If so, blocks of
    /// sequences that end meanwhile are kept until that step is over.
    pub fn computed(&mut self, is_ahead: bool) {
        self.ahead.computed(is_ahead, &mut self.pool);
    }

    /// The step of `plan` took `elapsed`, sampling included. For `waited` of it the engine's thread had no processor: sequences
    /// waited as well, but another plan would take that time from other steps.
    /// Invariant 12: the duration is an argument.
    pub fn observe(&mut self, plan: &StepPlan, elapsed: Duration, waited: Duration) {
        self.calibration.observe(&plan.work(), elapsed.saturating_sub(waited).as_secs_f64());
        if plan.num_drafts() == 0 {
            self.prefill_budget.observe(plan.num_tokens(), elapsed);
        }
    }

    /// What a step without drafts takes; `None` before the first measured step.
    pub fn step_time(&self) -> Option<StepTime> {
        self.prefill_budget.step()
    }

    /// Appends `token` to the draft of a running sequence.
    pub fn push_draft(&mut self, id: SequenceId, token: u32) {
        self.running.get_mut(id).expect("a sequence with a draft runs").push_draft(token);
    }

    /// Cuts the draft of a running sequence to its first `num_drafts` tokens.
    pub fn truncate_draft(&mut self, id: SequenceId, num_drafts: usize) {
        self.running.get_mut(id).expect("a sequence with a draft runs").truncate_draft(num_drafts);
    }

    /// Adds drafts to the chunks of sequences that decode, as far as budget and blocks are left.
    pub fn plan_drafts(&mut self, plan: &mut StepPlan) {
        // A head may have exceeded it.
        let budget = self.config.token_budget.saturating_sub(plan.num_tokens());
        drafts::plan(&mut self.running, &mut self.pool, self.config.block_size, budget, plan);
    }

    /// Counts the plan's tokens as computed, drafts not yet. Blocks that this fills enter the prefix cache. Sequences
    /// that ended since the plan was made are skipped.
    pub fn advance(&mut self, plan: &StepPlan) {
        for chunk in &plan.chunks {
            let Some(sequence) = self.running.get_mut(chunk.id) else { continue };
            let (before, filled) = sequence.advance(chunk.num_tokens - chunk.num_drafts);
            self.pool.cache_all(before, filled);
        }
    }

    /// Appends the sampled token of a running sequence. True when its draft had that token: then the token's KV is
    /// computed, and the next token is sampled from the logits after it.
    pub fn push_token(&mut self, id: SequenceId, token: u32) -> bool {
        let sequence = self.running.get_mut(id).expect("a sampled sequence runs");
        drafts::push_token(sequence, token, &mut self.pool)
    }

    /// Moves a reservation to the running sequences. Its prompt is computed now, and `first` is the token after it.
    pub fn start_decode(&mut self, id: SequenceId, first: u32) {
        let mut sequence = self.holds.take_reserved(id).expect("a reservation is used once");
        let (before, filled) = sequence.advance(sequence.num_left());
        self.pool.cache_all(before, filled);
        sequence.push(first);
        sequence.role = SequenceRole::Generate; // from here on like any other, also when it is preempted
        self.running.insert(sequence);
    }

    /// Lets a sequence run whose admission was [recalled](Admission::is_recalled). Its first `num_blocks` blocks hold their KV now,
    /// the cached ones included, and the rest is computed. Nothing runs if it ended meanwhile.
    pub fn resume(&mut self, id: SequenceId, num_blocks: usize) {
        if let Some(mut sequence) = self.holds.take_reserved(id) {
            let (before, filled) =
                sequence.advance(num_blocks * self.config.block_size - sequence.num_computed);
            self.pool.cache_all(before, filled);
            self.running.insert(sequence);
        }
        self.holds.release(id, &mut self.pool);
    }

    /// Ends a sequence that waits, runs or is recalled, and gives up its blocks. A hold on them stays.
    pub fn end(&mut self, id: SequenceId) {
        if let Some(sequence) = self.running.take(id) {
            self.pool.mark(sequence.keeps());
            self.ahead.retire(&sequence.blocks, &mut self.pool);
        } else if let Some(sequence) = self.holds.take_reserved(id) {
            self.pool.mark(sequence.keeps());
            self.pool.release(&sequence.blocks);
        } else {
            self.waiting.take(id);
        }
    }

    /// The KV of a running sequence is not to be used by others: not even what it found in the cache. Returns the hashes under which
    /// it may be kept elsewhere.
    pub fn forget(&mut self, id: SequenceId) -> Vec<BlockHash> {
        let Some(sequence) = self.running.get(id) else { return Vec::new() };
        self.pool.forget(&sequence.blocks);
        sequence.hashes().to_vec()
    }

    /// The blocks of a sequence from `block_idx` on, the first of which has this hash, are on their way, until
    /// [`release`](Self::release): a chunk ends before them.
    pub fn expect(&mut self, id: SequenceId, block_idx: usize, hash: BlockHash) {
        self.expected.insert(id, (block_idx, hash));
    }

    /// A granted reservation will not decode: it takes no slot and grows no more. Its blocks stay held until
    /// [`release`](Self::release). False when there is none of this id.
    pub fn give_up_slot(&mut self, id: SequenceId) -> bool {
        self.holds.give_up_slot(id)
    }

    /// Gives up what is held outside: a prefill's hold, a prefix, or a reservation, waiting or granted. Or blocks are not expected
    /// any more.
    pub fn release(&mut self, id: SequenceId) {
        if self.expected.remove(&id).is_some() {
            return;
        }
        if !self.holds.release(id, &mut self.pool)
            && self.waiting.get(id).is_some_and(|sequence| sequence.role == SequenceRole::Decode)
        {
            self.waiting.take(id);
        }
    }

    /// Holds the cached blocks of the longest prefix of `hashes`, until [`release`](Self::release).
    pub fn hold_cached(&mut self, id: SequenceId, hashes: &[BlockHash]) -> Vec<BlockId> {
        self.holds.hold_cached(id, hashes, &mut self.pool)
    }

    /// Holds the cached blocks at the front of `hashes`, and free ones for the rest, until [`release`](Self::release). The hashes
    /// are a sequence's in order, from any of its blocks on. It gets as many as there is room for without making sequences here wait:
    /// fetching a prefix is worth no preemption and delays no waiting sequence. `None` when these are fewer than `least`.
    pub fn reserve_prefix(
        &mut self,
        id: SequenceId,
        hashes: &[BlockHash],
        least: usize,
    ) -> Option<PrefixBlocks> {
        let cached = self.pool.find_prefix(hashes);
        let num_free = self.num_free_beside(&cached)?.checked_sub(self.num_queued_blocks())?;
        let num_blocks = hashes.len().min(cached.len() + num_free);
        (num_blocks >= least).then(|| self.holds.reserve_prefix(id, cached, num_blocks, &mut self.pool))
    }

    /// Enters blocks of a reserved prefix, from its block `first` on, into the prefix cache: they now hold the KV that `hashes` name.
    /// `after` is the hash of the block before them.
    pub fn cache_prefix(
        &mut self,
        id: SequenceId,
        first: usize,
        after: Option<BlockHash>,
        hashes: &[BlockHash],
    ) {
        self.holds.cache_prefix(id, first, after, hashes, &mut self.pool);
        self.has_new_prefix = true;
    }

    fn plan_decodes(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        let mut idx = 0;
        while idx < self.running.len() && *budget > 0 {
            if self.running[idx].num_left() != 1 {
                idx += 1;
            } else if self.grow(idx, plan) {
                plan.chunks.push(Chunk::of(&self.running[idx], 1));
                *budget -= 1;
                idx += 1;
            } // else it preempted itself, and `idx` is the next one
        }
    }

    /// Gives the sequence a block for its last token, if it has none. False when the sequence was preempted.
    fn grow(&mut self, idx: usize, plan: &mut StepPlan) -> bool {
        while self.running[idx].blocks.len() < self.running[idx].num_blocks_needed() {
            if let Some(block) = self.pool.allocate() {
                self.running[idx].blocks.push(block);
                continue;
            }
            // Not planned yet: planned sequences are not preemptible or come before `idx`.
            let youngest = self.running.youngest(Sequence::is_preemptible);
            let victim = youngest.expect("a sequence that grows is preemptible");
            self.preempt(victim, plan);
            if victim == idx {
                return false;
            }
        }
        true
    }

    fn preempt(&mut self, idx: usize, plan: &mut StepPlan) {
        let mut sequence = self.running.remove(idx);
        self.pool.mark(sequence.keeps());
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.num_computed = 0;
        sequence.has_adopted = false;
        sequence.was_preempted = true;
        plan.preempted.push(sequence.id);
        // It has none of what it adopted in this step.
        plan.adopted.retain(|adoption| adoption.id != sequence.id);
        self.queue(sequence);
    }

    /// Puts a sequence into the queue, with an estimate of what it need not compute: the cache may change while it waits.
    fn queue(&mut self, mut sequence: Sequence) {
        let num_tokens = self.num_cached(sequence.sharable_hashes()) * self.config.block_size;
        sequence.num_cached_in_queue = if sequence.can_begin_after(num_tokens) { num_tokens } else { 0 };
        self.waiting.insert(sequence);
    }

    /// Gives the remaining budget to prompts, and a slot and blocks to waiting sequences.
    fn plan_prompts(&mut self, plan: &mut StepPlan, budget: usize) {
        let num_decodes = plan.chunks.len();
        let mut claims = self.claims(budget, plan.preempted.is_empty());
        let mut spare = share_budget(&mut claims, StepShare::whole(budget), self.config.block_size);
        let mut is_room = true;
        for claim in claims {
            spare = spare.plus(claim.share);
            if claim.is_waiting {
                // Sequences before this one may have taken the last slot or block.
                let cached = if is_room { self.find_room(claim.id) } else { None };
                is_room = cached.is_some();
                match cached {
                    Some(cached) if claim.share.num_tokens > 0 || claim.num_left == 0 => {
                        self.admit(claim.id, &cached, plan)
                    }
                    _ => continue,
                }
            }
            if claim.num_left > 0 && spare.num_tokens > 0 {
                // What is recalled computes nothing yet.
                let Some(sequence) = self.running.get(claim.id) else { continue };
                let num_tokens = self.chunk_len(sequence, spare);
                // None, if all that the step can score is taken.
                if num_tokens > 0 {
                    let chunk = Chunk::of(sequence, num_tokens);
                    spare = spare.minus(StepShare::of(&chunk));
                    plan.chunks.push(chunk);
                }
            }
        }
        // The shares of sequences that were not admitted after all, and what did not reach a block boundary.
        for chunk in &mut plan.chunks[num_decodes..] {
            let sequence = self.running.get(chunk.id).expect("the sequence runs");
            spare = spare.plus(StepShare::of(chunk));
            *chunk = Chunk::of(sequence, self.chunk_len(sequence, spare));
            spare = spare.minus(StepShare::of(chunk));
        }
    }

    /// The claims on the step's budget, oldest first: running prompts, and sequences at the front of the queue for
    /// which there is room. The first one without room ends the list: to pass it could make it wait for ever.
    fn claims(&self, budget: usize, may_admit: bool) -> Vec<BudgetClaim> {
        let prompts = self.running.iter().filter(|sequence| sequence.num_left() > 1);
        let mut claims: Vec<BudgetClaim> = prompts.map(BudgetClaim::running).collect();
        let num_slots = self.config.max_running.saturating_sub(self.num_running());
        if may_admit && num_slots > 0 {
            let without = |left: StepShare, claim: &BudgetClaim| left.minus(claim.part_of(left));
            let mut unclaimed = claims.iter().fold(StepShare::whole(budget), without);
            for (idx, sequence) in self.waiting.iter().take(num_slots.max(WINDOW)).enumerate() {
                if idx >= WINDOW && unclaimed.num_tokens == 0 {
                    break;
                }
                let cached = self.find_cached(sequence);
                if !self.has_room_for(sequence, &cached) {
                    break;
                }
                let claim = BudgetClaim::waiting(sequence, cached.len() * self.config.block_size);
                unclaimed = without(unclaimed, &claim);
                claims.push(claim);
            }
            claims.sort_by_key(|claim| claim.id);
        }
        claims
    }

    /// The cached blocks that a waiting sequence begins with.
    fn find_cached(&self, sequence: &Sequence) -> Vec<BlockId> {
        let cached = self.pool.find_prefix(sequence.sharable_hashes());
        if sequence.can_begin_after(cached.len() * self.config.block_size) { cached } else { Vec::new() }
    }

    /// The cached blocks of a waiting sequence, if there are a slot and blocks for it.
    fn find_room(&self, id: SequenceId) -> Option<Vec<BlockId>> {
        let sequence = self.waiting.get(id).expect("the sequence waits");
        let cached = self.find_cached(sequence);
        let is_room = self.num_running() < self.config.max_running && self.has_room_for(sequence, &cached);
        is_room.then_some(cached)
    }

    /// Gives a waiting sequence a slot and all blocks that its tokens need, of which `cached` were found.
    fn admit(&mut self, id: SequenceId, cached: &[BlockId], plan: &mut StepPlan) {
        let mut sequence = self.waiting.take(id).expect("the sequence waits");
        let num_cached_tokens = cached.len() * self.config.block_size;
        self.pool.acquire(cached);
        sequence.blocks.extend_from_slice(cached);
        while sequence.blocks.len() < sequence.num_blocks_needed() {
            sequence.blocks.push(self.pool.allocate().expect("there is room"));
        }
        let is_first = sequence.num_cached_tokens.is_none();
        let is_recalled = self.recalls_preempted
            && sequence.was_preempted
            && sequence.can_begin_after(num_cached_tokens)
            && cached.len() < sequence.sharable_hashes().len();
        plan.admitted.push(Admission { id, num_cached_blocks: cached.len(), is_first, is_recalled });
        sequence.num_cached_tokens.get_or_insert(num_cached_tokens);
        if is_recalled {
            // Invariant 3: they stay until the writer is done, also when the sequence ends meanwhile.
            self.holds.register(id);
        }
        self.holds.extend(&sequence, &mut self.pool);
        if sequence.role == SequenceRole::Decode {
            self.holds.reserve(sequence);
            return;
        }
        sequence.num_computed = num_cached_tokens;
        if is_recalled {
            // Its blocks are written: none of them may be one of the cache.
            self.holds.reserve(sequence);
            return;
        }
        if sequence.num_head_left() == 0 {
            adopt::adopt(&mut sequence, &mut self.holds, &mut self.pool);
        }
        self.running.insert(sequence);
    }

    /// Tokens of the next chunk: all that are left; else up to the last block boundary within the budget; else, when
    /// the budget reaches no boundary, the budget. That is what `spare` is enough for; 0 if no token can be scored. The chunk
    /// ends before blocks that were adopted or are expected. A head is never cut, even if it exceeds the budget, and a short
    /// rest goes with it.
    fn chunk_len(&self, sequence: &Sequence, spare: StepShare) -> usize {
        if sequence.num_head_left() > 0 {
            let rest = sequence.num_left() - sequence.num_head_left();
            return sequence.num_head_left() + if rest <= MAX_REST { rest } else { 0 };
        }
        let expected = adopt::num_before_expected(sequence, self.expected.values());
        let adopted = adopt::num_before_adopted(sequence, &self.pool);
        let budget = spare.max_tokens(sequence.scored_ahead()).min(expected).min(adopted);
        if sequence.num_left() <= budget {
            return sequence.num_left();
        }
        let end = sequence.num_computed + budget;
        let aligned = end - end % self.config.block_size;
        if aligned > sequence.num_computed { aligned - sequence.num_computed } else { budget }
    }

    /// Whether the head of the queue could be admitted now.
    fn can_admit(&self) -> bool {
        let fits = |first: &Sequence| self.has_room_for(first, &self.find_cached(first));
        self.num_running() < self.config.max_running && self.waiting.iter().next().is_some_and(fits)
    }

    fn has_room_for(&self, sequence: &Sequence, cached: &[BlockId]) -> bool {
        self.is_room_for(sequence.num_blocks_to_admit(), cached)
    }

    /// Whether there are `num_blocks` blocks, of which `cached` are cached, and one for each present sequence that may
    /// still grow.
    fn is_room_for(&self, num_blocks: usize, cached: &[BlockId]) -> bool {
        self.num_free_beside(cached).is_some_and(|num_free| num_blocks - cached.len() <= num_free)
    }

    /// Blocks that are available when `cached` ones have an owner, and each present sequence that may still grow has one more. `None`:
    /// there are not enough for that.
    fn num_free_beside(&self, cached: &[BlockId]) -> Option<usize> {
        let num_revived = cached.iter().filter(|&&block| self.pool.is_unowned(block)).count();
        let present = self.running.iter().chain(self.holds.reserved());
        let num_growing = present.filter(|other| other.can_grow_beyond(other.blocks.len())).count();
        self.pool.num_available().checked_sub(num_revived + num_growing)
    }
}
