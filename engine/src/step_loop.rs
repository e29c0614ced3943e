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
    io, mem,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, TryRecvError},
    },
    time::Instant,
};

use baton_kv_cache::BlockStorage;
use baton_model::{Answer, Executor};
use tokio::sync::watch;

use crate::{
    command::Command,
    compute::{Completion, announcing, batch, collect, execute, launch},
    events::EngineError,
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
            self.compute(&plan)?;
        }
        let can_move = !plan.is_empty();
        self.plan = plan;
        Ok(can_move)
    }

    /// Computes the plan's tokens and draws those that follow, or has them drawn, and tells the readers.
    fn compute(&mut self, plan: &Plan) -> Result<(), EngineError> {
        let started = (self.clock)();
        let StepLoop { executor, storage, live, .. } = self;
        let completions = Completion::all(plan, live, storage.layout().block_size);
        let answers = {
            let batch = batch(live, plan);
            let mut on_layer = announcing(&completions, live);
            if executor.drawing().is_some() {
                let draws: Vec<_> = live.draws(plan).collect();
                launch(&mut **executor, &batch, &draws, storage, &mut on_layer)?;
                collect(&mut **executor, &mut on_layer)?
            } else {
                let logits = execute(&mut **executor, &batch, storage, &mut on_layer)?;
                logits.chunks_exact(self.vocab_size).map(Answer::Logits).collect()
            }
        };
        // Before anybody hears of a token: who counts then finds it counted.
        self.progress.num_computed.fetch_add(plan.num_tokens() as u64, Ordering::Relaxed);
        self.live.advance(plan, answers.into_iter());
        let elapsed = (self.clock)() - started;
        self.live.scheduler.observe(plan, elapsed);
        if let Some(speculator) = &mut self.speculator {
            speculator.observe(plan, self.live.scheduler.step_time(), elapsed);
        }
        self.publish_rate();
        self.publish_load();
        Ok(())
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
