//! The requests that an engine works on, from submission to their terminal event: what is planned for
//! them, what is drawn from their logits, and who is told. It knows neither threads nor the executor.
//!
//! Dropping a live request tells its reader; see [`Sink`].

use std::collections::HashMap;

use crate::{
    block_pool::PoolReport,
    command::{Command, Commands, Owner, Reply, Submission, Ticket},
    events::{EngineError, PrefillEvent, Sink, TokenEvent},
    handle::{EngineLoad, IdleError, Reservation, max_token_events},
    request::{Request, SampledToken},
    sampler::{InvalidLogits, Sampler, TokenHistory},
    scheduler::{Admission, Chunk, Plan, Scheduler},
    sequence::SequenceId,
};

/// Every request of an engine, and its sequences.
pub(crate) struct LiveRequests {
    pub(crate) scheduler: Scheduler,
    requests: HashMap<SequenceId, LiveRequest>,
    sampler: Sampler,
    commands: Commands,
    context_length: usize,
    num_layers: usize,
}

struct LiveRequest {
    request: Request,
    history: TokenHistory,
    reply: Reply,
    /// Until it is admitted.
    ticket: Option<Ticket>,
}

impl LiveRequests {
    pub(crate) fn new(
        scheduler: Scheduler,
        commands: Commands,
        context_length: usize,
        num_layers: usize,
    ) -> LiveRequests {
        LiveRequests {
            scheduler,
            requests: HashMap::new(),
            sampler: Sampler::default(),
            commands,
            context_length,
            num_layers,
        }
    }

    pub(crate) fn submit(&mut self, submission: Submission) {
        let Submission { sequence, request, history, reply, ticket } = submission;
        self.requests.insert(sequence.id, LiveRequest { request, history, reply, ticket: Some(ticket) });
        self.scheduler.add(sequence);
    }

    /// Lets a reservation decode after `first`.
    pub(crate) fn start_decode(&mut self, id: SequenceId, first: u32, sink: Sink<TokenEvent>) {
        let live = self.requests.get_mut(&id).expect("a reservation lives until it is released or used");
        live.reply = Reply::Tokens(sink);
        self.scheduler.start_decode(id, first);
        live.history.push(first);
        self.finish_if_over(id, first);
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

    /// The plan's tokens are computed, and `rows` are the logits of those that want a token: draws them,
    /// and tells the readers.
    pub(crate) fn advance<'a>(&mut self, plan: &Plan, mut rows: impl Iterator<Item = &'a [f32]>) {
        self.scheduler.advance(plan);
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token) {
            let row = rows.next().expect("one row for each that wants one");
            match self.draw(chunk, row) {
                Ok(token) => self.tell_token(chunk.id, token),
                Err(InvalidLogits) => {
                    let live = self.end(chunk.id);
                    tracing::warn!(request = live.request.id, "the logits are not finite");
                    live.reply.fail(EngineError::InvalidLogits);
                }
            }
        }
        debug_assert!(rows.next().is_none(), "no row that nobody wants");
    }

    fn draw(&mut self, chunk: &Chunk, row: &[f32]) -> Result<SampledToken, InvalidLogits> {
        let live = &self.requests[&chunk.id];
        self.sampler.sample(row, &live.request.sampling, &live.history)
    }

    fn tell_token(&mut self, id: SequenceId, token: SampledToken) {
        let live = self.requests.get_mut(&id).expect("sampled sequences live");
        if let Reply::Tokens(sink) = &live.reply {
            let token_id = token.id;
            sink.send(TokenEvent::Token(token));
            live.history.push(token_id);
            self.scheduler.push_token(id, token_id);
            self.finish_if_over(id, token_id);
        } else if let Reply::Prefill(sink) = self.end(id).reply {
            sink.end(PrefillEvent::FirstToken(token));
        }
    }

    /// Ends the sequence if its newest token is its last.
    fn finish_if_over(&mut self, id: SequenceId, token: u32) {
        let live = &self.requests[&id];
        let num_output_tokens = live.history.num_output_tokens();
        let Some(reason) = live.request.finish_after(num_output_tokens, token, self.context_length) else {
            return;
        };
        if let Reply::Tokens(sink) = self.end(id).reply {
            sink.end(TokenEvent::Finished(reason));
        }
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
