//! The engine thread. It owns the executor and every live request, and advances them one step at a time.
//!
//! ```text
//! loop: receive commands (sleeping when no sequence can advance) -> plan, draft -> execute -> sample, tell readers
//! ```
//!
//! An executor that samples itself computes while this thread does other work. Then the next step is planned and
//! launched before this step's tokens are known, where possible ([`Scheduler::step_ahead`]). Commands, events and
//! accounting of one step are handled while the next one is computed:
//!
//! ```text
//! executor   |----- step n -----|---- step n+1 ----|---- step n+2 ----|
//! this thread  launch n+1 ...... collect n, tell, receive, launch n+2 .. collect n+1
//! ```
//!
//! Meanwhile it answers what other workers ask for, holds and reservations of cached prefixes; other commands wait for the step.
//!
//! A request is live from its `Submit` to its terminal event. Its blocks may live longer, with a hold. Whatever ends
//! the loop, even a panic, drops the live requests, and their sinks tell the readers.

use std::{
    collections::VecDeque,
    io, mem,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, TryRecvError},
    },
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockStorage, PagesAhead};
use baton_kv_events::{BlockHolder, CacheEvent};
use baton_model_spec::{Executor, SampledRow};
#[cfg(doc)]
use baton_scheduler::Scheduler;
use baton_scheduler::{SequenceId, StepPlan};
use tokio::sync::watch;

use crate::{
    batch::{Completion, announcing, batch, batch_ahead, heads},
    blending::Blender,
    cache_log::CacheLog,
    command::Command,
    events::EngineError,
    execution::{collect, execute, launch, least_left, mask},
    live::LiveRequests,
    speculation::Speculator,
    status::{DecodeStep, EngineLoad, EnginePace, Progress},
};

/// A thread that sleeps may wake up so much too late. For less, it looks again at once.
const SLACK: Duration = Duration::from_micros(60);

pub(crate) struct StepLoop {
    executor: Box<dyn Executor>,
    storage: Arc<BlockStorage>,
    pages: PagesAhead,
    vocab_size: usize,
    live: LiveRequests,
    speculator: Option<Speculator>,
    /// `None` if no sequence has a head.
    blender: Option<Blender>,
    /// The launched step whose tokens are not known yet.
    ahead: Option<Step>,
    /// Start of the oldest step under way.
    started: Moment,
    /// Since when sequences wait for the tokens of that step: the one before ended then, or planning it began.
    waiting_since: Instant,
    /// Reused from step to step.
    plans: Vec<StepPlan>,
    follows: Vec<usize>,
    inbox: Receiver<Command>,
    /// Commands that come before those in the inbox: they came while a step was computed, or woke the thread.
    deferred: VecDeque<Command>,
    load: watch::Sender<EngineLoad>,
    progress: Arc<Progress>,
    cache_log: CacheLog,
    token_budget: usize,
    clock: fn() -> Instant,
    began: Instant,
    thread_waits: fn() -> Duration,
}

/// A moment, and how long the engine's thread had waited for a processor until then.
#[derive(Clone, Copy)]
struct Moment {
    at: Instant,
    waited: Duration,
}

/// A planned step.
struct Step {
    plan: StepPlan,
    completions: Vec<Completion>,
    /// Whether the executor has begun it: it samples, and there is more than heads.
    is_launched: bool,
    /// The sequences of its rows whose masks the executor lacks, once for each row.
    masked: Vec<SequenceId>,
    /// Whether another step may be launched before this one is collected.
    can_be_followed: bool,
}

enum Next {
    Step,
    Shutdown,
}

impl StepLoop {
    /// # Errors
    /// When a thread is refused.
    #[allow(clippy::too_many_arguments)] // each is a part of the loop, given once
    pub(crate) fn new(
        executor: Box<dyn Executor>,
        speculator: Option<Speculator>,
        blender: Option<Blender>,
        storage: Arc<BlockStorage>,
        live: LiveRequests,
        inbox: Receiver<Command>,
        load: watch::Sender<EngineLoad>,
        progress: Arc<Progress>,
        cache_log: CacheLog,
        token_budget: usize,
        clock: fn() -> Instant,
        thread_waits: fn() -> Duration,
    ) -> io::Result<StepLoop> {
        let vocab_size = executor.vocab_size();
        Ok(StepLoop {
            executor,
            pages: PagesAhead::start(storage.clone())?,
            storage,
            vocab_size,
            live,
            speculator,
            blender,
            ahead: None,
            started: Moment { at: clock(), waited: Duration::ZERO },
            waiting_since: clock(),
            plans: Vec::new(),
            follows: Vec::new(),
            inbox,
            deferred: VecDeque::new(),
            load,
            progress,
            cache_log,
            token_budget,
            clock,
            began: clock(),
            thread_waits,
        })
    }

    /// Runs until shutdown or until the executor fails.
    pub(crate) fn run(mut self) -> Result<(), EngineError> {
        let result = self.run_steps();
        self.tell_all_cached();
        if let Err(error) = &result {
            tracing::error!(%error, num_live = self.live.num_live(), "the engine failed and ends; its live requests fail");
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
            match self.receive(!can_move)? {
                Next::Step => can_move = self.step()?,
                Next::Shutdown => return Ok(()),
            }
        }
    }

    /// Handles the commands in the inbox. With `may_sleep`, waits for the first one.
    fn receive(&mut self, may_sleep: bool) -> Result<Next, EngineError> {
        if may_sleep && self.deferred.is_empty() {
            self.tell_all_cached();
            let scheduler = &self.live.scheduler;
            if cfg!(debug_assertions) && scheduler.is_idle() {
                scheduler.check_integrity().expect("an idle pool has consistent accounting");
            }
            match self.inbox.recv() {
                Ok(command) => self.deferred.push_back(command),
                Err(_) => return Ok(Next::Shutdown),
            }
        }
        self.live.scheduler.set_time((self.clock)() - self.began);
        loop {
            match self.deferred.pop_front().map_or_else(|| self.inbox.try_recv(), Ok) {
                Ok(Command::Shutdown) | Err(TryRecvError::Disconnected) => return Ok(Next::Shutdown),
                Ok(command) => self.handle(command)?,
                Err(TryRecvError::Empty) => return Ok(Next::Step),
            }
        }
    }

    /// Until the launched step is computed, answers commands that neither begin nor end a sequence. They take no block of a
    /// sequence.
    fn hear(&mut self) -> Result<(), EngineError> {
        loop {
            let left = least_left(&mut *self.executor)?;
            if left.is_zero() {
                return Ok(());
            }
            let command = match left.checked_sub(SLACK) {
                Some(left) => self.inbox.recv_timeout(left).ok(),
                None => self.inbox.try_recv().ok(),
            };
            match command {
                None => std::hint::spin_loop(),
                Some(
                    command @ (Command::HoldCached { .. }
                    | Command::ReservePrefix { .. }
                    | Command::CachePrefix { .. }),
                ) => {
                    self.live.scheduler.set_time((self.clock)() - self.began);
                    self.handle(command)?;
                }
                Some(later) => self.deferred.push_back(later),
            }
        }
    }

    fn handle(&mut self, command: Command) -> Result<(), EngineError> {
        match command {
            Command::Submit(sequence, request) => self.live.submit(sequence, *request),
            Command::Decode { id, first, sink } => self.live.start_decode(id, first.id, sink),
            Command::Cancel(id) => self.live.cancel(id),
            Command::Release(id) => self.live.release(id),
            Command::GiveUpSlot(id) => self.live.give_up_slot(id),
            // A receiver that is gone does not matter: its `Release` follows.
            Command::HoldCached { id, hashes, reply } => {
                drop(reply.send(self.live.scheduler.hold_cached(id, &hashes)));
            }
            Command::ReservePrefix { id, hashes, least, reply } => {
                drop(reply.send(self.live.scheduler.reserve_prefix(id, &hashes, least)));
            }
            Command::Expect { id, block_idx, hash } => self.live.scheduler.expect(id, block_idx, hash),
            Command::CachePrefix { id, first, after, hashes } => {
                self.live.scheduler.cache_prefix(id, first, after, &hashes);
                self.tell_cached();
            }
            Command::RecallPreempted(resumptions) => self.live.recall_preempted(resumptions),
            Command::TellSpoiled(spoiled) => self.live.tell_spoiled(spoiled),
            Command::Resume { id, num_blocks } => {
                self.live.scheduler.resume(id, num_blocks);
                self.tell_cached();
            }
            Command::CheckIdle(reply) => {
                self.finish_ahead()?;
                drop(reply.send(self.live.check_idle()));
            }
            Command::Shutdown => unreachable!("`receive` handles it"),
        }
        Ok(())
    }

    /// Runs one step. False when no sequence can advance before the next command.
    fn step(&mut self) -> Result<bool, EngineError> {
        let step = match self.ahead.take() {
            Some(step) => step,
            None => {
                self.waiting_since = (self.clock)();
                let mut plan = self.plans.pop().unwrap_or_default();
                self.plan(&mut plan)?;
                if plan.chunks.is_empty() {
                    let can_move = !plan.is_empty();
                    self.plans.push(plan);
                    return Ok(can_move);
                }
                self.begin(plan)?
            }
        };
        self.look_ahead(&step)?;
        if step.is_launched {
            self.hear()?;
        }
        self.finish(step)?;
        // No request waits for the step ahead any more, and its blocks shall return.
        if self.ahead.as_ref().is_some_and(|ahead| !self.live.any_lives(&ahead.plan)) {
            self.finish_ahead()?;
        }
        Ok(true)
    }

    fn plan(&mut self, plan: &mut StepPlan) -> Result<(), EngineError> {
        self.live.plan(plan);
        self.pages.used(self.live.scheduler.num_used_blocks());
        if plan.chunks.is_empty() {
            // What ran may have been cancelled, and no step follows that would say so.
            self.progress.set_pace(self.live.pace(), None);
        }
        // Published first: a client that learns of its admission finds it counted, and its slot in the queue free.
        self.publish_load();
        self.progress.num_preempted.fetch_add(plan.preempted.len() as u64, Ordering::Relaxed);
        for admission in &plan.admitted {
            if let Some((num_prompt_tokens, num_cached_tokens)) = self.live.prompt_lookup(admission) {
                self.progress.admit(num_prompt_tokens, num_cached_tokens);
            }
            self.live.tell_admitted(admission);
        }
        for adoption in &plan.adopted {
            let num_tokens = self.live.tell_adopted(adoption);
            self.progress.num_cached_tokens.fetch_add(num_tokens as u64, Ordering::Relaxed);
        }
        let has_drafts = self.live.draft_forced(plan);
        match &mut self.speculator {
            Some(speculator) if !plan.chunks.is_empty() => speculator.draft(plan, &mut self.live),
            _ => {
                if has_drafts {
                    self.live.scheduler.plan_drafts(plan);
                }
                Ok(())
            }
        }
    }

    /// Launches the step if the executor samples. Otherwise `finish` computes it.
    fn begin(&mut self, plan: StepPlan) -> Result<Step, EngineError> {
        self.started = self.now();
        let completions = Completion::of_batch(&plan, &self.live, self.storage.layout().block_size);
        let samples = self.executor.sampling().is_some();
        self.live.begin_masks(&plan, samples)?;
        let (mut is_launched, mut can_be_followed) = (false, false);
        // A step of heads alone samples nothing.
        if samples && plan.chunks.iter().any(|chunk| !self.live.is_head(chunk)) {
            let (executor, batch) = (&mut *self.executor, batch(&self.live, &plan));
            let samplings: Vec<_> = self.live.samplings(&plan).collect();
            let mut on_layer = announcing(&completions, &self.live);
            let samples_all = launch(executor, &batch, &samplings, &[], &self.storage, &mut on_layer)?;
            // What follows would take the tokens of heads, too, from the device.
            can_be_followed = samples_all && batch.sequences.len() == plan.chunks.len();
            is_launched = true;
        }
        if is_launched {
            self.give_masks(&self.live.masked(&plan))?;
        }
        Ok(Step { plan, completions, is_launched, masked: Vec::new(), can_be_followed })
    }

    /// Plans and launches the step after `step`, which is being computed, if that is possible.
    fn look_ahead(&mut self, step: &Step) -> Result<(), EngineError> {
        if !step.can_be_followed {
            return Ok(());
        }
        let mut plan = self.plans.pop().unwrap_or_default();
        let live = &mut self.live;
        let is_decided = live.scheduler.step_ahead(&step.plan, &mut plan, &mut self.follows)
            // Drafts need the tokens first.
            && self.speculator.as_mut().is_none_or(|speculator| speculator.drafts_nothing(&plan, live))
            && !live.awaits_draft(&plan);
        if !is_decided {
            self.plans.push(plan);
            return Ok(());
        }
        self.pages.used(self.live.scheduler.num_used_blocks());
        let batch = batch_ahead(&self.live, &plan);
        let samplings: Vec<_> = self.live.samplings_ahead(&plan).collect();
        let executor = &mut *self.executor;
        let can_be_followed =
            launch(executor, &batch, &samplings, &self.follows, &self.storage, &mut |_| {})?;
        let masked = self.live.masked(&plan);
        self.ahead = Some(Step { plan, completions: Vec::new(), is_launched: true, masked, can_be_followed });
        Ok(())
    }

    /// Waits for the step's tokens, or computes and samples them, and tells the readers.
    fn finish(&mut self, step: Step) -> Result<(), EngineError> {
        let Step { plan, completions, is_launched, .. } = step;
        let StepLoop { executor, storage, live, .. } = self;
        let mut of_heads = Completion::of_heads(&plan, live, storage.layout().block_size);
        let mut blended: Vec<(SequenceId, usize, Vec<f32>)> = Vec::new();
        for (id, head) in heads(live, &plan) {
            let own: Vec<Completion> = of_heads.extract_if(.., |completion| completion.id == id).collect();
            let blender = self.blender.as_mut().expect("a sequence has a head only if the engine blends");
            let (reused, logits) =
                blender.blend(&mut **executor, &head, storage, &mut announcing(&own, live))?;
            blended.push((id, reused, logits));
        }
        blended.iter().for_each(|&(id, reused, _)| live.tell_blended(id, reused));
        let rows = {
            let mut on_layer = announcing(&completions, live);
            if is_launched {
                collect(&mut **executor, &mut on_layer)?
            } else {
                let batch = batch(live, &plan);
                let logits = match batch.sequences.is_empty() {
                    true => &[],
                    false => execute(&mut **executor, &batch, storage, &mut on_layer)?,
                };
                logits.chunks_exact(self.vocab_size).map(SampledRow::Logits).collect()
            }
        };
        let rows = in_order(&plan, rows, &blended);
        self.live.collect_masks()?;
        // Counted before a reader gets a token, so that it finds the token counted.
        self.progress.num_computed.fetch_add(plan.num_tokens() as u64, Ordering::Relaxed);
        self.live.scheduler.computed(self.ahead.is_some());
        let num_accepted = self.live.advance(&plan, rows.into_iter());
        self.forget_spoiled();
        if let Some(ahead) = &mut self.ahead {
            let masked = mem::take(&mut ahead.masked);
            self.live.begin_masks_ahead(&masked)?;
            self.give_masks(&masked)?;
        }
        let now = self.now();
        let elapsed = now.at - self.started.at;
        let waited = now.waited.saturating_sub(self.started.waited);
        self.started = now;
        // A blended head and scored tokens take another time than as many tokens of a full prefill.
        let is_scored = plan.chunks.iter().any(|chunk| chunk.num_scored > 0);
        if blended.is_empty() && !is_scored {
            self.live.scheduler.observe(&plan, elapsed, waited);
            if let Some(speculator) = &mut self.speculator {
                speculator.observe(&plan, self.live.scheduler.step_time(), elapsed);
            }
        }
        self.publish_rate();
        let pace = EnginePace { stepped_at: Some(now.at), ..self.live.pace() };
        let num_decodes = plan.num_decodes();
        let decoded = (num_decodes > 0).then(|| DecodeStep {
            seconds: (now.at - self.waiting_since).as_secs_f64(),
            num_tokens: (num_decodes + num_accepted) as f64 / num_decodes as f64,
        });
        self.waiting_since = now.at;
        self.progress.set_pace(pace, decoded);
        self.publish_load();
        self.plans.push(plan);
        Ok(())
    }

    /// The store of passages, as the prefix cache, keeps nothing that may have made logits which are not finite.
    fn forget_spoiled(&mut self) {
        let spoiled = self.live.take_spoiled();
        let Some(blender) = self.blender.as_mut().filter(|_| !spoiled.is_empty()) else { return };
        spoiled.iter().for_each(|request| blender.forget(request));
    }

    /// Waits for the masks of the step that was launched last, and gives them to the executor.
    fn give_masks(&mut self, masked: &[SequenceId]) -> Result<(), EngineError> {
        if masked.is_empty() {
            return Ok(());
        }
        self.live.collect_masks()?;
        mask(&mut *self.executor, &self.live.mask_bits(masked, self.vocab_size))
    }

    fn now(&self) -> Moment {
        Moment { at: (self.clock)(), waited: (self.thread_waits)() }
    }

    fn finish_ahead(&mut self) -> Result<(), EngineError> {
        self.ahead.take().map_or(Ok(()), |step| self.finish(step))
    }

    fn publish_rate(&self) {
        if let Some(step) = self.live.scheduler.step_time() {
            let rate = self.token_budget as f64 / step.of(self.token_budget);
            self.progress.prefill_rate.store(rate.to_bits(), Ordering::Relaxed);
        }
    }

    /// Tells readers what was stored and evicted, unless the log is locked: the next step tells it then, or this thread before it sleeps.
    fn tell_cached(&mut self) {
        self.cache_log.try_append(|| cache_events(&mut self.live, &mut self.blender));
    }

    /// The same. It waits for the log, as no step does.
    fn tell_all_cached(&mut self) {
        self.cache_log.append(BlockHolder::Pool, cache_events(&mut self.live, &mut self.blender));
    }

    fn publish_load(&mut self) {
        self.tell_cached();
        let load = self.live.load();
        self.load.send_if_modified(|current| mem::replace(current, load) != load);
    }
}

/// What the prefix cache and the store of passages have stored and evicted since they were last asked.
fn cache_events(live: &mut LiveRequests, blender: &mut Option<Blender>) -> Vec<CacheEvent> {
    let mut events = live.scheduler.take_cache_events();
    events.extend(blender.iter_mut().flat_map(Blender::take_events));
    events
}

/// The rows of a plan in the order of its chunks: those of its batch, and those of its heads that a token is sampled after.
fn in_order<'a>(
    plan: &StepPlan,
    batched: Vec<SampledRow<'a>>,
    heads: &'a [(SequenceId, usize, Vec<f32>)],
) -> Vec<SampledRow<'a>> {
    if heads.is_empty() {
        return batched;
    }
    let mut batched = batched.into_iter();
    let rows = plan.chunks.iter().flat_map(|chunk| -> Vec<SampledRow<'a>> {
        match heads.iter().find(|(id, ..)| *id == chunk.id) {
            Some((.., logits)) => {
                chunk.wants_token.then_some(SampledRow::Logits(logits)).into_iter().collect()
            }
            None => batched.by_ref().take(chunk.num_rows()).collect(),
        }
    });
    rows.collect()
}
