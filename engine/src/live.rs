//! The requests that an engine works on, from submission to their terminal event: what is planned for them, which
//! tokens are sampled, and which events their readers get. It does not know threads or the executor.
//!
//! Dropping a live request tells its reader; see [`Sink`].

mod constrained;

use std::{collections::HashMap, iter, mem, sync::Arc};

use baton_grammar::MaskThread;
use baton_kv_cache::KvLayout;
use baton_model_spec::{SampledRow, SampledToken, TokenSampling};
use baton_request::{FinishReason, Request, SpeculationMode};
use baton_sampler::{Sampler, ScoredToken};
use baton_scheduler::{
    Admission, Adoption, Chunk, PoolReport, Scheduler, SchedulerConfig, Sequence, SequenceId, StepPlan,
};

use crate::{
    blending::Head,
    command::{Resumptions, Spoiled},
    config::EngineConfig,
    events::{DraftCounts, EngineError, PrefillEvent, Sink, TokenEvent},
    live_request::{Grant, LiveRequest, ReplyChannel},
    status::{DraftCounters, EngineLoad, EnginePace, IdleError, Submitted},
};

/// Every request of an engine, and its sequences.
pub(crate) struct LiveRequests {
    pub(crate) scheduler: Scheduler,
    requests: HashMap<SequenceId, LiveRequest>,
    sampler: Sampler,
    masks: MaskThread<SequenceId>,
    /// The tokens of one sequence in one step; reused.
    sampled: Sampled,
    draft_counters: Arc<DraftCounters>,
    max_drafted_step_tokens: usize,
    context_length: usize,
    num_layers: usize,
    /// What was submitted to this engine and has come here.
    taken: Submitted,
    /// Who loads the blocks of preempted sequences; `None`: they are computed.
    resumptions: Option<Resumptions>,
    /// Who forgets blocks outside the pool whose KV may be wrong; `None`: there are none.
    spoiled_blocks: Option<Spoiled>,
    /// Requests with passages that failed by their logits, until their passages are forgotten.
    spoiled: Vec<Request>,
}

/// The tokens sampled after a chunk.
#[derive(Debug, Default)]
struct Sampled {
    tokens: Vec<SampledToken>,
    /// So many of them at the front were drafted.
    num_accepted: usize,
}

impl LiveRequests {
    pub(crate) fn new(
        config: &EngineConfig,
        layout: &KvLayout,
        draft_counters: Arc<DraftCounters>,
    ) -> LiveRequests {
        LiveRequests {
            scheduler: Scheduler::new(SchedulerConfig {
                num_blocks: config.num_blocks,
                block_size: layout.block_size,
                max_running: config.max_running,
                token_budget: config.token_budget,
                itl_target: config.itl_target,
            })
            .with_step_prior(config.step_prior)
            .with_cache_events(),
            requests: HashMap::new(),
            sampler: Sampler::default(),
            masks: MaskThread::default(),
            sampled: Sampled::default(),
            draft_counters,
            max_drafted_step_tokens: config.max_drafted_step_tokens,
            context_length: config.context_length,
            num_layers: layout.num_layers,
            taken: Submitted::default(),
            resumptions: None,
            spoiled_blocks: None,
            spoiled: Vec::new(),
        }
    }

    pub(crate) fn submit(&mut self, sequence: Sequence, request: LiveRequest) {
        self.taken.add(&sequence);
        self.requests.insert(sequence.id, request);
        self.scheduler.add(sequence);
    }

    /// Lets a reservation decode after `first`.
    pub(crate) fn start_decode(&mut self, id: SequenceId, first: u32, sink: Sink<TokenEvent>) {
        let live = self.requests.get_mut(&id).expect("a reservation is live until it is released or used");
        live.reply = ReplyChannel::Tokens(sink);
        self.scheduler.start_decode(id, first);
        match live.take(first, self.context_length) {
            Ok(None) => {}
            Ok(Some(reason)) => self.finish(id, reason),
            Err(error) => self.fail(id, error),
        }
    }

    /// From now on, `resumptions` get the preempted sequences that lost blocks.
    pub(crate) fn recall_preempted(&mut self, resumptions: Resumptions) {
        self.scheduler.recall_preempted();
        self.resumptions = Some(resumptions);
    }

    /// From now on, `blocks` get the hashes of blocks whose KV may be wrong.
    pub(crate) fn tell_spoiled(&mut self, blocks: Spoiled) {
        self.spoiled_blocks = Some(blocks);
    }

    /// Cancels a request whose reader is gone.
    pub(crate) fn cancel(&mut self, id: SequenceId) {
        if let Some(live) = self.requests.remove(&id) {
            tracing::debug!(request = live.request.id, sequence = %id, "cancelled");
            self.scheduler.end(id);
        }
    }

    /// Releases blocks whose holder is gone.
    pub(crate) fn release(&mut self, id: SequenceId) {
        self.scheduler.release(id);
        // This ends a reservation. A prefill continues for its reader.
        if self.requests.get(&id).is_some_and(|live| matches!(live.reply, ReplyChannel::Reservation(_))) {
            self.requests.remove(&id);
        }
    }

    /// A granted reservation will not decode. Its blocks stay until they are released.
    pub(crate) fn give_up_slot(&mut self, id: SequenceId) {
        // One that was released before has none.
        if self.scheduler.give_up_slot(id) {
            self.requests.remove(&id);
        }
    }

    /// Ends every request with `error`.
    pub(crate) fn fail_all(&mut self, error: &EngineError) {
        for (_, live) in self.requests.drain() {
            live.reply.fail(error.clone());
        }
    }

    pub(crate) fn check_idle(&self) -> Result<PoolReport, IdleError> {
        let report = self.scheduler.check_integrity()?;
        if self.scheduler.is_idle() && self.requests.is_empty() {
            return Ok(report);
        }
        Err(IdleError::Busy {
            num_waiting: self.scheduler.num_waiting(),
            num_running: self.scheduler.num_running(),
            num_holds: self.scheduler.num_holds(),
        })
    }

    pub(crate) fn load(&self) -> EngineLoad {
        EngineLoad {
            num_waiting: self.scheduler.num_waiting(),
            num_running: self.scheduler.num_running(),
            num_free_blocks: self.scheduler.num_free_blocks(),
            num_total_blocks: self.scheduler.num_total_blocks(),
            num_queued_tokens: self.scheduler.num_queued_tokens(),
            num_queued_blocks: self.scheduler.num_queued_blocks(),
            taken: self.taken,
        }
    }

    /// What routers plan with.
    pub(crate) fn pace(&self) -> EnginePace {
        let decoding = self.scheduler.decoding();
        EnginePace {
            step: self.scheduler.step_line(),
            num_steps: self.scheduler.num_measured_steps(),
            num_decoding: decoding.num_tokens as usize,
            num_context_tokens: decoding.num_context_tokens as usize,
            num_queued_pairs: self.scheduler.num_queued_pairs(),
            recent_itl_seconds: 0.0,
            recent_tokens: 0.0,
            stepped_at: None,
        }
    }

    /// Decides the next step. Admitted requests give up their slots in the queue.
    pub(crate) fn plan(&mut self, plan: &mut StepPlan) {
        self.scheduler.step(plan);
        for admission in &plan.admitted {
            self.requests.get_mut(&admission.id).expect("a waiting request is live").slot = None;
        }
    }

    /// Prompt tokens of a sequence that is admitted for the first time and computes its prompt here, and how many of them the
    /// prefix cache supplied.
    pub(crate) fn prompt_lookup(&self, admission: &Admission) -> Option<(usize, usize)> {
        let live = &self.requests[&admission.id];
        let computes = !matches!(live.reply, ReplyChannel::Reservation(_));
        let sequence = self.scheduler.sequence(admission.id).filter(|_| admission.is_first && computes)?;
        let num_tokens = live.request.prompt.len();
        Some((num_tokens, sequence.num_cached_tokens().min(num_tokens)))
    }

    pub(crate) fn tell_admitted(&mut self, admission: &Admission) {
        let live = self.requests.get_mut(&admission.id).expect("a waiting request is live");
        let sequence = self.scheduler.sequence(admission.id).expect("an admitted sequence holds blocks");
        if let Some(resumptions) = self.resumptions.as_ref().filter(|_| admission.is_recalled) {
            resumptions.ask(sequence, admission.num_cached_blocks);
        }
        match &mut live.reply {
            ReplyChannel::Prefill(sink) => {
                let cached_tokens = sequence.num_cached_tokens().min(live.request.prompt.len());
                sink.send(PrefillEvent::Started { cached_tokens });
                if admission.num_cached_blocks > 0 {
                    sink.send(PrefillEvent::Ready {
                        layers: 0..self.num_layers,
                        first_block_idx: 0,
                        blocks: sequence.blocks()[..admission.num_cached_blocks].to_vec(),
                    });
                }
            }
            ReplyChannel::Reservation(grant) => {
                let granted = Grant {
                    blocks: sequence.blocks().to_vec(),
                    num_cached_blocks: admission.num_cached_blocks,
                };
                let grant = grant.take().expect("a reservation is admitted once");
                // A reader that left has sent `Release`: its owner does so when it is dropped.
                let _ = grant.send(granted);
            }
            ReplyChannel::Tokens(sink) if admission.is_first => {
                let cached_tokens = sequence.num_cached_tokens().min(live.request.prompt.len());
                sink.send(TokenEvent::Started { cached_tokens });
            }
            ReplyChannel::Tokens(_) => {}
        }
    }

    /// Returns how many prompt tokens the prefix cache supplied. After a preemption, which prefills have not, they are known.
    pub(crate) fn tell_adopted(&mut self, adoption: &Adoption) -> usize {
        let &Adoption { id, first_block_idx, num_blocks, is_first } = adoption;
        if !is_first {
            return 0;
        }
        let live = &self.requests[&id];
        let sequence = self.scheduler.sequence(id).expect("a sequence that adopts runs");
        let block_size = sequence.block_size();
        let num_before = (first_block_idx * block_size).min(live.request.prompt.len());
        let cached_tokens =
            (num_blocks * block_size).min(live.request.prompt.len().saturating_sub(num_before));
        match &live.reply {
            ReplyChannel::Prefill(sink) => {
                sink.send(PrefillEvent::Adopted { cached_tokens });
                sink.send(PrefillEvent::Ready {
                    layers: 0..self.num_layers,
                    first_block_idx,
                    blocks: sequence.blocks()[first_block_idx..first_block_idx + num_blocks].to_vec(),
                });
            }
            ReplyChannel::Tokens(sink) => sink.send(TokenEvent::Adopted { cached_tokens }),
            ReplyChannel::Reservation(_) => {}
        }
        cached_tokens
    }

    /// Whether a chunk is the head of its sequence. A step ahead has no heads; its sequences may have ended meanwhile.
    pub(crate) fn is_head(&self, chunk: &Chunk) -> bool {
        self.scheduler.sequence(chunk.id).is_some_and(|sequence| sequence.num_head_left() > 0)
    }

    /// The head of a sequence, which `chunk` is.
    pub(crate) fn head(&self, chunk: &Chunk) -> Head<'_> {
        let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
        let (tokens, blocks) = (&sequence.tokens()[..chunk.num_tokens], sequence.blocks());
        Head { request: &self.requests[&chunk.id].request, tokens, blocks, wants_token: chunk.wants_token }
    }

    /// The head of a sequence was blended. A preempted sequence blends it again, and its reader knows.
    pub(crate) fn tell_blended(&mut self, id: SequenceId, reused_tokens: usize) {
        let live = self.requests.get_mut(&id).expect("planned sequences live");
        if mem::replace(&mut live.is_blended, true) {
            return;
        }
        match &live.reply {
            ReplyChannel::Tokens(sink) => sink.send(TokenEvent::Blended { reused_tokens }),
            ReplyChannel::Prefill(sink) => sink.send(PrefillEvent::Blended { reused_tokens }),
            ReplyChannel::Reservation(_) => {}
        }
    }

    /// Where the events of a sequence go.
    pub(crate) fn reply(&self, id: SequenceId) -> &ReplyChannel {
        &self.requests[&id].reply
    }

    /// Draft tokens that a step of this plan may have beside those of its sequences.
    pub(crate) fn draft_budget(&self, plan: &StepPlan) -> usize {
        let of_chunk = |chunk: &Chunk| self.scheduler.sequence(chunk.id).map_or(0, |it| it.draft().len());
        let num_drafts: usize = plan.chunks.iter().map(of_chunk).sum();
        self.max_drafted_step_tokens.saturating_sub(plan.num_tokens() + num_drafts)
    }

    /// Tokens to draft for a sequence that decodes, at most `max`; see [`DraftLength::next`].
    pub(crate) fn draft_length(&mut self, id: SequenceId, max: usize, cost: f64, overhead: f64) -> usize {
        let live = self.requests.get_mut(&id).expect("planned sequences live");
        let sequence = self.scheduler.sequence(id).expect("planned sequences run");
        live.draft_length.next(max.min(sequence.max_num_drafts()), cost, overhead)
    }

    /// Whether [`draft_length`](Self::draft_length) would be 0.
    pub(crate) fn draft_is_resting(&self, id: SequenceId, max: usize, cost: f64, overhead: f64) -> bool {
        let sequence = self.scheduler.sequence(id).expect("planned sequences run");
        self.requests[&id].draft_length.is_resting(max.min(sequence.max_num_drafts()), cost, overhead)
    }

    /// A look-up proposed so many tokens for a sequence; see [`DraftLength::looked_up`].
    pub(crate) fn looked_up(&mut self, id: SequenceId, num_proposed: usize) {
        self.requests.get_mut(&id).expect("planned sequences live").draft_length.looked_up(num_proposed);
    }

    /// Output tokens of a sequence so far.
    pub(crate) fn num_output_tokens(&self, id: SequenceId) -> usize {
        self.requests[&id].history.num_output_tokens()
    }

    /// Whether the request of a sequence and its grammar allow drafts, and it has none yet.
    pub(crate) fn may_draft(&self, id: SequenceId) -> bool {
        let live = &self.requests[&id];
        live.request.speculation == SpeculationMode::Auto
            && !live.has_forced_draft
            && live.constraint.as_ref().is_none_or(|constraint| constraint.may_draft())
    }

    /// Sampling of the next draft token: the same as the target's, without log-probabilities. Drafts are cut to what grammars allow later.
    pub(crate) fn draft_sampling(&self, id: SequenceId) -> TokenSampling<'_> {
        let live = &self.requests[&id];
        TokenSampling { logprobs: None, is_masked: false, ..live.history.sampling(&live.request.sampling) }
    }

    /// Sampling of the draft token after the next one, which is not counted yet.
    pub(crate) fn draft_sampling_after_next(&self, id: SequenceId) -> TokenSampling<'_> {
        let live = &self.requests[&id];
        TokenSampling {
            logprobs: None,
            is_masked: false,
            ..live.history.sampling_after_next(&live.request.sampling)
        }
    }

    /// Appends to the draft the token of `row`, sampled with [`draft_sampling`](Self::draft_sampling). Returns
    /// whether to draft on. The draft counts as output until [`end_draft`](Self::end_draft).
    pub(crate) fn sample_draft(&mut self, id: SequenceId, row: SampledRow<'_>) -> bool {
        let live = self.requests.get_mut(&id).expect("planned sequences live");
        let token = match row {
            SampledRow::Sampled(token) => token.map(|token| token.id),
            SampledRow::Logits(row) => {
                self.sampler.sample_row_id(row, &live.history.sampling(&live.request.sampling))
            }
        };
        let Ok(token) = token else {
            // Without a proposal there is nothing to verify. It was worth as little as a wrong one.
            live.draft_length.observe(1, 0);
            return false;
        };
        live.history.push(token);
        self.scheduler.push_draft(id, token);
        live.finish_after(token, self.context_length).is_none()
    }

    /// Completes the draft: it counts as output no longer.
    pub(crate) fn end_draft(&mut self, id: SequenceId) {
        let live = self.requests.get_mut(&id).expect("planned sequences live");
        let sequence = self.scheduler.sequence(id).expect("planned sequences run");
        sequence.draft().iter().rev().for_each(|&token| live.history.pop(token));
    }

    /// The samplings of a plan without its heads, in the order of its logits. What scores tokens is left to the host.
    pub(crate) fn samplings<'a>(&'a self, plan: &'a StepPlan) -> impl Iterator<Item = TokenSampling<'a>> {
        plan.chunks.iter().filter(|chunk| !self.is_head(chunk)).flat_map(|chunk| {
            let live = &self.requests[&chunk.id];
            let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
            let scored = iter::repeat_with(|| TokenSampling { on_host: true, ..TokenSampling::default() });
            let sampled = live.history.samplings(sequence.draft(), &live.request.sampling);
            scored.take(chunk.num_scored).chain(sampled.filter(|_| chunk.wants_token))
        })
    }

    /// The samplings of a plan that was decided before the tokens before it are known ([`Scheduler::step_ahead`]).
    pub(crate) fn samplings_ahead<'a>(
        &'a self,
        next: &'a StepPlan,
    ) -> impl Iterator<Item = TokenSampling<'a>> {
        next.chunks.iter().map(|chunk| {
            let live = &self.requests[&chunk.id];
            live.history.sampling_after_next(&live.request.sampling)
        })
    }

    /// Whether a request of the plan is still live.
    pub(crate) fn any_lives(&self, plan: &StepPlan) -> bool {
        plan.chunks.iter().any(|chunk| self.requests.contains_key(&chunk.id))
    }

    /// The plan's tokens are computed, and `rows` has a row for each wanted token. Samples and tells the readers. Returns how
    /// many drafted tokens were accepted.
    pub(crate) fn advance<'a>(
        &mut self,
        plan: &StepPlan,
        mut rows: impl Iterator<Item = SampledRow<'a>>,
    ) -> usize {
        let mut num_accepted = 0;
        self.scheduler.advance(plan);
        for chunk in plan.chunks.iter().filter(|chunk| chunk.num_rows() > 0) {
            let mut own_rows = rows.by_ref().take(chunk.num_rows());
            // A sequence of a step ahead may have ended since.
            if self.requests.contains_key(&chunk.id) {
                match self.score(chunk, &mut own_rows) {
                    Err(error) => self.fail(chunk.id, error),
                    Ok(()) if !chunk.wants_token => {}
                    Ok(()) => {
                        let outcome = self.sample(chunk.id, &mut own_rows);
                        num_accepted += self.sampled.num_accepted;
                        self.tell_sampled(chunk, outcome);
                    }
                }
            }
            own_rows.for_each(drop);
        }
        debug_assert!(rows.next().is_none(), "every row is wanted");
        num_accepted
    }

    /// Tells how likely the prompt tokens after the first `num_scored` rows are.
    fn score<'a>(
        &self,
        chunk: &Chunk,
        rows: &mut impl Iterator<Item = SampledRow<'a>>,
    ) -> Result<(), EngineError> {
        if chunk.num_scored == 0 {
            return Ok(());
        }
        let live = &self.requests[&chunk.id];
        let num_top = live.request.sampling.prompt_logprobs.expect("only then is a chunk scored");
        let first_idx = chunk.start_idx + chunk.num_tokens + 1 - chunk.num_rows();
        let score = |(row, &token): (_, &u32)| match row {
            SampledRow::Logits(row) => ScoredToken::new(row, token, num_top),
            SampledRow::Sampled(_) => unreachable!("the host scores"),
        };
        let rows = rows.take(chunk.num_scored).zip(&live.request.prompt[first_idx..]);
        let tokens = rows.map(score).collect::<Result<_, _>>()?;
        if let ReplyChannel::Tokens(sink) = &live.reply {
            sink.send(TokenEvent::Scored { first_idx, tokens });
        }
        Ok(())
    }

    /// Collects in `sampled` the token after each row, as long as the draft had the one before. Each is sampled as
    /// without a draft: from the same logits, after the same tokens, with the same random number. So a draft changes
    /// how many tokens a step yields, not which.
    fn sample<'a>(
        &mut self,
        id: SequenceId,
        rows: &mut impl Iterator<Item = SampledRow<'a>>,
    ) -> Result<Option<FinishReason>, EngineError> {
        let live = self.requests.get_mut(&id).expect("sampled sequences live");
        self.sampled.tokens.clear();
        self.sampled.num_accepted = 0;
        for (row_idx, row) in rows.enumerate() {
            let (params, history) = (&live.request.sampling, &live.history);
            let token = match (row, &mut live.constraint) {
                (SampledRow::Sampled(token), None) => token?,
                (SampledRow::Sampled(token), Some(constraint)) => {
                    constraint.begun(row_idx)?;
                    token?
                }
                (SampledRow::Logits(row), None) => self.sampler.sample(row, params, history)?,
                (SampledRow::Logits(row), Some(constraint)) => {
                    match self.sampler.sample_likeliest(row, params, history)? {
                        Some(token) if constraint.allows(row_idx, token.id)? => token,
                        _ => {
                            let mask = constraint.mask(row_idx, &mut self.masks)?;
                            self.sampler.sample_within(&mask, row, params, history)?
                        }
                    }
                }
            };
            let token_id = token.id;
            self.sampled.tokens.push(token);
            let finish = live.take(token_id, self.context_length)?;
            // Invariant 7: the sampled token is kept. A draft token that differs from it is dropped.
            let was_drafted = self.scheduler.push_token(id, token_id);
            self.sampled.num_accepted += usize::from(was_drafted);
            if finish.is_some() || !was_drafted {
                return Ok(finish);
            }
        }
        unreachable!("no draft token follows the last row")
    }

    fn tell_sampled(&mut self, chunk: &Chunk, outcome: Result<Option<FinishReason>, EngineError>) {
        let mut sampled = mem::take(&mut self.sampled);
        if chunk.num_drafts > 0 {
            self.tell_verified(chunk, sampled.num_accepted);
        }
        match (&self.requests[&chunk.id].reply, outcome) {
            (ReplyChannel::Tokens(sink), outcome) => {
                sampled.tokens.drain(..).for_each(|token| sink.send(TokenEvent::Token(token)));
                match outcome {
                    Ok(None) => {}
                    Ok(Some(reason)) => self.finish(chunk.id, reason),
                    Err(error) => self.fail(chunk.id, error),
                }
            }
            (_, Err(error)) => self.fail(chunk.id, error),
            (_, Ok(_)) => {
                let token = sampled.tokens.pop().expect("a token was sampled");
                if let ReplyChannel::Prefill(sink) = self.end(chunk.id).reply {
                    sink.end(PrefillEvent::FirstToken(token));
                }
            }
        }
        self.sampled = sampled;
    }

    fn tell_verified(&mut self, chunk: &Chunk, num_accepted: usize) {
        let live = self.requests.get_mut(&chunk.id).expect("sampled sequences live");
        // What is forced says nothing about the drafter.
        let counter = if live.has_forced_draft {
            live.forced_length.observe(chunk.num_drafts, num_accepted);
            &self.draft_counters.forced
        } else {
            // The token that the grammar refused comes after the others.
            let is_cut = live.draft_cut_at == Some(chunk.num_drafts);
            live.draft_length.observe(chunk.num_drafts + usize::from(is_cut), num_accepted);
            &self.draft_counters.proposed
        };
        let counts = DraftCounts { drafted: chunk.num_drafts as u64, accepted: num_accepted as u64 };
        counter.add(counts);
        if let ReplyChannel::Tokens(sink) = &live.reply {
            sink.send(TokenEvent::Verified(counts));
        }
    }

    fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        if let ReplyChannel::Tokens(sink) = self.end(id).reply {
            sink.end(TokenEvent::Finished(reason));
        }
    }

    fn fail(&mut self, id: SequenceId, error: EngineError) {
        let is_spoiled = error == EngineError::InvalidLogits;
        if is_spoiled {
            // Which of its blocks is wrong is not known.
            let hashes = self.scheduler.forget(id);
            if let Some(blocks) = self.spoiled_blocks.as_ref().filter(|_| !hashes.is_empty()) {
                // Fails when the tiers are gone.
                let _ = blocks.send(hashes);
            }
        }
        let live = self.end(id);
        tracing::warn!(request = live.request.id, %error, "request failed");
        if is_spoiled && live.request.blended().is_some() {
            self.spoiled.push(live.request);
        }
        live.reply.fail(error);
    }

    /// Requests whose passages may be the reason that they failed.
    pub(crate) fn take_spoiled(&mut self) -> Vec<Request> {
        mem::take(&mut self.spoiled)
    }

    /// Removes a sequence here and from the scheduler. The caller tells its reader.
    fn end(&mut self, id: SequenceId) -> LiveRequest {
        self.scheduler.end(id);
        self.requests.remove(&id).expect("a request ends once")
    }

    pub(crate) fn num_live(&self) -> usize {
        self.requests.len()
    }
}
