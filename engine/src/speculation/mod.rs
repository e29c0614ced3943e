//! Speculative decoding: a drafter proposes tokens, one step of the target verifies them.
//!
//! ```text
//! plan -> how many for each sequence (policy) -> drafter proposes -> plan_drafts -> execute -> draw, accept
//! ```
//!
//! What is drawn never depends on a draft. Each position is drawn from the target's own logits with the
//! request's own parameters and the random number of its output index, and a drafted token is accepted
//! when it equals what was drawn. A token that is proposed for certain, as by look-up, is so accepted as often
//! as by rejection sampling (Leviathan et al. 2023), with probability `p(token)`; and besides the distribution
//! the very tokens are kept, so that a seed means the same with and without a drafter. A draft model draws with
//! the same random number: it proposes what the target draws wherever both put that number on one token.
//!
//! - [`policy`]: how many tokens to draft, from what was accepted and what it costs;
//! - `cost`: what it costs, from what steps took;
//! - [`ngram`]: proposes what followed the same few tokens before;
//! - `draft_model`: has a smaller model propose, over KV blocks of its own.

mod cost;
mod draft_model;
pub mod ngram;
pub mod policy;

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use baton_kv_cache::BlockStorage;
use baton_model_spec::Executor;

use crate::{
    config::{EngineConfig, StartError},
    events::EngineError,
    live::LiveRequests,
    plan::Plan,
    sequence::SequenceId,
    step_time::StepTime,
};
use cost::Costs;
use draft_model::DraftModel;

/// How an engine speculates.
#[derive(Debug)]
pub struct Speculation {
    /// Who proposes tokens.
    pub drafter: Drafter,
    /// Tokens that are drafted for a sequence in one step at most.
    pub max_draft_tokens: usize,
    /// Drafts are added to a step as long as it has fewer tokens than this: in a larger one arithmetic is
    /// the limit, and verifying a token costs as much as decoding one.
    pub max_step_tokens: usize,
}

/// Who proposes tokens.
pub enum Drafter {
    /// What followed the same few tokens earlier in the sequence.
    Ngram,
    /// A smaller model with the target's vocabulary, over as many blocks as the target has.
    Model {
        /// Computes it, on blocks of the target's size.
        executor: Box<dyn Executor>,
        /// Its blocks, where they are not in the host's memory: as many as the target has.
        storage: Option<BlockStorage>,
        /// What a step of it costs until that is measured, in steps of the target.
        cost: f64,
    },
}

/// Drafted tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Proposed, and verified by the target.
    pub drafted: u64,
    /// Of those, equal to what was drawn.
    pub accepted: u64,
}

/// [`DraftCounts`] of everything since the start.
#[derive(Debug, Default)]
pub(crate) struct DraftCounters {
    drafted: AtomicU64,
    accepted: AtomicU64,
}

/// Drafts for the sequences of a plan.
pub(crate) struct Speculator {
    proposer: Proposer,
    costs: Costs,
    clock: fn() -> Instant,
    max_draft_tokens: usize,
    max_step_tokens: usize,
    /// For whom to draft in this step; reused.
    ids: Vec<SequenceId>,
    /// How many tokens.
    lengths: Vec<usize>,
    /// By lookup, for one of them.
    proposed: Vec<u32>,
}

enum Proposer {
    Ngram,
    Model(Box<DraftModel>),
}

impl fmt::Debug for Drafter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Drafter {
    /// "ngram" or "draft".
    pub fn name(&self) -> &'static str {
        match self {
            Drafter::Ngram => "ngram",
            Drafter::Model { .. } => "draft",
        }
    }
}

impl DraftCounters {
    pub(crate) fn add(&self, counts: DraftCounts) {
        self.drafted.fetch_add(counts.drafted, Ordering::Relaxed);
        self.accepted.fetch_add(counts.accepted, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> DraftCounts {
        // The accepted first: they are never more than the drafted.
        let accepted = self.accepted.load(Ordering::Acquire);
        DraftCounts { drafted: self.drafted.load(Ordering::Acquire), accepted }
    }
}

impl Speculator {
    /// For a target of `vocab_size` on blocks of `block_size`.
    pub(crate) fn new(
        speculation: Speculation,
        config: &EngineConfig,
        vocab_size: usize,
        block_size: usize,
    ) -> Result<Speculator, StartError> {
        let Speculation { drafter, max_draft_tokens, max_step_tokens } = speculation;
        let (proposer, draft_guess) = match drafter {
            Drafter::Ngram => (Proposer::Ngram, 0.0),
            Drafter::Model { executor, storage, cost } => {
                let model = DraftModel::new(executor, storage, config, vocab_size, block_size)?;
                (Proposer::Model(Box::new(model)), cost)
            }
        };
        Ok(Speculator {
            proposer,
            costs: Costs::new(draft_guess),
            clock: config.clock,
            max_draft_tokens,
            max_step_tokens,
            ids: Vec::new(),
            lengths: Vec::new(),
            proposed: Vec::new(),
        })
    }

    /// See [`Executor::attach_thread`].
    pub(crate) fn attach_thread(&mut self) -> Result<(), EngineError> {
        match &mut self.proposer {
            Proposer::Ngram => Ok(()),
            Proposer::Model(model) => model.attach_thread(),
        }
    }

    /// Drafts for the plan's sequences that decode, as far as it pays, and adds the drafts to the plan.
    pub(crate) fn draft(&mut self, plan: &mut Plan, live: &mut LiveRequests) -> Result<(), EngineError> {
        self.decide_lengths(plan, live);
        let wanted = self.ids.iter().copied().zip(self.lengths.iter().copied());
        let wanted = wanted.filter(|&(_, num_tokens)| num_tokens > 0);
        match &mut self.proposer {
            Proposer::Ngram => {
                for (id, num_tokens) in wanted {
                    let sequence = live.scheduler.sequence(id).expect("planned sequences run");
                    self.proposed.clear();
                    self.proposed.extend(ngram::propose(sequence.tokens()).take(num_tokens));
                    self.proposed.iter().for_each(|&token| live.scheduler.push_draft(id, token));
                }
            }
            Proposer::Model(model) => model.draft(wanted, live, &mut self.costs, self.clock)?,
        }
        live.scheduler.plan_drafts(plan);
        Ok(())
    }

    /// Whether nobody is drafted for in the step of `plan`, of which the tokens are not known yet, whatever these are. Then
    /// that is decided.
    pub(crate) fn rests(&mut self, plan: &Plan, live: &mut LiveRequests) -> bool {
        if self.budget(plan) > 0 {
            let (num_sequences, cost, overhead) = self.price(plan, live);
            debug_assert_eq!(num_sequences, plan.chunks.len(), "all decode");
            let max = self.max_draft_tokens;
            let rests = |id| {
                !live.may_draft(id)
                    || live.draft_rests(id, max, cost, overhead)
                    || self.finds_nothing_behind(id, live)
            };
            if !plan.chunks.iter().all(|chunk| rests(chunk.id)) {
                return false;
            }
        }
        self.decide_lengths(plan, live);
        let mut lengths = self.ids.iter().zip(&self.lengths);
        debug_assert!(lengths.all(|(&id, &length)| length == 0 || self.finds_nothing_behind(id, live)));
        true
    }

    /// Whether nothing can be proposed after the next token of a sequence, whichever it is.
    fn finds_nothing_behind(&self, id: SequenceId, live: &LiveRequests) -> bool {
        let sequence = live.scheduler.sequence(id).expect("planned sequences run");
        matches!(self.proposer, Proposer::Ngram) && !ngram::may_propose_behind(sequence.tokens())
    }

    /// Drafted tokens that a step of this plan may have.
    fn budget(&self, plan: &Plan) -> usize {
        self.max_step_tokens.saturating_sub(plan.num_tokens())
    }

    /// How many sequences of the plan decode, and what drafting costs then: a token, and any.
    fn price(&self, plan: &Plan, live: &LiveRequests) -> (usize, f64, f64) {
        let (plain, num_sequences) = (live.scheduler.step_time(), decodes(plan).count());
        let cost = self.costs.per_token(plain, num_sequences);
        (num_sequences, cost, self.costs.per_draft(plain, num_sequences))
    }

    fn decide_lengths(&mut self, plan: &Plan, live: &mut LiveRequests) {
        self.ids.clear();
        self.lengths.clear();
        let budget = self.budget(plan);
        if budget == 0 {
            return;
        }
        let (_, cost, overhead) = self.price(plan, live);
        let plain = live.scheduler.step_time();
        self.ids.extend(decodes(plan).filter(|&id| live.may_draft(id)));
        let lengths = self.ids.iter().map(|&id| live.draft_length(id, self.max_draft_tokens, cost, overhead));
        self.lengths.extend(lengths);
        if !self.ids.is_empty() && self.lengths.iter().all(|&length| length == 0) {
            self.costs.forget(plain);
        }
        policy::share(budget, &mut self.lengths);
    }

    /// The step of `plan` took so long, drawing included and drafting not; `plain` is what one without drafts takes.
    pub(crate) fn observe(&mut self, plan: &Plan, plain: Option<StepTime>, elapsed: Duration) {
        if plan.num_drafts() > 0 {
            self.costs.observe_target(plain, plan.num_tokens(), elapsed);
        }
    }
}

/// The sequences of a plan that decode.
fn decodes(plan: &Plan) -> impl Iterator<Item = SequenceId> {
    let decodes = plan.chunks.iter().filter(|chunk| chunk.num_tokens == 1 && chunk.wants_token);
    decodes.map(|chunk| chunk.id)
}
