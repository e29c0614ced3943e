//! The engine thread: owns the executor and every live request, and moves them a step at a time.
//!
//! ```text
//! loop: receive commands (sleeping when nothing can move) -> plan, draft -> execute -> draw and tell
//! ```
//!
//! A request is live from its `Submit` to its terminal event; its blocks may live longer, with a
//! hold. Whatever ends the loop, a panic included, drops the live requests, and their sinks tell the
//! readers.

use std::{
    any::Any,
    io, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, TryRecvError},
    },
    time::Instant,
};

use baton_kv_cache::{BlockId, BlockStorage};
use baton_model::{Batch, BatchSequence, ExecuteError, Executor};
use tokio::sync::watch;

use crate::{
    command::{Command, Reply},
    events::{EngineError, PrefillEvent, Sink},
    handle::{EngineLoad, Progress},
    live::LiveRequests,
    pages::PagesAhead,
    plan::Plan,
    speculation::Speculator,
};

pub(crate) struct StepLoop {
    executor: Box<dyn Executor>,
    storage: Arc<BlockStorage>,
    pages: PagesAhead,
    vocab_size: usize,
    live: LiveRequests,
    speculator: Option<Speculator>,
    /// Reused from step to step.
    plan: Plan,
    inbox: Receiver<Command>,
    load: watch::Sender<EngineLoad>,
    progress: Arc<Progress>,
    token_budget: usize,
    clock: fn() -> Instant,
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
    /// # Errors
    /// When there is no thread to be had.
    #[allow(clippy::too_many_arguments)] // each is a part of the loop, given once
    pub(crate) fn new(
        executor: Box<dyn Executor>,
        speculator: Option<Speculator>,
        storage: Arc<BlockStorage>,
        live: LiveRequests,
        inbox: Receiver<Command>,
        load: watch::Sender<EngineLoad>,
        progress: Arc<Progress>,
        token_budget: usize,
        clock: fn() -> Instant,
    ) -> io::Result<StepLoop> {
        let vocab_size = executor.vocab_size();
        Ok(StepLoop {
            executor,
            pages: PagesAhead::start(storage.clone())?,
            storage,
            vocab_size,
            live,
            speculator,
            plan: Plan::default(),
            inbox,
            load,
            progress,
            token_budget,
            clock,
        })
    }

    /// Runs until shutdown or until the executor fails.
    pub(crate) fn run(mut self) -> Result<(), EngineError> {
        let result = self.run_steps();
        if let Err(error) = &result {
            tracing::error!(%error, num_live = self.live.num_live(), "the engine ends");
            self.live.fail_all(error);
        }
        result
    }

    fn run_steps(&mut self) -> Result<(), EngineError> {
        self.executor.attach_thread()?;
        if let Some(speculator) = &mut self.speculator {
            speculator.attach_thread()?;
        }
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
            let scheduler = &self.live.scheduler;
            if cfg!(debug_assertions) && scheduler.is_idle() {
                scheduler.check_integrity().expect("an idle pool is whole");
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
            Command::Submit(submission) => self.live.submit(*submission),
            Command::Decode { id, first, sink } => self.live.start_decode(id, first.id, sink),
            Command::Cancel(id) => self.live.cancel(id),
            Command::Release(id) => self.live.release(id),
            // A reader that has left already does not matter: what it was to hold is released right after.
            Command::HoldCached { id, hashes, reply } => {
                drop(reply.send(self.live.scheduler.hold_cached(id, &hashes)));
            }
            Command::ReservePrefix { id, hashes, reply } => {
                drop(reply.send(self.live.scheduler.reserve_prefix(id, &hashes)));
            }
            Command::CachePrefix { id, hashes } => self.live.scheduler.cache_prefix(id, &hashes),
            Command::CheckIdle(reply) => drop(reply.send(self.live.check_idle())),
            Command::Shutdown => unreachable!("`receive` takes it"),
        }
    }

    /// One step; false when nothing can move before the next command.
    fn step(&mut self) -> Result<bool, EngineError> {
        let mut plan = mem::take(&mut self.plan);
        self.live.plan(&mut plan);
        self.pages.used(self.live.scheduler.num_used_blocks());
        // Whoever is told that it runs finds itself counted, and its place in the queue free.
        self.publish_load();
        for admission in &plan.admitted {
            self.live.tell_admitted(admission);
        }
        if !plan.chunks.is_empty() {
            if let Some(speculator) = &mut self.speculator {
                speculator.draft(&mut plan, &mut self.live)?;
            }
            let started = (self.clock)();
            let logits = execute(&mut *self.executor, &self.storage, &self.live, &plan)?;
            // Before anybody hears of a token: who counts then finds it counted.
            self.progress.num_computed.fetch_add(plan.num_tokens() as u64, Ordering::Relaxed);
            self.live.advance(&plan, logits, self.vocab_size);
            let elapsed = (self.clock)() - started;
            self.live.scheduler.observe(&plan, elapsed);
            if let Some(speculator) = &mut self.speculator {
                speculator.observe(&plan, self.live.scheduler.step_time(), elapsed);
            }
            self.publish_rate();
            self.publish_load();
        }
        let can_move = !plan.is_empty();
        self.plan = plan;
        Ok(can_move)
    }

    fn publish_rate(&self) {
        if let Some(step) = self.live.scheduler.step_time() {
            let rate = self.token_budget as f64 / step.of(self.token_budget);
            self.progress.prefill_rate.store(rate.to_bits(), Ordering::Relaxed);
        }
    }

    fn publish_load(&self) {
        let load = self.live.load();
        self.load.send_if_modified(|current| mem::replace(current, load) != load);
    }
}

/// Computes the plan's tokens, announcing layers on the way. Returns the logits after the last token of each
/// chunk that wants one, and after the token before its draft and each of the draft.
fn execute<'e>(
    executor: &'e mut dyn Executor,
    storage: &BlockStorage,
    live: &LiveRequests,
    plan: &Plan,
) -> Result<&'e [f32], EngineError> {
    let sequences = plan.chunks.iter().map(|chunk| {
        let sequence = live.scheduler.sequence(chunk.id).expect("planned sequences run");
        BatchSequence {
            tokens: &sequence.tokens_and_draft()[chunk.start_idx..chunk.start_idx + chunk.num_tokens],
            start_idx: chunk.start_idx,
            blocks: sequence.blocks(),
            num_logits: if chunk.wants_token { chunk.num_drafts + 1 } else { 0 },
        }
    });
    let batch = Batch { sequences: sequences.collect() };
    let block_size = storage.layout().block_size;
    let completions = batch
        .sequences
        .iter()
        .zip(&plan.chunks)
        .filter_map(|(sequence, chunk)| Completion::of(sequence, live.reply(chunk.id), block_size));
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
    let (batch, on_layer) = (&batch, &mut on_layer);
    // SAFETY: a chunk's tokens lie in blocks that its sequence allocated and that are not in the
    // prefix cache yet, so no other sequence has them; transfers write only reserved blocks, which
    // are in no batch, and read only what `on_layer` or a cached prefix announced. A running
    // prefill's blocks are not taken away while they are held.
    #[allow(unsafe_code)]
    let outcome = catch_panic(move || unsafe { executor.execute(batch, storage, on_layer) });
    Ok(outcome??)
}

/// A panic of `execute` as an error. What it left behind is not used again: the engine ends.
pub(crate) fn catch_panic<T>(execute: impl FnOnce() -> T) -> Result<T, EngineError> {
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

impl From<ExecuteError> for EngineError {
    fn from(error: ExecuteError) -> EngineError {
        EngineError::Executor { message: error.to_string() }
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
