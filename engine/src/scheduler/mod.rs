//! Which tokens are computed in the next step. Plain synchronous code: sequences in, a [`Plan`] out.
//! It knows no tokens' meaning, no sampling, no time and no threads.
//!
//! ```text
//!                    admit: a place and all blocks of its tokens        end
//!   add --> waiting ------------------------------------> running ----------->
//!              ^  |      (role Decode) --> reserved --^ start_decode
//!              |  +-----------------------------------+
//!              +------------ preempt: blocks taken away, recomputed later
//! ```
//!
//! A step, in this order:
//! 1. Every sequence with one token left gets it, oldest first. One that needs a block when none is
//!    available takes the blocks of the *youngest* running sequence, at worst its own. So the oldest
//!    always advances and two sequences cannot preempt each other for ever.
//! 2. Prompts get chunks of what is left of the token budget, under way or waiting: those first that were preempted,
//!    then who has much fewer tokens left than others, then the oldest ([`share_out`]). So a short prompt passes a
//!    long one; a quarter of the budget is the oldest's whoever passes. A chunk that does not reach the end stops at a
//!    block boundary: only full blocks can be shared or pushed.
//! 3. Who waits, a prompt with a chunk or a reservation, which needs none, is admitted if there are a place
//!    (`max_running`) and blocks: those of its tokens, and one for each sequence here that may still grow, so that
//!    what was admitted can run for a while before somebody is preempted. Nobody passes one for whom there are none, so
//!    it cannot starve; nobody is preempted for it. After a preemption nothing is admitted in that step.
//!
//! Then, if somebody drafts tokens for sequences that decode, [`Scheduler::plan_drafts`] adds them to the
//! step: as far as budget and blocks go that nobody else takes. After the step their blocks return, but
//! for those that accepted tokens need. So drafts change neither who is admitted nor who is preempted.
//!
//! Where tokens are drawn on a device, the next step can be decided before this one's are known
//! ([`Scheduler::step_ahead`]): every sequence that decodes has one more. Who meets a stop was computed once in vain, and
//! its blocks return when that is over; who waits is admitted as soon as nothing is ahead.
//!
//! Blocks of a prefill's prompt are never taken away (see [`Sequence`]), and reserved ones neither:
//! their owners return them by a deadline of their own. Until then a sequence that cannot grow waits.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use baton_kv_cache::{BlockHash, BlockId};

use crate::{
    block_pool::{BlockPool, IntegrityError, PoolReport},
    claims::{Claim, share_out},
    plan::{Admission, Chunk, Plan},
    sequence::{Role, Sequence, SequenceId},
    step_time::{Pace, StepTime},
};

/// Of those who wait so many at the front are looked at in a step.
const WINDOW: usize = 16;

/// Limits of one scheduler.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerConfig {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Sequences that hold blocks at a time, reserved ones included.
    pub max_running: usize,
    /// Tokens computed in one step.
    pub token_budget: usize,
    /// Time between two tokens to aim at when prompts are computed beside sequences that decode.
    pub itl_target: Option<Duration>,
}

/// Blocks set aside for a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixBlocks {
    /// In the order of the prefix.
    pub blocks: Vec<BlockId>,
    /// Of them, so many at the front are cached: they are shared and never written.
    pub num_cached_blocks: usize,
}

/// The sequences of one engine and their blocks.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pace: Pace,
    pool: BlockPool,
    /// Oldest first.
    waiting: VecDeque<Sequence>,
    /// Oldest first.
    running: Vec<Sequence>,
    /// Blocks set aside for prompts that are computed elsewhere.
    reserved: BTreeMap<SequenceId, Sequence>,
    /// Whether a step is under way whose sequences may end before it is over; their blocks until then.
    is_ahead: bool,
    retired: Vec<BlockId>,
    /// The second owner of prefilled blocks (an empty table: its sequence still waits), and the owner of prefixes.
    holds: BTreeMap<SequenceId, Vec<BlockId>>,
}

impl Scheduler {
    /// A scheduler with all blocks free.
    pub fn new(config: SchedulerConfig) -> Scheduler {
        Scheduler {
            config,
            pace: Pace::new(config.itl_target),
            pool: BlockPool::new(config.num_blocks),
            waiting: VecDeque::new(),
            running: Vec::new(),
            reserved: BTreeMap::new(),
            is_ahead: false,
            retired: Vec::new(),
            holds: BTreeMap::new(),
        }
    }

    /// Puts a sequence into the queue. A prefill's blocks get their hold with it; see [`release`](Self::release).
    ///
    /// # Panics
    /// When it would not fit into an empty pool: it could never be admitted.
    pub fn add(&mut self, sequence: Sequence) {
        assert!(sequence.max_num_blocks() <= self.pool.num_blocks(), "{} can never fit", sequence.id);
        if sequence.role == Role::Prefill {
            self.holds.insert(sequence.id, Vec::new());
        }
        self.enqueue(sequence);
    }

    /// Decides the next step. Blocks move at once; computed tokens are counted by [`advance`](Self::advance).
    pub fn step(&mut self, plan: &mut Plan) {
        plan.clear();
        let mut budget = self.config.token_budget;
        self.plan_decodes(plan, &mut budget);
        if !plan.chunks.is_empty() {
            // A block at least, or a prompt would never be done.
            let beside = self.pace.num_tokens_beside(plan.chunks.len()).max(self.config.block_size);
            budget = budget.min(beside);
        }
        self.plan_prompts(plan, budget);
    }

    /// Decides the step after that of `plan`, which is being computed, before its tokens are known: a token more of every
    /// sequence that does not end for its length. False when the step is not to be decided yet: somebody waits who can
    /// be admitted, somebody runs who is not in `plan`, or does not decode after it, or there is no block left.
    ///
    /// `follows` is, for each chunk, the row of `plan` after which its token is drawn.
    pub fn step_ahead(&mut self, plan: &Plan, next: &mut Plan, follows: &mut Vec<usize>) -> bool {
        next.clear();
        follows.clear();
        if self.can_admit() {
            return false;
        }
        for sequence in &mut self.running {
            // In the order of ids, but for one that came back: then the step is not decided yet.
            let found = plan.chunks.binary_search_by_key(&sequence.id, |chunk| chunk.id);
            let Ok(row_idx) = found else { return false };
            let chunk = &plan.chunks[row_idx];
            if !chunk.wants_token || chunk.num_drafts > 0 || sequence.role != Role::Generate {
                return false;
            }
            if sequence.max_num_drafts() == 0 {
                continue;
            }
            let start_idx = chunk.start_idx + chunk.num_tokens;
            if sequence.blocks.len() * self.config.block_size <= start_idx {
                match self.pool.allocate() {
                    Some(block) => sequence.blocks.push(block),
                    None => return false,
                }
            }
            let id = sequence.id;
            next.chunks.push(Chunk { id, start_idx, num_tokens: 1, num_drafts: 0, wants_token: true });
            follows.push(row_idx);
        }
        !next.chunks.is_empty()
    }

    /// A step was computed, and the one after it is being computed already, or is not: blocks of sequences that end
    /// meanwhile are kept until that is over.
    pub fn computed(&mut self, is_ahead: bool) {
        self.pool.release(&self.retired);
        self.retired.clear();
        self.is_ahead = is_ahead;
    }

    /// The step of `plan` took so long, drawing included.
    pub fn observe(&mut self, plan: &Plan, elapsed: Duration) {
        if plan.num_drafts() == 0 {
            self.pace.observe(plan.num_tokens(), elapsed);
        }
    }

    /// What a step without drafts takes, once one was observed.
    pub(crate) fn step_time(&self) -> Option<StepTime> {
        self.pace.step()
    }

    /// Drafts `token` to follow a running sequence and what is drafted for it.
    pub fn push_draft(&mut self, id: SequenceId, token: u32) {
        let idx = self.running_idx(id).expect("only a running sequence is drafted for");
        self.running[idx].push_draft(token);
    }

    /// Adds drafts to the chunks of sequences that decode, cut to what is left of budget and blocks.
    pub fn plan_drafts(&mut self, plan: &mut Plan) {
        let mut budget = self.config.token_budget - plan.num_tokens();
        for chunk in &mut plan.chunks {
            let idx = self.running_idx(chunk.id).expect("planned sequences run");
            let sequence = &mut self.running[idx];
            let num_tokens = sequence.tokens().len();
            debug_assert!(sequence.draft().is_empty() || (chunk.num_tokens == 1 && chunk.wants_token));
            sequence.truncate_draft(budget.min(sequence.max_num_drafts()));
            while sequence.blocks.len() * self.config.block_size < sequence.tokens_and_draft().len() {
                match self.pool.allocate() {
                    Some(block) => sequence.blocks.push(block),
                    None => {
                        sequence.truncate_draft(sequence.blocks.len() * self.config.block_size - num_tokens);
                    }
                }
            }
            chunk.num_drafts = sequence.draft().len();
            chunk.num_tokens += chunk.num_drafts;
            budget -= chunk.num_drafts;
        }
    }

    /// Counts the plan's tokens as computed, drafts not yet; blocks that this filled enter the prefix cache. Sequences
    /// that have ended since it was planned are passed over.
    pub fn advance(&mut self, plan: &Plan) {
        for chunk in &plan.chunks {
            let Some(idx) = self.running_idx(chunk.id) else { continue };
            for (block, hash) in self.running[idx].advance(chunk.num_tokens - chunk.num_drafts) {
                self.pool.cache(block, hash);
            }
        }
    }

    /// Appends the drawn token of a running sequence. True when its draft had it: then the token's KV is
    /// computed, and the next token is to be drawn from the logits after it.
    pub fn push_token(&mut self, id: SequenceId, token: u32) -> bool {
        let idx = self.running_idx(id).expect("only a running sequence is sampled");
        let sequence = &mut self.running[idx];
        let is_accepted = sequence.push(token);
        if is_accepted {
            for (block, hash) in sequence.advance(1) {
                self.pool.cache(block, hash);
            }
        } else {
            // What only the rest of the draft needed.
            let num_blocks = sequence.blocks.len().min(sequence.num_blocks_needed());
            self.pool.release(&sequence.blocks[num_blocks..]);
            sequence.blocks.truncate(num_blocks);
        }
        is_accepted
    }

    /// Lets a reserved sequence run, its prompt being computed now and `first` the token after it.
    pub fn start_decode(&mut self, id: SequenceId, first: u32) {
        let mut sequence = self.reserved.remove(&id).expect("a reservation is used once");
        for (block, hash) in sequence.advance(sequence.num_left()) {
            self.pool.cache(block, hash);
        }
        sequence.push(first);
        sequence.role = Role::Generate; // from here on like any other, also when it is preempted
        self.run(sequence);
    }

    /// Ends a waiting or running sequence and gives up its blocks; a hold on them stays.
    pub fn end(&mut self, id: SequenceId) {
        if let Some(idx) = self.running_idx(id) {
            let sequence = self.running.remove(idx);
            if self.is_ahead {
                self.retired.extend(&sequence.blocks);
            } else {
                self.pool.release(&sequence.blocks);
            }
        } else if let Some(idx) = self.waiting.iter().position(|sequence| sequence.id == id) {
            self.waiting.remove(idx);
        }
    }

    /// Gives up what is held outside: a prefill's hold, a prefix, or a reservation, waiting or granted.
    pub fn release(&mut self, id: SequenceId) {
        if let Some(blocks) = self.holds.remove(&id) {
            self.pool.release(&blocks);
        } else if let Some(sequence) = self.reserved.remove(&id) {
            self.pool.release(&sequence.blocks);
        } else {
            self.waiting.retain(|sequence| sequence.id != id || sequence.role != Role::Decode);
        }
    }

    /// Takes hold of the cached blocks of the longest prefix of `hashes`, until [`release`](Self::release).
    pub fn hold_cached(&mut self, id: SequenceId, hashes: &[BlockHash]) -> Vec<BlockId> {
        let blocks = self.pool.find_prefix(hashes);
        self.pool.acquire(&blocks);
        self.holds.insert(id, blocks.clone());
        blocks
    }

    /// Takes hold of the cached blocks of `hashes`, and of free ones for the rest, until [`release`](Self::release).
    /// `None` when those here would have to wait for them: a prefix that is fetched is worth no preemption, and nobody's
    /// place in the queue.
    pub fn reserve_prefix(&mut self, id: SequenceId, hashes: &[BlockHash]) -> Option<PrefixBlocks> {
        let cached = self.pool.find_prefix(hashes);
        // As if nothing of theirs were cached.
        let num_awaited = self.waiting.iter().map(num_blocks_to_admit).sum::<usize>();
        if !self.is_room_for(hashes.len() + num_awaited, &cached) {
            return None;
        }
        let num_cached_blocks = cached.len();
        let mut blocks = cached;
        self.pool.acquire(&blocks);
        while blocks.len() < hashes.len() {
            blocks.push(self.pool.allocate().expect("there is room"));
        }
        self.holds.insert(id, blocks.clone());
        Some(PrefixBlocks { blocks, num_cached_blocks })
    }

    /// The blocks of a reserved prefix hold what `hashes` say: the cache has them from now on.
    pub fn cache_prefix(&mut self, id: SequenceId, hashes: &[BlockHash]) {
        let blocks = self.holds.get(&id).expect("a prefix is cached before it is released");
        for (&block, &hash) in blocks.iter().zip(hashes) {
            self.pool.cache(block, hash);
        }
    }

    /// A sequence that holds blocks.
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        match self.running_idx(id) {
            Some(idx) => Some(&self.running[idx]),
            None => self.reserved.get(&id),
        }
    }

    /// Sequences and reservations in the queue.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that hold blocks, reserved ones included.
    pub fn num_running(&self) -> usize {
        self.running.len() + self.reserved.len()
    }

    /// Prefilled prompts and prefixes whose blocks are held from outside, or will be.
    pub fn num_holds(&self) -> usize {
        self.holds.len()
    }

    /// Blocks that nobody owns.
    pub fn num_free_blocks(&self) -> usize {
        self.pool.num_available()
    }

    /// All blocks.
    pub fn num_total_blocks(&self) -> usize {
        self.pool.num_blocks()
    }

    /// The first so many blocks hold all that were ever in use.
    pub fn num_used_blocks(&self) -> usize {
        self.pool.num_used()
    }

    /// Tokens that this engine will have to compute before everything here decodes.
    pub fn num_queued_tokens(&self) -> usize {
        let waiting = self.waiting.iter().filter(|sequence| sequence.role != Role::Decode);
        let prompts = self.running.iter().filter(|sequence| sequence.num_left() > 1);
        waiting.chain(prompts).map(Sequence::num_left).sum()
    }

    /// Whether nothing waits, runs, is reserved or held.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.num_running() == 0 && self.holds.is_empty()
    }

    /// Checks the pool's books against every table here.
    ///
    /// # Errors
    /// When they disagree.
    pub fn check_integrity(&self) -> Result<PoolReport, IntegrityError> {
        let sequences = self.running.iter().chain(self.reserved.values()).chain(&self.waiting);
        let tables = sequences.map(|sequence| &sequence.blocks[..]).chain([&self.retired[..]]);
        self.pool.check_integrity(tables.chain(self.holds.values().map(|blocks| &blocks[..])))
    }

    fn plan_decodes(&mut self, plan: &mut Plan, budget: &mut usize) {
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

    /// Gives the sequence a block for its last token, if it has none; false when it had to be preempted.
    fn grow(&mut self, idx: usize, plan: &mut Plan) -> bool {
        while self.running[idx].blocks.len() < self.running[idx].num_blocks_needed() {
            if let Some(block) = self.pool.allocate() {
                self.running[idx].blocks.push(block);
                continue;
            }
            // Younger than what was planned so far: those are not preemptible or come before `idx`.
            let youngest = self.running.iter().rposition(Sequence::is_preemptible);
            let victim = youngest.expect("a sequence that grows is preemptible");
            self.preempt(victim, plan);
            if victim == idx {
                return false;
            }
        }
        true
    }

    fn preempt(&mut self, idx: usize, plan: &mut Plan) {
        let mut sequence = self.running.remove(idx);
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.num_computed = 0;
        sequence.was_preempted = true;
        plan.preempted.push(sequence.id);
        self.enqueue(sequence);
    }

    /// Gives what is left of the budget to prompts, and to those who wait a place and blocks.
    fn plan_prompts(&mut self, plan: &mut Plan, budget: usize) {
        let num_decodes = plan.chunks.len();
        let mut claims = self.claims(plan.preempted.is_empty());
        let mut spare = share_out(&mut claims, budget, self.config.block_size);
        let mut is_room = true;
        for claim in claims {
            spare += claim.share;
            if claim.is_waiting {
                // Those before it may have taken the last place or block.
                let cached = if is_room { self.find_room(claim.id) } else { None };
                is_room = cached.is_some();
                match cached {
                    Some(cached) if claim.share > 0 || claim.num_left == 0 => {
                        self.admit(claim.id, &cached, plan)
                    }
                    _ => continue,
                }
            }
            if claim.num_left > 0 && spare > 0 {
                let sequence = &self.running[self.running_idx(claim.id).expect("it runs now")];
                let num_tokens = self.chunk_len(sequence, spare);
                plan.chunks.push(Chunk::of(sequence, num_tokens));
                spare -= num_tokens;
            }
        }
        // The shares of those who were not admitted after all, and what did not reach a boundary.
        for chunk in &mut plan.chunks[num_decodes..] {
            let sequence = &self.running[self.running_idx(chunk.id).expect("it runs")];
            spare += chunk.num_tokens;
            *chunk = Chunk::of(sequence, self.chunk_len(sequence, spare));
            spare -= chunk.num_tokens;
        }
    }

    /// Who asks for a part of the step: prompts under way, and those at the front of the queue for whom there is room. Behind
    /// one for whom there is none nobody is admitted: it would wait for ever. Oldest first.
    fn claims(&self, may_admit: bool) -> Vec<Claim> {
        let prompts = self.running.iter().filter(|sequence| sequence.num_left() > 1);
        let mut claims: Vec<Claim> = prompts.map(Claim::running).collect();
        if may_admit && self.num_running() < self.config.max_running {
            for sequence in self.waiting.iter().take(WINDOW) {
                let cached = self.pool.find_prefix(sequence.sharable_hashes());
                if !self.has_room_for(sequence, &cached) {
                    break;
                }
                claims.push(Claim::waiting(sequence, cached.len() * self.config.block_size));
            }
            claims.sort_by_key(|claim| claim.id);
        }
        claims
    }

    /// The cached blocks of one that waits, if there are a place and blocks for it.
    fn find_room(&self, id: SequenceId) -> Option<Vec<BlockId>> {
        let sequence = &self.waiting[self.waiting_idx(id).expect("it waits")];
        let cached = self.pool.find_prefix(sequence.sharable_hashes());
        let is_room = self.num_running() < self.config.max_running && self.has_room_for(sequence, &cached);
        is_room.then_some(cached)
    }

    /// Gives one that waits the place and the blocks that were found.
    fn admit(&mut self, id: SequenceId, cached: &[BlockId], plan: &mut Plan) {
        let idx = self.waiting_idx(id).expect("it waits");
        let mut sequence = self.waiting.remove(idx).expect("it was found");
        self.furnish(&mut sequence, cached);
        plan.admitted.push(Admission {
            id,
            num_cached_blocks: cached.len(),
            is_first: sequence.num_cached_tokens.is_none(),
        });
        sequence.num_cached_tokens.get_or_insert(cached.len() * self.config.block_size);
        if sequence.role == Role::Decode {
            self.reserved.insert(id, sequence);
        } else {
            self.run(sequence);
        }
    }

    /// Tokens of the next chunk: all that are left, or up to the last block boundary within the
    /// budget, or, when the budget reaches none, the budget.
    fn chunk_len(&self, sequence: &Sequence, budget: usize) -> usize {
        if sequence.num_left() <= budget {
            return sequence.num_left();
        }
        let end = sequence.num_computed + budget;
        let aligned = end - end % self.config.block_size;
        if aligned > sequence.num_computed { aligned - sequence.num_computed } else { budget }
    }

    /// Whether the head of the queue could be admitted now.
    fn can_admit(&self) -> bool {
        self.num_running() < self.config.max_running
            && self
                .waiting
                .front()
                .is_some_and(|head| self.has_room_for(head, &self.pool.find_prefix(head.sharable_hashes())))
    }

    fn has_room_for(&self, sequence: &Sequence, cached: &[BlockId]) -> bool {
        self.is_room_for(num_blocks_to_admit(sequence), cached)
    }

    /// Whether there are `num_blocks` blocks, of which `cached` are cached, and one for each sequence here that may
    /// still grow.
    fn is_room_for(&self, num_blocks: usize, cached: &[BlockId]) -> bool {
        let num_revived = cached.iter().filter(|&&block| self.pool.is_unowned(block)).count();
        let present = self.running.iter().chain(self.reserved.values());
        let num_growing = present.filter(|other| other.can_grow_beyond(other.blocks.len())).count();
        num_blocks - cached.len() + num_revived + num_growing <= self.pool.num_available()
    }

    /// Gives the sequence all blocks that its tokens need.
    fn furnish(&mut self, sequence: &mut Sequence, cached: &[BlockId]) {
        self.pool.acquire(cached);
        sequence.blocks.extend_from_slice(cached);
        while sequence.blocks.len() < sequence.num_blocks_needed() {
            sequence.blocks.push(self.pool.allocate().expect("there is room"));
        }
        if sequence.role != Role::Decode {
            sequence.num_computed = cached.len() * self.config.block_size;
        }
        if let Some(hold) = self.holds.get_mut(&sequence.id) {
            hold.extend_from_slice(&sequence.blocks);
            self.pool.acquire(&sequence.blocks);
        }
    }

    fn enqueue(&mut self, sequence: Sequence) {
        let idx = self.waiting.partition_point(|other| other.id < sequence.id);
        self.waiting.insert(idx, sequence);
    }

    fn run(&mut self, sequence: Sequence) {
        let idx = self.running.partition_point(|other| other.id < sequence.id);
        self.running.insert(idx, sequence);
    }

    fn waiting_idx(&self, id: SequenceId) -> Option<usize> {
        self.waiting.binary_search_by_key(&id, |sequence| sequence.id).ok()
    }

    fn running_idx(&self, id: SequenceId) -> Option<usize> {
        self.running.binary_search_by_key(&id, |sequence| sequence.id).ok()
    }
}

/// Blocks that there must be for a sequence that waits: those of its tokens, and one if it may grow.
fn num_blocks_to_admit(sequence: &Sequence) -> usize {
    let num_blocks = sequence.num_blocks_needed();
    num_blocks + usize::from(sequence.can_grow_beyond(num_blocks))
}
