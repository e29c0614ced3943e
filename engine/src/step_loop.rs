//! The engine thread: owns the scheduler, the executor and every live request.
//!
//! ```text
//! loop: receive commands (sleeping when nothing can move) -> plan -> execute -> sample -> tell
//! ```
//!
//! A request lives here from its `Submit` to its terminal event; its blocks may live longer, with a
//! hold. Whatever ends the loop, a panic included, drops the live requests, and their sinks tell the
//! readers.

use std::{
    any::Any,
    collections::HashMap,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, TryRecvError},
    },
};

use baton_kv_cache::{BlockId, BlockStorage};
use baton_model::{Batch, BatchSequence, Executor};
use tokio::sync::watch;

use crate::{
    block_pool::PoolReport,
    command::{Command, Commands, Owner, Reply, Submission, Ticket},
    config::EngineConfig,
    events::{EngineError, PrefillEvent, Sink, TokenEvent},
    handle::{EngineLoad, IdleError, Reservation, max_token_events},
    request::{Request, SampledToken},
    sampler::{InvalidLogits, Sampler, TokenHistory},
    scheduler::{Admission, Plan, Scheduler, SchedulerConfig},
    sequence::SequenceId,
};

pub(crate) struct StepLoop {
    executor: Box<dyn Executor>,
    storage: Arc<BlockStorage>,
    context_length: usize,
    vocab_size: usize,
    scheduler: Scheduler,
    sampler: Sampler,
    live: HashMap<SequenceId, Live>,
    /// Reused from step to step.
    plan: Plan,
    commands: Commands,
    inbox: Receiver<Command>,
    load: watch::Sender<EngineLoad>,
}

struct Live {
    request: Request,
    history: TokenHistory,
    reply: Reply,
    /// Until it is admitted.
    ticket: Option<Ticket>,
}

/// Blocks that a chunk of a prefill completes, to be announced layer by layer.
struct Completion<'a> {
    sink: &'a Sink<PrefillEvent>,
    first_block_idx: usize,
    blocks: Vec<BlockId>,
}

enum Next {
    Step,
    Shutdown,
}

impl StepLoop {
    pub(crate) fn new(
        executor: Box<dyn Executor>,
        storage: Arc<BlockStorage>,
        config: &EngineConfig,
        commands: Commands,
        inbox: Receiver<Command>,
        load: watch::Sender<EngineLoad>,
    ) -> StepLoop {
        let scheduler = Scheduler::new(SchedulerConfig {
            num_blocks: config.num_blocks,
            block_size: storage.layout().block_size,
            max_running: config.max_running,
            token_budget: config.token_budget,
        });
        StepLoop {
            vocab_size: executor.vocab_size(),
            executor,
            storage,
            context_length: config.context_length,
            scheduler,
            sampler: Sampler::default(),
            live: HashMap::new(),
            plan: Plan::default(),
            commands,
            inbox,
            load,
        }
    }

    /// Runs until shutdown or until the executor fails.
    pub(crate) fn run(mut self) -> Result<(), EngineError> {
        let result = self.run_steps();
        if let Err(error) = &result {
            tracing::error!(%error, num_live = self.live.len(), "the engine ends");
            for (_, live) in mem::take(&mut self.live) {
                live.reply.fail(error.clone());
            }
        }
        result
    }

    fn run_steps(&mut self) -> Result<(), EngineError> {
        let mut can_move = true;
        loop {
            match self.receive(!can_move) {
                Next::Step => can_move = self.step()?,
                Next::Shutdown => return Ok(()),
            }
        }
    }

    /// Takes what is in the inbox; when asked to, sleeps until something is.
    fn receive(&mut self, may_sleep: bool) -> Next {
        if may_sleep {
            if cfg!(debug_assertions) && self.scheduler.is_idle() {
                self.scheduler.check_integrity().expect("an idle pool is whole");
            }
            match self.inbox.recv() {
                Ok(Command::Shutdown) | Err(_) => return Next::Shutdown,
                Ok(command) => self.handle(command),
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(Command::Shutdown) | Err(TryRecvError::Disconnected) => return Next::Shutdown,
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => return Next::Step,
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.submit(*submission),
            Command::Decode { id, first, sink } => self.start_decode(id, first.id, sink),
            Command::Cancel(id) => {
                if let Some(live) = self.live.remove(&id) {
                    tracing::debug!(request = live.request.id, sequence = %id, "cancelled");
                    self.scheduler.end(id);
                }
            }
            Command::Release(id) => {
                self.scheduler.release(id);
                // A reservation is over with this; a prefill goes on for its reader.
                if self.live.get(&id).is_some_and(|live| matches!(live.reply, Reply::Reservation(_))) {
                    self.live.remove(&id);
                }
            }
            // A reader that has left already does not matter.
            Command::CheckIdle(reply) => drop(reply.send(self.check_idle())),
            Command::Shutdown => unreachable!("`receive` takes it"),
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { sequence, request, history, reply, ticket } = submission;
        self.live.insert(sequence.id, Live { request, history, reply, ticket: Some(ticket) });
        self.scheduler.add(sequence);
    }

    fn start_decode(&mut self, id: SequenceId, first: u32, sink: Sink<TokenEvent>) {
        let live = self.live.get_mut(&id).expect("a reservation lives until it is released or used");
        live.reply = Reply::Tokens(sink);
        self.scheduler.start_decode(id, first);
        live.history.push(first);
        self.finish_if_over(id, first);
    }

    fn check_idle(&self) -> Result<PoolReport, IdleError> {
        let report = self.scheduler.check_integrity()?;
        if self.scheduler.is_idle() && self.live.is_empty() {
            return Ok(report);
        }
        Err(IdleError::Busy {
            num_waiting: self.scheduler.num_waiting(),
            num_running: self.scheduler.num_running(),
            num_holds: self.scheduler.num_holds(),
        })
    }

    /// One step; false when nothing can move before the next command.
    fn step(&mut self) -> Result<bool, EngineError> {
        let mut plan = mem::take(&mut self.plan);
        self.scheduler.step(&mut plan);
        // Whoever is told that it runs finds itself counted, and its place in the queue free.
        for admission in &plan.admitted {
            self.live.get_mut(&admission.id).expect("who waits is alive").ticket = None;
        }
        self.publish_load();
        for admission in &plan.admitted {
            self.tell_admitted(admission);
        }
        if !plan.chunks.is_empty() {
            let tokens = self.execute(&plan)?;
            self.scheduler.advance(&plan);
            self.tell_tokens(&plan, tokens);
            self.publish_load();
        }
        let can_move = !plan.is_empty();
        self.plan = plan;
        Ok(can_move)
    }

    fn tell_admitted(&mut self, admission: &Admission) {
        let live = self.live.get_mut(&admission.id).expect("who waits is alive");
        let sequence = self.scheduler.sequence(admission.id).expect("it was admitted");
        match &mut live.reply {
            Reply::Prefill(sink) => {
                let cached_tokens = sequence.num_cached_tokens().min(live.request.prompt.len());
                sink.send(PrefillEvent::Started { cached_tokens });
                if admission.num_cached_blocks > 0 {
                    sink.send(PrefillEvent::Ready {
                        layers: 0..self.storage.layout().num_layers,
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

    /// Computes the plan's tokens, announcing layers on the way. Returns what was sampled, in the
    /// order of the chunks that want a token.
    fn execute(&mut self, plan: &Plan) -> Result<Vec<Result<SampledToken, InvalidLogits>>, EngineError> {
        let (scheduler, live) = (&self.scheduler, &self.live);
        let sequences = plan.chunks.iter().map(|chunk| {
            let sequence = scheduler.sequence(chunk.id).expect("planned sequences run");
            BatchSequence {
                tokens: &sequence.tokens()[chunk.start_idx..chunk.start_idx + chunk.num_tokens],
                start_idx: chunk.start_idx,
                blocks: sequence.blocks(),
                num_logits: usize::from(chunk.wants_token),
            }
        });
        let batch = Batch { sequences: sequences.collect() };
        let block_size = self.storage.layout().block_size;
        let completions = batch
            .sequences
            .iter()
            .zip(&plan.chunks)
            .filter_map(|(sequence, chunk)| Completion::of(sequence, &live[&chunk.id].reply, block_size));
        let completions: Vec<_> = completions.collect();
        let mut on_layer = |layer_idx: usize| {
            for completion in &completions {
                completion.sink.send(PrefillEvent::Ready {
                    layers: layer_idx..layer_idx + 1,
                    first_block_idx: completion.first_block_idx,
                    blocks: completion.blocks.clone(),
                });
            }
        };
        let (executor, storage) = (&mut self.executor, &*self.storage);
        let (batch, on_layer) = (&batch, &mut on_layer);
        // SAFETY: a chunk's tokens lie in blocks that its sequence allocated and that are not in the
        // prefix cache yet, so no other sequence has them; transfers write only reserved blocks, which
        // are in no batch, and read only what `on_layer` or a cached prefix announced. A running
        // prefill's blocks are not taken away while they are held.
        #[allow(unsafe_code)]
        let outcome = catch_panic(move || unsafe { executor.execute(batch, storage, on_layer) });
        let logits = outcome?.map_err(|error| EngineError::Executor { message: error.to_string() })?;

        let rows = logits.chunks_exact(self.vocab_size);
        let sampled = plan.chunks.iter().filter(|chunk| chunk.wants_token);
        debug_assert_eq!(rows.len(), sampled.clone().count(), "one row for each that wants one");
        let tokens = sampled.zip(rows).map(|(chunk, row)| {
            let live = &live[&chunk.id];
            self.sampler.sample(row, &live.request.sampling, &live.history)
        });
        Ok(tokens.collect())
    }

    fn tell_tokens(&mut self, plan: &Plan, tokens: Vec<Result<SampledToken, InvalidLogits>>) {
        let sampled = plan.chunks.iter().filter(|chunk| chunk.wants_token);
        for (chunk, token) in sampled.zip(tokens) {
            match token {
                Ok(token) => self.tell_token(chunk.id, token),
                Err(InvalidLogits) => {
                    let live = self.end(chunk.id);
                    tracing::warn!(request = live.request.id, "the logits are not finite");
                    live.reply.fail(EngineError::InvalidLogits);
                }
            }
        }
    }

    fn tell_token(&mut self, id: SequenceId, token: SampledToken) {
        let live = self.live.get_mut(&id).expect("sampled sequences live");
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
        let live = &self.live[&id];
        let num_output_tokens = live.history.num_output_tokens();
        let Some(reason) = live.request.finish_after(num_output_tokens, token, self.context_length) else {
            return;
        };
        if let Reply::Tokens(sink) = self.end(id).reply {
            sink.end(TokenEvent::Finished(reason));
        }
    }

    /// Forgets a sequence here and in the scheduler; its reader is still to be told.
    fn end(&mut self, id: SequenceId) -> Live {
        self.scheduler.end(id);
        self.live.remove(&id).expect("it ends once")
    }

    fn publish_load(&self) {
        let load = EngineLoad {
            num_waiting: self.scheduler.num_waiting(),
            num_running: self.scheduler.num_running(),
            num_free_blocks: self.scheduler.num_free_blocks(),
            num_total_blocks: self.storage.num_blocks(),
            num_queued_tokens: self.scheduler.num_queued_tokens(),
        };
        self.load.send_if_modified(|current| mem::replace(current, load) != load);
    }
}

/// A panic of `execute` as an error. What it left behind is not used again: the engine ends.
fn catch_panic<T>(execute: impl FnOnce() -> T) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(execute)).map_err(|panic| EngineError::from_panic(&*panic))
}

impl<'a> Completion<'a> {
    /// What computing this part of a sequence completes, if somebody waits for blocks.
    fn of(sequence: &BatchSequence<'_>, reply: &'a Reply, block_size: usize) -> Option<Completion<'a>> {
        let Reply::Prefill(sink) = reply else { return None };
        let end = sequence.start_idx + sequence.tokens.len();
        let first = sequence.start_idx / block_size;
        // With the prompt its last block is complete, too, however full.
        let last = if sequence.num_logits > 0 { end.div_ceil(block_size) } else { end / block_size };
        let blocks = sequence.blocks[first..last.max(first)].to_vec();
        (first < last).then_some(Completion { sink, first_block_idx: first, blocks })
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

impl EngineError {
    pub(crate) fn from_panic(panic: &(dyn Any + Send)) -> EngineError {
        let message = panic
            .downcast_ref::<&str>()
            .map(|message| message.to_string())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".into());
        EngineError::Panicked { message }
    }
}
