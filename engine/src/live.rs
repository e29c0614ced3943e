//! The requests that an engine works on, from submission to their terminal event: what is planned for
//! them, what is drawn from their logits, and who is told. It knows neither threads nor the executor.
//!
//! Dropping a live request tells its reader; see [`Sink`].

use std::{collections::HashMap, mem, sync::Arc};

use baton_kv_cache::KvLayout;
use baton_model::{Answer, Draw, SampledToken};
use baton_request::{FinishReason, Request, SpeculationMode};

use crate::{
    block_pool::PoolReport,
    command::{Command, Commands, Owner, Reply, Submission, Ticket},
    config::EngineConfig,
    events::{EngineError, PrefillEvent, Sink, TokenEvent},
    handle::{EngineLoad, IdleError, Reservation, max_token_events},
    plan::{Admission, Chunk, Plan},
    sampler::{InvalidLogits, Sampler, TokenHistory},
    scheduler::{Scheduler, SchedulerConfig},
    sequence::SequenceId,
    speculation::{DraftCounters, DraftCounts, policy::DraftLength},
};

/// Every request of an engine, and its sequences.
pub(crate) struct LiveRequests {
    pub(crate) scheduler: Scheduler,
    requests: HashMap<SequenceId, LiveRequest>,
    sampler: Sampler,
    /// Of one sequence in one step; reused.
    drawn: Drawn,
    draft_counters: Arc<DraftCounters>,
    commands: Commands,
    context_length: usize,
    num_layers: usize,
}

struct LiveRequest {
    request: Request,
    history: TokenHistory,
    reply: Reply,
    draft_length: DraftLength,
    /// Until it is admitted.
    ticket: Option<Ticket>,
}

/// What followed a chunk.
#[derive(Debug, Default)]
struct Drawn {
    tokens: Vec<SampledToken>,
    /// Of them, so many at the front were drafted.
    num_accepted: usize,
}

impl LiveRequests {
    pub(crate) fn new(
        config: &EngineConfig,
        layout: &KvLayout,
        commands: Commands,
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
            drawn: Drawn::default(),
            draft_counters,
            commands,
            context_length: config.context_length,
            num_layers: layout.num_layers,
        }
    }

    pub(crate) fn submit(&mut self, submission: Submission) {
        let Submission { sequence, request, history, reply, ticket } = submission;
        let (draft_length, ticket) = (DraftLength::default(), Some(ticket));
        self.requests.insert(sequence.id, LiveRequest { request, history, reply, draft_length, ticket });
        self.scheduler.add(sequence);
    }

    /// Lets a reservation decode after `first`.
    pub(crate) fn start_decode(&mut self, id: SequenceId, first: u32, sink: Sink<TokenEvent>) {
        let live = self.requests.get_mut(&id).expect("a reservation lives until it is released or used");
        live.reply = Reply::Tokens(sink);
        self.scheduler.start_decode(id, first);
        live.history.push(first);
        if let Some(reason) = live.finish_after(first, self.context_length) {
            self.finish(id, reason);
        }
    }

    /// The reader has left.
    pub(crate) fn cancel(&mut self, id: SequenceId) {
        if let Some(live) = self.requests.remove(&id) {
            tracing::debug!(request = live.request.id, sequence = %id, "cancelled");
            self.scheduler.end(id);
        }
    }

    /// The holder of its blocks has left.
    pub(crate) fn release(&mut self, id: SequenceId) {
        self.scheduler.release(id);
        // A reservation is over with this; a prefill goes on for its reader.
        if self.requests.get(&id).is_some_and(|live| matches!(live.reply, Reply::Reservation(_))) {
            self.requests.remove(&id);
        }
    }

    /// Ends everything with `error`.
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

    /// Decides the next step. Those that it admits give up their places in the queue.
    pub(crate) fn plan(&mut self, plan: &mut Plan) {
        self.scheduler.step(plan);
        for admission in &plan.admitted {
            self.requests.get_mut(&admission.id).expect("who waits is alive").ticket = None;
        }
    }

    pub(crate) fn tell_admitted(&mut self, admission: &Admission) {
        let live = self.requests.get_mut(&admission.id).expect("who waits is alive");
        let sequence = self.scheduler.sequence(admission.id).expect("it was admitted");
        match &mut live.reply {
            Reply::Prefill(sink) => {
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
            Reply::Reservation(grant) => {
                let reservation = Reservation {
                    owner: Owner::new(admission.id, self.commands.clone(), Command::Release),
                    blocks: sequence.blocks().to_vec(),
                    num_cached_blocks: admission.num_cached_blocks,
                    max_events: max_token_events(&live.request, self.context_length),
                };
                let grant = grant.take().expect("a reservation is admitted once");
                // If nobody waits for it any more it is dropped, and so released.
                let _ = grant.send(reservation);
            }
            Reply::Tokens(sink) if admission.is_first => {
                let cached_tokens = sequence.num_cached_tokens().min(live.request.prompt.len());
                sink.send(TokenEvent::Started { cached_tokens });
            }
            Reply::Tokens(_) => {}
        }
    }

    /// Whom to tell what becomes of a sequence.
    pub(crate) fn reply(&self, id: SequenceId) -> &Reply {
        &self.requests[&id].reply
    }

    /// Tokens to draft for a sequence that decodes, at most `max`; see [`DraftLength::next`].
    pub(crate) fn draft_length(&mut self, id: SequenceId, max: usize, cost: f64, overhead: f64) -> usize {
        let live = self.requests.get_mut(&id).expect("planned sequences live");
        let sequence = self.scheduler.sequence(id).expect("planned sequences run");
        live.draft_length.next(max.min(sequence.max_num_drafts()), cost, overhead)
    }

    /// Whether that is 0.
    pub(crate) fn draft_rests(&self, id: SequenceId, max: usize, cost: f64, overhead: f64) -> bool {
        let sequence = self.scheduler.sequence(id).expect("planned sequences run");
        self.requests[&id].draft_length.rests(max.min(sequence.max_num_drafts()), cost, overhead)
    }

    /// Output tokens of a sequence so far.
    pub(crate) fn num_output_tokens(&self, id: SequenceId) -> usize {
        self.requests[&id].history.num_output_tokens()
    }

    /// Whether the request of a sequence lets its tokens be drafted.
    pub(crate) fn may_draft(&self, id: SequenceId) -> bool {
        self.requests[&id].request.speculation == SpeculationMode::Auto
    }

    /// How the next token of a draft is drawn: as if it were the target's, but that nobody asks how likely it is.
    pub(crate) fn draft_draw(&self, id: SequenceId) -> Draw<'_> {
        let live = &self.requests[&id];
        Draw { logprobs: None, ..live.history.draw(&live.request.sampling) }
    }

    /// The same of the token after that, which is still to be counted.
    pub(crate) fn draft_draw_behind(&self, id: SequenceId) -> Draw<'_> {
        let live = &self.requests[&id];
        Draw { logprobs: None, ..live.history.draw_behind(&live.request.sampling) }
    }

    /// Drafts the token that was drawn so, or is to be; whether it makes sense to draft on. Until
    /// [`end_draft`](Self::end_draft) the draft counts as output.
    pub(crate) fn draw_draft(&mut self, id: SequenceId, answer: Answer<'_>) -> bool {
        let live = self.requests.get_mut(&id).expect("planned sequences live");
        let token = match answer {
            Answer::Drawn(token) => token.map(|token| token.id),
            Answer::Logits(row) => self.sampler.draw_id(row, &live.history.draw(&live.request.sampling)),
        };
        let Ok(token) = token else { return false };
        live.history.push(token);
        self.scheduler.push_draft(id, token);
        live.finish_after(token, self.context_length).is_none()
    }

    /// The draft is complete.
    pub(crate) fn end_draft(&mut self, id: SequenceId) {
        let live = self.requests.get_mut(&id).expect("planned sequences live");
        let sequence = self.scheduler.sequence(id).expect("planned sequences run");
        sequence.draft().iter().rev().for_each(|&token| live.history.pop(token));
    }

    /// How the tokens of a plan are drawn: after each token that is followed by one that is drawn, in their order.
    pub(crate) fn draws<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = Draw<'a>> {
        plan.chunks.iter().filter(|chunk| chunk.wants_token).flat_map(|chunk| {
            let live = &self.requests[&chunk.id];
            let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
            live.history.draws(sequence.draft(), &live.request.sampling)
        })
    }

    /// How the tokens of a plan are drawn that was decided before those before them are known ([`Scheduler::step_ahead`]).
    pub(crate) fn draws_ahead<'a>(&'a self, next: &'a Plan) -> impl Iterator<Item = Draw<'a>> {
        next.chunks.iter().map(|chunk| {
            let live = &self.requests[&chunk.id];
            live.history.draw_behind(&live.request.sampling)
        })
    }

    /// Whether anybody is still to be told of a token of the plan.
    pub(crate) fn any_lives(&self, plan: &Plan) -> bool {
        plan.chunks.iter().any(|chunk| self.requests.contains_key(&chunk.id))
    }

    /// The plan's tokens are computed, and there is an answer for each that is to be drawn after: tells the readers.
    pub(crate) fn advance<'a>(&mut self, plan: &Plan, mut answers: impl Iterator<Item = Answer<'a>>) {
        self.scheduler.advance(plan);
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token) {
            let mut rows = answers.by_ref().take(chunk.num_drafts + 1);
            // One that was launched ahead may have ended since.
            if self.requests.contains_key(&chunk.id) {
                let outcome = self.draw(chunk.id, &mut rows);
                self.tell_drawn(chunk, outcome);
            }
            rows.for_each(drop);
        }
        debug_assert!(answers.next().is_none(), "no row that nobody wants");
    }

    /// Collects in `drawn` the token after each row, as long as the draft had the one before. Each is drawn
    /// as it would be without a draft: from the same logits, after the same tokens, with the same random
    /// number. So a draft changes how many tokens a step yields, and not which.
    fn draw<'a>(
        &mut self,
        id: SequenceId,
        rows: &mut impl Iterator<Item = Answer<'a>>,
    ) -> Result<Option<FinishReason>, InvalidLogits> {
        let live = self.requests.get_mut(&id).expect("sampled sequences live");
        self.drawn.tokens.clear();
        self.drawn.num_accepted = 0;
        for row in rows {
            let token = match row {
                Answer::Drawn(token) => token?,
                Answer::Logits(row) => self.sampler.sample(row, &live.request.sampling, &live.history)?,
            };
            let token_id = token.id;
            self.drawn.tokens.push(token);
            live.history.push(token_id);
            let was_drafted = self.scheduler.push_token(id, token_id);
            self.drawn.num_accepted += usize::from(was_drafted);
            let finish = live.finish_after(token_id, self.context_length);
            if finish.is_some() || !was_drafted {
                return Ok(finish);
            }
        }
        unreachable!("nothing is drafted to follow the last row")
    }

    fn tell_drawn(&mut self, chunk: &Chunk, outcome: Result<Option<FinishReason>, InvalidLogits>) {
        let mut drawn = mem::take(&mut self.drawn);
        if chunk.num_drafts > 0 {
            self.tell_verified(chunk, drawn.num_accepted);
        }
        match (&self.requests[&chunk.id].reply, outcome) {
            (Reply::Tokens(sink), outcome) => {
                drawn.tokens.drain(..).for_each(|token| sink.send(TokenEvent::Token(token)));
                match outcome {
                    Ok(None) => {}
                    Ok(Some(reason)) => self.finish(chunk.id, reason),
                    Err(InvalidLogits) => self.fail(chunk.id),
                }
            }
            (_, Err(InvalidLogits)) => self.fail(chunk.id),
            (_, Ok(_)) => {
                let token = drawn.tokens.pop().expect("a token was drawn");
                if let Reply::Prefill(sink) = self.end(chunk.id).reply {
                    sink.end(PrefillEvent::FirstToken(token));
                }
            }
        }
        self.drawn = drawn;
    }

    fn tell_verified(&mut self, chunk: &Chunk, num_accepted: usize) {
        let live = self.requests.get_mut(&chunk.id).expect("sampled sequences live");
        live.draft_length.observe(chunk.num_drafts, num_accepted);
        let counts = DraftCounts { drafted: chunk.num_drafts as u64, accepted: num_accepted as u64 };
        self.draft_counters.add(counts);
        if let Reply::Tokens(sink) = &live.reply {
            sink.send(TokenEvent::Verified(counts));
        }
    }

    fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        if let Reply::Tokens(sink) = self.end(id).reply {
            sink.end(TokenEvent::Finished(reason));
        }
    }

    fn fail(&mut self, id: SequenceId) {
        let live = self.end(id);
        tracing::warn!(request = live.request.id, "the logits are not finite");
        live.reply.fail(EngineError::InvalidLogits);
    }

    /// Forgets a sequence here and in the scheduler; its reader is still to be told.
    fn end(&mut self, id: SequenceId) -> LiveRequest {
        self.scheduler.end(id);
        self.requests.remove(&id).expect("it ends once")
    }

    pub(crate) fn num_live(&self) -> usize {
        self.requests.len()
    }
}

impl LiveRequest {
    /// Why the sequence ends with `token`, its newest, if it does.
    fn finish_after(&self, token: u32, context_length: usize) -> Option<FinishReason> {
        self.request.finish_after(self.history.num_output_tokens(), token, context_length)
    }
}

impl Reply {
    fn fail(self, error: EngineError) {
        match self {
            Reply::Tokens(sink) => sink.end(TokenEvent::Failed(error)),
            Reply::Prefill(sink) => sink.end(PrefillEvent::Failed(error)),
            // Its future says that the engine is shutting down.
            Reply::Reservation(_) => {}
        }
    }
}
