//! The requests that an engine works on, from submission to their terminal event: what is planned for them, which
//! tokens are sampled, and which events their readers get. It does not know threads or the executor.
//!
//! Dropping a live request tells its reader; see [`Sink`].

use std::{collections::HashMap, mem, sync::Arc};

use baton_kv_cache::KvLayout;
use baton_model_spec::{SampledRow, SampledToken, TokenSampling};
use baton_request::{FinishReason, Request, SpeculationMode};

use crate::{
    block_pool::PoolReport,
    command::{Grant, QueueSlot, ReplyChannel, Submission},
    config::EngineConfig,
    draft_length::DraftLength,
    events::{DraftCounts, EngineError, PrefillEvent, Sink, TokenEvent},
    plan::{Admission, Chunk, StepPlan},
    sampler::{InvalidLogits, Sampler, TokenHistory},
    scheduler::{Scheduler, SchedulerConfig},
    sequence::SequenceId,
    status::{DraftCounters, EngineLoad, IdleError},
};

/// Every request of an engine, and its sequences.
pub(crate) struct LiveRequests {
    pub(crate) scheduler: Scheduler,
    requests: HashMap<SequenceId, LiveRequest>,
    sampler: Sampler,
    /// The tokens of one sequence in one step; reused.
    sampled: Sampled,
    draft_counters: Arc<DraftCounters>,
    context_length: usize,
    num_layers: usize,
}

struct LiveRequest {
    request: Request,
    history: TokenHistory,
    reply: ReplyChannel,
    draft_length: DraftLength,
    /// Held until admission.
    slot: Option<QueueSlot>,
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
            }),
            requests: HashMap::new(),
            sampler: Sampler::default(),
            sampled: Sampled::default(),
            draft_counters,
            context_length: config.context_length,
            num_layers: layout.num_layers,
        }
    }

    pub(crate) fn submit(&mut self, submission: Submission) {
        let Submission { sequence, request, history, reply, slot } = submission;
        let (draft_length, slot) = (DraftLength::default(), Some(slot));
        self.requests.insert(sequence.id, LiveRequest { request, history, reply, draft_length, slot });
        self.scheduler.add(sequence);
    }

    /// Lets a reservation decode after `first`.
    pub(crate) fn start_decode(&mut self, id: SequenceId, first: u32, sink: Sink<TokenEvent>) {
        let live = self.requests.get_mut(&id).expect("a reservation is live until it is released or used");
        live.reply = ReplyChannel::Tokens(sink);
        self.scheduler.start_decode(id, first);
        live.history.push(first);
        if let Some(reason) = live.finish_after(first, self.context_length) {
            self.finish(id, reason);
        }
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
        }
    }

    /// Decides the next step. Admitted requests give up their slots in the queue.
    pub(crate) fn plan(&mut self, plan: &mut StepPlan) {
        self.scheduler.step(plan);
        for admission in &plan.admitted {
            self.requests.get_mut(&admission.id).expect("a waiting request is live").slot = None;
        }
    }

    pub(crate) fn tell_admitted(&mut self, admission: &Admission) {
        let live = self.requests.get_mut(&admission.id).expect("a waiting request is live");
        let sequence = self.scheduler.sequence(admission.id).expect("an admitted sequence holds blocks");
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

    /// Where the events of a sequence go.
    pub(crate) fn reply(&self, id: SequenceId) -> &ReplyChannel {
        &self.requests[&id].reply
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

    /// Output tokens of a sequence so far.
    pub(crate) fn num_output_tokens(&self, id: SequenceId) -> usize {
        self.requests[&id].history.num_output_tokens()
    }

    /// Whether the request of a sequence allows drafts.
    pub(crate) fn may_draft(&self, id: SequenceId) -> bool {
        self.requests[&id].request.speculation == SpeculationMode::Auto
    }

    /// Sampling of the next draft token: the same as the target's, without log-probabilities.
    pub(crate) fn draft_sampling(&self, id: SequenceId) -> TokenSampling<'_> {
        let live = &self.requests[&id];
        TokenSampling { logprobs: None, ..live.history.sampling(&live.request.sampling) }
    }

    /// Sampling of the draft token after the next one, which is not counted yet.
    pub(crate) fn draft_sampling_after_next(&self, id: SequenceId) -> TokenSampling<'_> {
        let live = &self.requests[&id];
        TokenSampling { logprobs: None, ..live.history.sampling_after_next(&live.request.sampling) }
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
        let Ok(token) = token else { return false };
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

    /// The samplings of a plan, in the order of its logits: one after each token that a sampled token follows.
    pub(crate) fn samplings<'a>(&'a self, plan: &'a StepPlan) -> impl Iterator<Item = TokenSampling<'a>> {
        plan.chunks.iter().filter(|chunk| chunk.wants_token).flat_map(|chunk| {
            let live = &self.requests[&chunk.id];
            let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
            live.history.samplings(sequence.draft(), &live.request.sampling)
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

    /// The plan's tokens are computed, and `rows` has a row for each wanted token. Samples and tells the readers.
    pub(crate) fn advance<'a>(&mut self, plan: &StepPlan, mut rows: impl Iterator<Item = SampledRow<'a>>) {
        self.scheduler.advance(plan);
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token) {
            let mut own_rows = rows.by_ref().take(chunk.num_drafts + 1);
            // A sequence of a step ahead may have ended since.
            if self.requests.contains_key(&chunk.id) {
                let outcome = self.sample(chunk.id, &mut own_rows);
                self.tell_sampled(chunk, outcome);
            }
            own_rows.for_each(drop);
        }
        debug_assert!(rows.next().is_none(), "every row is wanted");
    }

    /// Collects in `sampled` the token after each row, as long as the draft had the one before. Each is sampled as
    /// without a draft: from the same logits, after the same tokens, with the same random number. So a draft changes
    /// how many tokens a step yields, not which.
    fn sample<'a>(
        &mut self,
        id: SequenceId,
        rows: &mut impl Iterator<Item = SampledRow<'a>>,
    ) -> Result<Option<FinishReason>, InvalidLogits> {
        let live = self.requests.get_mut(&id).expect("sampled sequences live");
        self.sampled.tokens.clear();
        self.sampled.num_accepted = 0;
        for row in rows {
            let token = match row {
                SampledRow::Sampled(token) => token?,
                SampledRow::Logits(row) => self.sampler.sample(row, &live.request.sampling, &live.history)?,
            };
            let token_id = token.id;
            self.sampled.tokens.push(token);
            live.history.push(token_id);
            // Invariant 7: the sampled token is kept. A draft token that differs from it is dropped.
            let was_drafted = self.scheduler.push_token(id, token_id);
            self.sampled.num_accepted += usize::from(was_drafted);
            let finish = live.finish_after(token_id, self.context_length);
            if finish.is_some() || !was_drafted {
                return Ok(finish);
            }
        }
        unreachable!("no draft token follows the last row")
    }

    fn tell_sampled(&mut self, chunk: &Chunk, outcome: Result<Option<FinishReason>, InvalidLogits>) {
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
                    Err(InvalidLogits) => self.fail(chunk.id),
                }
            }
            (_, Err(InvalidLogits)) => self.fail(chunk.id),
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
        live.draft_length.observe(chunk.num_drafts, num_accepted);
        let counts = DraftCounts { drafted: chunk.num_drafts as u64, accepted: num_accepted as u64 };
        self.draft_counters.add(counts);
        if let ReplyChannel::Tokens(sink) = &live.reply {
            sink.send(TokenEvent::Verified(counts));
        }
    }

    fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        if let ReplyChannel::Tokens(sink) = self.end(id).reply {
            sink.end(TokenEvent::Finished(reason));
        }
    }

    fn fail(&mut self, id: SequenceId) {
        let live = self.end(id);
        tracing::warn!(request = live.request.id, "request failed: the model's logits are not finite");
        live.reply.fail(EngineError::InvalidLogits);
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

impl LiveRequest {
    /// The reason to end the sequence after `token`, its newest, if there is one.
    fn finish_after(&self, token: u32, context_length: usize) -> Option<FinishReason> {
        self.request.finish_after(self.history.num_output_tokens(), token, context_length)
    }
}

impl ReplyChannel {
    fn fail(self, error: EngineError) {
        match self {
            ReplyChannel::Tokens(sink) => sink.end(TokenEvent::Failed(error)),
            ReplyChannel::Prefill(sink) => sink.end(PrefillEvent::Failed(error)),
            // The future of the reservation reports a shutdown.
            ReplyChannel::Reservation(_) => {}
        }
    }
}
