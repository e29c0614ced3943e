//! How other threads use an engine: [`start`], and an [`EngineHandle`] that every submission goes
//! through. It validates, hashes and counts on the caller's thread; the rest happens on the engine's.

mod prefix;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use baton_kv_cache::{BlockId, BlockStorage, HashRoot};
use baton_model::{Executor, SampledToken};
use baton_request::{InvalidRequest, Problem, Request};
use tokio::sync::{oneshot, watch};

pub use prefix::{CachedPrefix, PrefixReservation};

use crate::{
    block_pool::{IntegrityError, PoolReport},
    command::{Command, Commands, Owner, Reply, Submission, Ticket},
    config::{EngineConfig, StartError},
    events::{EngineError, PrefillEvents, Sink, TokenStream},
    live::LiveRequests,
    sampler::TokenHistory,
    sequence::{Role, Sequence, SequenceId},
    speculation::{DraftCounters, DraftCounts, Speculation, Speculator},
    step_loop::StepLoop,
};

/// Starts an engine on a thread of its own. It ends with [`EngineHandle::shutdown`], when its
/// [`EngineThread`] is dropped, or when an executor fails.
///
/// # Errors
/// When the configuration makes no sense, a draft model does not fit, or memory or a thread is refused.
///
/// # Panics
/// When a draft model's blocks have not the size of the executor's.
pub fn start(
    executor: Box<dyn Executor>,
    speculation: Option<Speculation>,
    config: EngineConfig,
) -> Result<(EngineHandle, EngineThread), StartError> {
    config.validate()?;
    let layout = executor.kv_layout();
    let storage = BlockStorage::new(layout, config.num_blocks).map_err(|source| StartError::Memory {
        num_blocks: config.num_blocks,
        block_bytes: layout.block_bytes(),
        source,
    })?;
    start_over(storage, executor, speculation, config)
}

/// The same over blocks that are there, such as those of a device.
///
/// # Errors
/// As [`start`].
///
/// # Panics
/// As [`start`], and when `storage` has not the blocks of `config` in the layout of `executor`.
pub fn start_over(
    storage: BlockStorage,
    executor: Box<dyn Executor>,
    speculation: Option<Speculation>,
    mut config: EngineConfig,
) -> Result<(EngineHandle, EngineThread), StartError> {
    config.validate()?;
    let layout = executor.kv_layout();
    assert_eq!((storage.num_blocks(), *storage.layout()), (config.num_blocks, layout), "blocks of an engine");
    config.context_length = config.context_length.min(config.num_blocks.saturating_mul(layout.block_size));
    let storage = Arc::new(storage);
    let (commands, inbox) = mpsc::channel();
    let draft_counters = Arc::new(DraftCounters::default());
    let progress = Arc::new(Progress::default());
    let drafter = speculation.as_ref().map(|speculation| speculation.drafter.name());
    let speculator = match speculation {
        Some(speculation) => {
            Some(Speculator::new(speculation, &config, executor.vocab_size(), layout.block_size)?)
        }
        None => None,
    };
    let (load_sender, load) = watch::channel(EngineLoad::idle(config.num_blocks));
    let handle = EngineHandle {
        shared: Arc::new(Shared {
            storage: storage.clone(),
            vocab_size: executor.vocab_size(),
            commands: commands.clone(),
            next_id: AtomicU64::new(0),
            num_waiting: Arc::new(AtomicUsize::new(0)),
            is_closing: AtomicBool::new(false),
            load,
            drafter,
            draft_counters: draft_counters.clone(),
            progress: progress.clone(),
            config: config.clone(),
        }),
    };
    let live = LiveRequests::new(&config, &layout, commands, draft_counters);
    let (token_budget, clock) = (config.token_budget, config.clock);
    let step_loop =
        StepLoop::new(executor, speculator, storage, live, inbox, load_sender, progress, token_budget, clock)
            .map_err(|source| StartError::Thread { source })?;
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(|| step_loop.run())
        .map_err(|source| StartError::Thread { source })?;
    Ok((handle.clone(), EngineThread { thread: Some(thread), handle }))
}

/// Speaks to an engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    storage: Arc<BlockStorage>,
    config: EngineConfig,
    vocab_size: usize,
    commands: Commands,
    next_id: AtomicU64,
    num_waiting: Arc<AtomicUsize>,
    is_closing: AtomicBool,
    load: watch::Receiver<EngineLoad>,
    drafter: Option<&'static str>,
    draft_counters: Arc<DraftCounters>,
    progress: Arc<Progress>,
}

/// What the engine's thread tells of its work.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) num_computed: AtomicU64,
    /// The bits of a number of tokens a second; 0 as long as nothing is known.
    pub(crate) prefill_rate: AtomicU64,
}

/// The engine's thread.
#[derive(Debug)]
pub struct EngineThread {
    thread: Option<JoinHandle<Result<(), EngineError>>>,
    handle: EngineHandle,
}

/// How busy an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLoad {
    /// Sequences and reservations that wait for blocks or a place.
    pub num_waiting: usize,
    /// Sequences that hold blocks, reserved ones included.
    pub num_running: usize,
    /// Blocks without owner; the prefix cache may use them meanwhile.
    pub num_free_blocks: usize,
    /// All blocks.
    pub num_total_blocks: usize,
    /// Tokens to be computed before everything here decodes.
    pub num_queued_tokens: usize,
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// Nothing will change that.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// Try again later, or elsewhere.
    #[error("{num_waiting} requests wait, of {max_waiting} that may")]
    Full {
        /// Waiting now.
        num_waiting: usize,
        /// The limit.
        max_waiting: usize,
    },
    /// Go elsewhere.
    #[error("the engine is shutting down")]
    ShuttingDown,
}

/// Why an engine is not idle and whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdleError {
    /// Something has not been returned.
    #[error("not idle: {num_waiting} waiting, {num_running} running or reserved, {num_holds} held")]
    Busy {
        /// In the queue.
        num_waiting: usize,
        /// Holding blocks.
        num_running: usize,
        /// Prefilled blocks held from outside.
        num_holds: usize,
    },
    /// The books are wrong: a bug.
    #[error(transparent)]
    Integrity(#[from] IntegrityError),
    /// The engine has ended.
    #[error("the engine has ended")]
    Ended,
}

/// The blocks of a prefilled prompt. They stay as they are until this is dropped, also when the
/// prefill has ended, failed or was cancelled.
#[derive(Debug)]
pub struct HeldBlocks {
    _owner: Owner,
}

/// Blocks set aside for a prompt that is computed elsewhere, and a place to decode it. Dropping it
/// returns both.
#[derive(Debug)]
pub struct Reservation {
    pub(crate) owner: Owner,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) num_cached_blocks: usize,
    pub(crate) max_events: usize,
}

impl Reservation {
    /// The sequence's block table: just enough for the KV of prompt and delivered output.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Blocks at the front that hold their KV already. They are shared: never write them.
    pub fn num_cached_blocks(&self) -> usize {
        self.num_cached_blocks
    }
}

impl EngineHandle {
    /// The memory of the blocks.
    pub fn storage(&self) -> &Arc<BlockStorage> {
        &self.shared.storage
    }

    /// Ids in requests are below this.
    pub fn vocab_size(&self) -> usize {
        self.shared.vocab_size
    }

    /// Longest sequence, prompt and output together: what the configuration allows and the pool can hold.
    pub fn context_length(&self) -> usize {
        self.shared.config.context_length
    }

    /// Computes the prompt here and decodes here.
    ///
    /// # Errors
    /// When the request is invalid, the queue is full, or the engine ends.
    pub fn generate(&self, request: Request) -> Result<TokenStream, SubmitError> {
        let (sink, events) = Sink::new(self.max_token_events(&request));
        let cancel = self.submit(request, Role::Generate, Reply::Tokens(sink), Command::Cancel)?;
        Ok(TokenStream { events, _cancel: cancel })
    }

    /// Computes the prompt for another engine: ends after the first token, and keeps the blocks until
    /// the [`HeldBlocks`] are dropped.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn prefill(&self, request: Request) -> Result<(PrefillEvents, HeldBlocks), SubmitError> {
        let layout = self.shared.storage.layout();
        // Every piece in an event of its own, the cached prefix, `Started` and the terminal one.
        let num_pieces = layout.num_blocks_for(request.num_known_tokens()) * layout.num_layers;
        let (sink, events) = Sink::new(num_pieces + 3);
        let cancel = self.submit(request, Role::Prefill, Reply::Prefill(sink), Command::Cancel)?;
        let owner = Owner::new(cancel.id, self.shared.commands.clone(), Command::Release);
        Ok((PrefillEvents { events, _cancel: cancel }, HeldBlocks { _owner: owner }))
    }

    /// Waits until there are blocks for a prompt that is computed elsewhere, and a place to decode it.
    /// First come, first served, together with what [`generate`](Self::generate) and
    /// [`prefill`](Self::prefill) queue. Dropping the future leaves the queue.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub async fn reserve(&self, request: Request) -> Result<Reservation, SubmitError> {
        let (reply, granted) = oneshot::channel();
        let place = self.submit(request, Role::Decode, Reply::Reservation(Some(reply)), Command::Release)?;
        let reservation = granted.await.map_err(|_| SubmitError::ShuttingDown)?;
        place.disarm();
        Ok(reservation)
    }

    /// Decodes after `first`, the KV of the whole prompt being in the reservation's blocks now. The
    /// events are those after `first`: [`Finished`](crate::TokenEvent::Finished) at once if `first`
    /// ends the sequence.
    ///
    /// # Errors
    /// When `first` is no token of this model, or the engine ends.
    pub fn decode(&self, reservation: Reservation, first: SampledToken) -> Result<TokenStream, SubmitError> {
        let vocab_size = self.shared.vocab_size;
        if first.id as usize >= vocab_size {
            return Err(
                InvalidRequest::new("first", Problem::UnknownToken { token: first.id, vocab_size }).into()
            );
        }
        let id = reservation.owner.id;
        let (sink, events) = Sink::new(reservation.max_events);
        self.send(Command::Decode { id, first, sink })?;
        reservation.owner.disarm();
        let cancel = Owner::new(id, self.shared.commands.clone(), Command::Cancel);
        Ok(TokenStream { events, _cancel: cancel })
    }

    /// The engine's load as it changes. Closed when the engine has ended.
    pub fn load(&self) -> watch::Receiver<EngineLoad> {
        self.shared.load.clone()
    }

    /// The drafter's name, "ngram" or "draft", and what it has drafted; `None` without one.
    pub fn drafts(&self) -> Option<(&'static str, DraftCounts)> {
        self.shared.drafter.map(|drafter| (drafter, self.shared.draft_counters.read()))
    }

    /// Tokens whose KV was computed here so far, drafts included.
    pub fn num_computed_tokens(&self) -> u64 {
        self.shared.progress.num_computed.load(Ordering::Relaxed)
    }

    /// About what a prompt of so many tokens takes to compute by itself, by what steps took; `None` before the first.
    pub fn prefill_time(&self, num_tokens: usize) -> Option<Duration> {
        let rate = self.prefill_rate()?;
        Duration::try_from_secs_f64(num_tokens as f64 / rate).ok()
    }

    /// Tokens a second of a prompt that is computed by itself; `None` before the first step.
    pub fn prefill_rate(&self) -> Option<f64> {
        let rate = f64::from_bits(self.shared.progress.prefill_rate.load(Ordering::Relaxed));
        (rate > 0.0).then_some(rate)
    }

    /// Whether everything that was given out is back and the pool's books are right. What was dropped
    /// before the call counts as returned.
    ///
    /// # Errors
    /// When something is missing or wrong.
    pub async fn check_idle_integrity(&self) -> Result<PoolReport, IdleError> {
        let (reply, report) = oneshot::channel();
        self.shared.commands.send(Command::CheckIdle(reply)).map_err(|_| IdleError::Ended)?;
        report.await.map_err(|_| IdleError::Ended)?
    }

    /// Takes nothing new, ends every stream, then the thread.
    pub fn shutdown(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
        let _ = self.shared.commands.send(Command::Shutdown);
    }

    fn submit(
        &self,
        request: Request,
        role: Role,
        reply: Reply,
        at_drop: fn(SequenceId) -> Command,
    ) -> Result<Owner, SubmitError> {
        let shared = &*self.shared;
        if shared.is_closing.load(Ordering::Acquire) {
            return Err(SubmitError::ShuttingDown);
        }
        let config = &shared.config;
        request.validate(shared.vocab_size, config.context_length)?;
        let ticket = Ticket::take(&shared.num_waiting, config.max_waiting)
            .map_err(|num_waiting| SubmitError::Full { num_waiting, max_waiting: config.max_waiting })?;

        let id = self.next_id();
        let root =
            config.prefix_cache.then(|| HashRoot::new(&config.model_revision, "", &request.cache_salt));
        let tokens = [&request.prompt[..], &request.output].concat();
        let max_num_tokens = request.max_num_tokens(config.context_length);
        let block_size = shared.storage.layout().block_size;
        let sequence = Sequence::new(id, role, tokens, max_num_tokens, block_size, root);
        let history = TokenHistory::new(&request);
        let submission = Submission { sequence, request, history, reply, ticket };
        self.send(Command::Submit(Box::new(submission)))?;
        Ok(Owner::new(id, shared.commands.clone(), at_drop))
    }

    fn next_id(&self) -> SequenceId {
        SequenceId(self.shared.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn send(&self, command: Command) -> Result<(), SubmitError> {
        self.shared.commands.send(command).map_err(|_| SubmitError::ShuttingDown)
    }

    fn max_token_events(&self, request: &Request) -> usize {
        max_token_events(request, self.shared.config.context_length)
    }
}

/// The start, every token that is left to the request, a draft before each, and the terminal event.
pub(crate) fn max_token_events(request: &Request, context_length: usize) -> usize {
    2 * request.max_num_tokens(context_length).saturating_sub(request.num_known_tokens()) + 2
}

impl EngineLoad {
    pub(crate) fn idle(num_blocks: usize) -> EngineLoad {
        EngineLoad {
            num_waiting: 0,
            num_running: 0,
            num_free_blocks: num_blocks,
            num_total_blocks: num_blocks,
            num_queued_tokens: 0,
        }
    }
}

impl EngineThread {
    /// Waits for the engine to end. Blocks the calling thread.
    ///
    /// # Errors
    /// What ended it, when it was not a shutdown.
    pub fn join(mut self) -> Result<(), EngineError> {
        let thread = self.thread.take().expect("only join takes it");
        thread.join().unwrap_or_else(|panic| Err(EngineError::from_panic(&*panic)))
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.handle.shutdown();
        }
    }
}
