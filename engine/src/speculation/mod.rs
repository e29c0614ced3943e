//! Speculative decoding: a drafter proposes tokens, and one step of the target verifies them.
//!
//! ```text
//! plan -> how many for each sequence -> drafter proposes -> plan_drafts -> execute -> sample, accept
//! ```
//!
//! A draft never changes which token is sampled. Each position is sampled from the target's own logits with the
//! request's own parameters and the random number of its output index. A drafted token is accepted when it equals the
//! sampled one. A token that is proposed with certainty, as by lookup, is so accepted as often as by rejection
//! sampling (Leviathan et al. 2023), with probability `p(token)`. Beyond the distribution even the tokens stay the
//! same, so a seed means the same with and without a drafter. A draft model samples with the same random number: it
//! proposes the target's token wherever both models map that number to one token.
//!
//! - [`baton_drafting::length`]: how many tokens to draft, from acceptance and cost;
//! - `cost`: the cost, from measured steps;
//! - [`baton_drafting::ngram`]: proposes what followed the same few tokens before;
//! - `draft_model`: a smaller model proposes, over KV blocks of its own.

mod cost;
mod draft_model;

use std::{
    fmt,
    time::{Duration, Instant},
};

use baton_drafting::{length, ngram};
use baton_kv_cache::BlockStorage;
use baton_model_spec::Executor;
use baton_scheduler::{SequenceId, StepPlan, StepTime};

use crate::{
    config::{EngineConfig, EngineStartError},
    events::EngineError,
    live::LiveRequests,
};
use cost::DraftCosts;
use draft_model::DraftModel;

/// So many steps that decode have no drafts once a step is measured: how much is drafted depends on the time of a step
/// without drafts, and the first steps of a process may be slow.
const COLD: usize = 8;
/// After so many steps with drafts, one has none, so that its time stays known.
const PLAIN_AFTER: usize = 64;

/// How an engine speculates.
#[derive(Debug)]
pub struct Speculation {
    /// The source of proposed tokens.
    pub drafter: Drafter,
    /// Most tokens to draft for a sequence in one step.
    pub max_draft_tokens: usize,
}

/// The source of proposed tokens.
pub enum Drafter {
    /// The tokens that followed the same few tokens earlier in the sequence.
    Ngram,
    /// A smaller model with the target's vocabulary, over as many blocks as the target has.
    Model {
        /// The executor of the draft model, on blocks of the target's size.
        executor: Box<dyn Executor>,
        /// Its blocks, if they are not in host memory. As many as the target has.
        storage: Option<BlockStorage>,
        /// Cost of one of its steps until that is measured, in steps of the target.
        cost: f64,
    },
}

/// Drafts for the sequences of a plan.
pub(crate) struct Speculator {
    proposer: Proposer,
    costs: DraftCosts,
    clock: fn() -> Instant,
    max_draft_tokens: usize,
    /// What is left of [`COLD`].
    num_cold: usize,
    /// Steps with drafts since one that only decoded.
    num_drafted: usize,
    /// The sequences to draft for in this step; reused.
    ids: Vec<SequenceId>,
    /// Length of each draft.
    lengths: Vec<usize>,
    /// The proposal by lookup for one of them.
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

impl Speculator {
    /// A speculator for a target of `vocab_size` tokens on blocks of `block_size`.
    pub(crate) fn new(
        speculation: Speculation,
        config: &EngineConfig,
        vocab_size: usize,
        block_size: usize,
    ) -> Result<Speculator, EngineStartError> {
        let Speculation { drafter, max_draft_tokens } = speculation;
        let (proposer, draft_guess) = match drafter {
            Drafter::Ngram => (Proposer::Ngram, 0.0),
            Drafter::Model { executor, storage, cost } => {
                let model = DraftModel::new(executor, storage, config, vocab_size, block_size)?;
                (Proposer::Model(Box::new(model)), cost)
            }
        };
        Ok(Speculator {
            proposer,
            costs: DraftCosts::new(draft_guess),
            clock: config.clock,
            max_draft_tokens,
            num_cold: COLD,
            num_drafted: 0,
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

    /// Drafts for the plan's sequences that decode, where it pays, and adds the drafts to the plan.
    pub(crate) fn draft(&mut self, plan: &mut StepPlan, live: &mut LiveRequests) -> Result<(), EngineError> {
        self.ids.clear();
        self.lengths.clear();
        if !self.is_plain_due(plan, live.scheduler.step_time().is_some()) {
            self.decide_lengths(plan, live);
        }
        let wanted = self.ids.iter().copied().zip(self.lengths.iter().copied());
        let wanted = wanted.filter(|&(_, num_tokens)| num_tokens > 0);
        match &mut self.proposer {
            Proposer::Ngram => {
                for (id, num_tokens) in wanted {
                    let sequence = live.scheduler.sequence(id).expect("planned sequences run");
                    let tokens = sequence.tokens();
                    self.proposed.clear();
                    self.proposed.extend(ngram::propose(tokens).take(num_tokens));
                    // A look-up that was known to find nothing kept no step from being launched ahead.
                    let (_, before) = tokens.split_last().expect("a sequence has tokens");
                    if !self.proposed.is_empty() || ngram::may_propose_after_next(before) {
                        live.looked_up(id, self.proposed.len());
                    }
                    self.proposed.iter().for_each(|&token| live.scheduler.push_draft(id, token));
                }
            }
            Proposer::Model(model) => model.draft(wanted, live, &mut self.costs, self.clock)?,
        }
        live.cut_drafts(plan);
        live.scheduler.plan_drafts(plan);
        if plan.num_drafts() > 0 {
            self.num_drafted += 1;
        } else if only_decodes(plan) {
            self.num_drafted = 0;
        }
        Ok(())
    }

    /// Whether the step of `plan` shall have no drafts, so that the time of a step without them is learned.
    fn is_plain_due(&mut self, plan: &StepPlan, is_measured: bool) -> bool {
        if is_measured && self.num_cold > 0 && plan.has_decodes() {
            self.num_cold -= 1;
            return true;
        }
        let is_due = self.num_drafted >= PLAIN_AFTER && only_decodes(plan);
        if is_due {
            // Also if text that a grammar forces is drafted in it: other drafts do not wait for its end.
            self.num_drafted = 0;
        }
        is_due
    }

    /// Whether no sequence gets a draft in the step of `plan` for any values of its tokens, which are not known yet. If
    /// so, the step is counted as one without drafts.
    pub(crate) fn drafts_nothing(&mut self, plan: &StepPlan, live: &mut LiveRequests) -> bool {
        if live.draft_budget(plan) > 0 {
            let (num_sequences, cost, overhead) = self.price(plan, live);
            debug_assert_eq!(num_sequences, plan.chunks.len(), "every sequence decodes");
            let max = self.max_draft_tokens;
            let gets_none = |id| {
                !live.may_draft(id)
                    || live.draft_is_resting(id, max, cost, overhead)
                    || self.finds_nothing_after_next(id, live)
            };
            if !plan.chunks.iter().all(|chunk| gets_none(chunk.id)) {
                return false;
            }
        }
        self.decide_lengths(plan, live);
        self.num_drafted = 0;
        let mut lengths = self.ids.iter().zip(&self.lengths);
        debug_assert!(lengths.all(|(&id, &length)| length == 0 || self.finds_nothing_after_next(id, live)));
        true
    }

    /// Whether no token can be proposed after the next token of a sequence, whichever that is.
    fn finds_nothing_after_next(&self, id: SequenceId, live: &LiveRequests) -> bool {
        let sequence = live.scheduler.sequence(id).expect("planned sequences run");
        matches!(self.proposer, Proposer::Ngram) && !ngram::may_propose_after_next(sequence.tokens())
    }

    /// The number of sequences of the plan that decode, and the costs of drafting for them: of one token, and of any
    /// draft.
    fn price(&self, plan: &StepPlan, live: &LiveRequests) -> (usize, f64, f64) {
        let (plain, num_sequences) = (live.scheduler.step_time(), decodes(plan).count());
        let cost = self.costs.per_token(plain, num_sequences);
        (num_sequences, cost, self.costs.per_draft(plain, num_sequences))
    }

    fn decide_lengths(&mut self, plan: &StepPlan, live: &mut LiveRequests) {
        self.ids.clear();
        self.lengths.clear();
        let budget = live.draft_budget(plan);
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
        length::share(budget, &mut self.lengths);
    }

    /// Records that the step of `plan` took `elapsed`, sampling included and drafting not. `plain` is the time of a
    /// step without drafts.
    pub(crate) fn observe(&mut self, plan: &StepPlan, plain: Option<StepTime>, elapsed: Duration) {
        if plan.num_drafts() > 0 {
            self.costs.observe_target(plain, plan.num_tokens(), elapsed);
        }
    }
}

/// Whether a step computes one token of each of its sequences, the newest one.
fn only_decodes(plan: &StepPlan) -> bool {
    plan.num_decodes() == plan.num_tokens()
}

/// The sequences of a plan that decode.
fn decodes(plan: &StepPlan) -> impl Iterator<Item = SequenceId> {
    let decodes = plan.chunks.iter().filter(|chunk| chunk.num_tokens == 1 && chunk.wants_token);
    decodes.map(|chunk| chunk.id)
}
