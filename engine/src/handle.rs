//! How other threads use an engine: an [`EngineHandle`], through which every submission goes. It validates, hashes
//! and counts on the caller's thread. The rest happens on the engine's thread.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use baton_cost::{StepLine, StepYield};
use baton_grammar::{GrammarError, TokenMatcher};
use baton_kv_cache::{BlockId, BlockStorage};
use baton_model_spec::SampledToken;
use baton_request::{BlendMarks, InvalidRequest, Problem, Request};
use baton_scheduler::{MAX_REST, PoolReport, Sequence, SequenceId, SequenceRole};
use tokio::sync::{oneshot, watch};

use crate::{
    blending::{BlendCounters, BlendCounts, hash_root},
    cache_log::CacheLog,
    command::{Command, Commands, DropCommand},
    config::EngineConfig,
    events::{DraftCounts, Sink},
    live_request::{Grant, LiveRequest, QueueSlot, ReplyChannel},
    status::{DraftCounters, EngineLoad, EnginePace, EngineTotals, IdleError, Progress},
    streams::{PrefillEvents, TokenStream},
    submission::Submission,
};

/// Sends commands to an engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(crate) state: Arc<HandleState>,
}

#[derive(Debug)]
pub(crate) struct HandleState {
    pub(crate) storage: Arc<BlockStorage>,
    pub(crate) config: EngineConfig,
    pub(crate) vocab_size: usize,
    pub(crate) commands: Commands,
    pub(crate) next_id: AtomicU64,
    pub(crate) num_waiting: Arc<AtomicUsize>,
    pub(crate) is_closing: AtomicBool,
    pub(crate) load: watch::Receiver<EngineLoad>,
    pub(crate) drafter: Option<&'static str>,
    pub(crate) draft_counters: Arc<DraftCounters>,
    pub(crate) blend_counters: Arc<BlendCounters>,
    /// Tokens of the longest head that the executor blends. 0: it does not blend.
    pub(crate) max_blended_tokens: usize,
    /// Tokens that the passages of a head may have together.
    pub(crate) max_passage_tokens: usize,
    pub(crate) progress: Arc<Progress>,
    pub(crate) cache_log: CacheLog,
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The request is invalid. Another attempt would fail as well.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// The queue is full. Try again later, or on another worker.
    #[error("{num_waiting} requests wait, of {max_waiting} that may")]
    Full {
        /// Waiting requests.
        num_waiting: usize,
        /// The limit.
        max_waiting: usize,
    },
    /// The request's grammar cannot be used here.
    #[error("grammar: {0}")]
    Grammar(#[from] GrammarError),
    /// The engine ends. Try another worker.
    #[error("the engine is shutting down")]
    ShuttingDown,
}

/// The blocks of a prefilled prompt or of a reservation. They stay as they are until this is dropped, even when the prefill has
/// ended, failed or was cancelled, or the reservation's slot is given up.
#[derive(Debug)]
pub struct HeldBlocks {
    owner: DropCommand,
}

/// Blocks set aside for a prompt that is computed elsewhere, and a slot to decode it. Dropping the reservation
/// returns both.
#[derive(Debug)]
pub struct Reservation {
    held: HeldBlocks,
    slot: DecodeSlot,
}

/// The slot of a reservation. Dropping it gives the slot up, and the blocks that the sequence could still need. What is reserved
/// stays held.
#[derive(Debug)]
pub struct DecodeSlot {
    owner: DropCommand,
    blocks: Vec<BlockId>,
    num_cached_blocks: usize,
    max_events: usize,
}

impl Reservation {
    /// The sequence's block table: enough blocks for the KV of its prompt and its known output.
    pub fn blocks(&self) -> &[BlockId] {
        &self.slot.blocks
    }

    /// Blocks at the front that already hold their KV. They are shared and must never be written.
    pub fn num_cached_blocks(&self) -> usize {
        self.slot.num_cached_blocks
    }

    /// Separates the slot from the blocks: a writer may reach the blocks for longer than the slot is of use.
    pub fn split(self) -> (DecodeSlot, HeldBlocks) {
        (self.slot, self.held)
    }

    /// Undoes [`split`](Self::split).
    ///
    /// # Panics
    /// When they are of two reservations.
    pub fn join(slot: DecodeSlot, held: HeldBlocks) -> Reservation {
        assert_eq!(slot.owner.id, held.owner.id, "the slot and the blocks are of one reservation");
        Reservation { held, slot }
    }
}

impl EngineHandle {
    /// The memory of the blocks.
    pub fn storage(&self) -> &Arc<BlockStorage> {
        &self.state.storage
    }

    /// Token ids in requests are below this.
    pub fn vocab_size(&self) -> usize {
        self.state.vocab_size
    }

    /// Longest sequence, prompt and output together: the limit of the configuration, or what the pool can hold.
    pub fn context_length(&self) -> usize {
        self.state.config.context_length
    }

    /// Computes the prompt here and decodes here.
    ///
    /// # Errors
    /// When the request is invalid, the queue is full, or the engine ends.
    pub fn generate(&self, request: impl Into<Submission>) -> Result<TokenStream, SubmitError> {
        let submission = request.into();
        let max_events = self.max_token_events(&submission.request);
        let (sink, events) = Sink::new(max_events, self.state.config.clock);
        let cancel =
            self.submit(submission, SequenceRole::Generate, ReplyChannel::Tokens(sink), Command::Cancel)?;
        Ok(TokenStream { events, _cancel: cancel })
    }

    /// Computes the prompt for another engine. The sequence ends after its first token, and its blocks stay held
    /// until the [`HeldBlocks`] are dropped.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn prefill(
        &self,
        request: impl Into<Submission>,
    ) -> Result<(PrefillEvents, HeldBlocks), SubmitError> {
        let submission = request.into();
        let layout = self.state.storage.layout();
        // One event for each piece, `Adopted` for blocks, one for the cached prefix, `Started`, `Blended`, and the terminal one.
        let num_blocks = layout.num_blocks_for(submission.request.num_known_tokens());
        let max_events = num_blocks * (layout.num_layers + 1) + 4;
        let (sink, events) = Sink::new(max_events, self.state.config.clock);
        let cancel =
            self.submit(submission, SequenceRole::Prefill, ReplyChannel::Prefill(sink), Command::Cancel)?;
        let owner = DropCommand::new(cancel.id, self.state.commands.clone(), Command::Release);
        Ok((PrefillEvents { events, _cancel: cancel }, HeldBlocks { owner }))
    }

    /// Waits until there are blocks for a prompt that is computed elsewhere, and a slot to decode it. First come,
    /// first served, together with the requests of [`generate`](Self::generate) and [`prefill`](Self::prefill).
    /// Dropping the future leaves the queue.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub async fn reserve(&self, request: impl Into<Submission>) -> Result<Reservation, SubmitError> {
        let submission = request.into();
        let max_events = self.max_token_events(&submission.request);
        let (reply, granted) = oneshot::channel();
        let owner = self.submit(
            submission,
            SequenceRole::Decode,
            ReplyChannel::Reservation(Some(reply)),
            Command::Release,
        )?;
        let Grant { blocks, num_cached_blocks } = granted.await.map_err(|_| SubmitError::ShuttingDown)?;
        let slot_owner = DropCommand::new(owner.id, self.state.commands.clone(), Command::GiveUpSlot);
        let slot = DecodeSlot { owner: slot_owner, blocks, num_cached_blocks, max_events };
        Ok(Reservation { held: HeldBlocks { owner }, slot })
    }

    /// Decodes after `first`. The KV of the whole prompt is in the reservation's blocks now. The events are those
    /// after `first`; if `first` ends the sequence, [`Finished`](crate::TokenEvent::Finished) comes at once.
    ///
    /// # Errors
    /// When `first` is not a token of this model, or the engine ends.
    pub fn decode(&self, reservation: Reservation, first: SampledToken) -> Result<TokenStream, SubmitError> {
        let vocab_size = self.state.vocab_size;
        if first.id as usize >= vocab_size {
            return Err(
                InvalidRequest::new("first", Problem::UnknownToken { token: first.id, vocab_size }).into()
            );
        }
        let Reservation { held, slot } = reservation;
        let id = held.owner.id;
        let (sink, events) = Sink::new(slot.max_events, self.state.config.clock);
        self.send(Command::Decode { id, first, sink })?;
        held.owner.disarm();
        slot.owner.disarm();
        let cancel = DropCommand::new(id, self.state.commands.clone(), Command::Cancel);
        Ok(TokenStream { events, _cancel: cancel })
    }

    /// The engine's load as it changes. Closed when the engine has ended.
    pub fn load(&self) -> watch::Receiver<EngineLoad> {
        self.state.load.clone()
    }

    /// The engine's load now, with what was submitted since its last step began.
    pub fn load_now(&self) -> EngineLoad {
        // The engine's part first: what it has taken by then was submitted before.
        let load = *self.state.load.borrow();
        load.with_submitted(self.state.progress.submitted())
    }

    /// What its prefix cache stores and evicts.
    pub fn cache_log(&self) -> &CacheLog {
        &self.state.cache_log
    }

    /// What its steps take.
    pub fn pace(&self) -> EnginePace {
        self.state.progress.pace()
    }

    /// What routers are to expect of its next step, by its pace: a line that was slow comes back to its prior while no step follows
    /// ([`StepLine::after`]). What is decided here goes by the pace itself.
    pub fn expected_step(&self, pace: &EnginePace) -> Option<StepLine> {
        let config = &self.state.config;
        let step = pace.step?;
        let (Some(prior), Some(stepped_at)) =
            (config.step_prior.and_then(StepLine::checked), pace.stepped_at)
        else {
            return Some(step);
        };
        Some(step.after((config.clock)().saturating_duration_since(stepped_at), &prior))
    }

    /// Tokens that routers are to expect of its next step for a sequence that decodes, by its pace: while no step follows, they come back
    /// to one ([`StepYield::after`]).
    pub fn expected_yield(&self, pace: &EnginePace) -> StepYield {
        let recent = StepYield::checked(pace.recent_tokens).unwrap_or_default();
        let Some(stepped_at) = pace.stepped_at else { return recent };
        recent.after((self.state.config.clock)().saturating_duration_since(stepped_at))
    }

    /// Tokens that one step computes at most.
    pub fn token_budget(&self) -> usize {
        self.state.config.token_budget
    }

    /// Target time between tokens while prompts are computed beside decoding sequences.
    pub fn itl_target(&self) -> Option<Duration> {
        self.state.config.itl_target
    }

    /// The drafter's name, "ngram" or "draft", and its counts; `None` without a drafter.
    pub fn drafts(&self) -> Option<(&'static str, DraftCounts)> {
        self.state.drafter.map(|drafter| (drafter, self.state.draft_counters.proposed.read()))
    }

    /// Counts of the text that grammars force, which is drafted without a drafter, too.
    pub fn forced_drafts(&self) -> DraftCounts {
        self.state.draft_counters.forced.read()
    }

    /// What it has blended; `None`: it does not blend.
    pub fn blends(&self) -> Option<BlendCounts> {
        self.state.config.blending.map(|_| self.state.blend_counters.read())
    }

    /// What it has done since it started.
    pub fn totals(&self) -> EngineTotals {
        self.state.progress.totals()
    }

    /// Tokens whose KV this engine has computed so far, drafts included.
    pub fn num_computed_tokens(&self) -> u64 {
        self.state.progress.num_computed.load(Ordering::Relaxed)
    }

    /// Estimated time to compute a prompt of `num_tokens` tokens alone, from measured steps; `None` before the first
    /// step.
    pub fn prefill_time(&self, num_tokens: usize) -> Option<Duration> {
        let rate = self.prefill_rate()?;
        Duration::try_from_secs_f64(num_tokens as f64 / rate).ok()
    }

    /// Tokens per second of a prompt that is computed alone; `None` before the first step.
    pub fn prefill_rate(&self) -> Option<f64> {
        let rate = f64::from_bits(self.state.progress.prefill_rate.load(Ordering::Relaxed));
        (rate > 0.0).then_some(rate)
    }

    /// Checks that everything was returned and that the block accounting is right. What was dropped before the call
    /// counts as returned.
    ///
    /// # Errors
    /// When something was not returned or the accounting is wrong.
    pub async fn check_idle_integrity(&self) -> Result<PoolReport, IdleError> {
        let (reply, report) = oneshot::channel();
        self.state.commands.send(Command::CheckIdle(reply)).map_err(|_| IdleError::Ended)?;
        report.await.map_err(|_| IdleError::Ended)?
    }

    /// Accepts no more requests, ends every stream, then the thread.
    pub fn shutdown(&self) {
        self.state.is_closing.store(true, Ordering::Release);
        let _ = self.state.commands.send(Command::Shutdown);
    }

    fn submit(
        &self,
        submission: Submission,
        role: SequenceRole,
        reply: ReplyChannel,
        at_drop: fn(SequenceId) -> Command,
    ) -> Result<DropCommand, SubmitError> {
        let state = &*self.state;
        if state.is_closing.load(Ordering::Acquire) {
            return Err(SubmitError::ShuttingDown);
        }
        let config = &state.config;
        let Submission { mut request, matcher } = submission;
        self.validate(&request)?;
        let slot = QueueSlot::take(&state.num_waiting, config.max_waiting)
            .map_err(|num_waiting| SubmitError::Full { num_waiting, max_waiting: config.max_waiting })?;

        let matcher = match matcher {
            Some(matcher) => Some(matcher),
            None => self.matcher(&request)?,
        };
        let id = self.next_id(request.priority);
        let is_scored = request.is_scored();
        if is_scored && role != SequenceRole::Generate {
            return Err(InvalidRequest::new("prompt_logprobs", Problem::PromptElsewhere).into());
        }
        // What is computed here is not blended without blending, or if it is too long; what arrives computed may be. Cached and
        // blended tokens have no logits.
        let can_blend = request.blended().is_some_and(|marks| self.can_blend(marks));
        if is_scored || !can_blend && role != SequenceRole::Decode {
            request.blend = None;
        }
        let head = request.blended().filter(|_| can_blend);
        let num_head_tokens = head.map_or(0, BlendMarks::end_idx);
        let root = (config.prefix_cache && !is_scored).then(|| hash_root(&config.model_revision, &request));
        let tokens = [&request.prompt[..], &request.output].concat();
        let max_num_tokens = request.max_num_tokens(config.context_length);
        let block_size = state.storage.layout().block_size;
        let sequence = Sequence::new(id, role, tokens, max_num_tokens, block_size, root)
            .with_head(num_head_tokens)
            .with_retention(request.retention.clone());
        let sequence = if is_scored { sequence.with_scores() } else { sequence };
        state.progress.submit(&sequence);
        self.send(Command::Submit(sequence, Box::new(LiveRequest::new(request, matcher, reply, slot))))?;
        Ok(DropCommand::new(id, state.commands.clone(), at_drop))
    }

    /// Whether a request can be computed here.
    ///
    /// # Errors
    /// Names what is wrong with it.
    pub fn validate(&self, request: &Request) -> Result<(), InvalidRequest> {
        request.validate(self.state.vocab_size, self.state.config.context_length)
    }

    /// Whether a head of these passages is not too long to be blended here. All passages are in memory until it is blended, also
    /// those that the store has no room for.
    pub fn can_blend(&self, marks: &BlendMarks) -> bool {
        let num_tokens: usize = marks.passages.iter().map(ExactSizeIterator::len).sum();
        self.state.max_blended_tokens.saturating_sub(MAX_REST) >= marks.end_idx()
            && num_tokens <= self.state.max_passage_tokens
    }

    /// Compiles the grammar of a request, unless that was done before, and goes through the request's output with it. Blocks: what
    /// is submitted then does not.
    ///
    /// # Errors
    /// When the request has a grammar that cannot be used here.
    pub fn prepare(&self, request: Request) -> Result<Submission, GrammarError> {
        let matcher = self.matcher(&request)?;
        Ok(Submission { request, matcher })
    }

    fn matcher(&self, request: &Request) -> Result<Option<TokenMatcher>, GrammarError> {
        let Some(grammar) = &request.sampling.grammar else { return Ok(None) };
        let unknown = || GrammarError::vocabulary("the worker does not know the model's tokenizer");
        let grammars = self.state.config.grammars.as_ref().ok_or_else(unknown)?;
        grammars.matcher(grammar, &request.output).map(Some)
    }

    pub(crate) fn next_id(&self, priority: i32) -> SequenceId {
        SequenceId::new(priority, self.state.next_id.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn send(&self, command: Command) -> Result<(), SubmitError> {
        self.state.commands.send(command).map_err(|_| SubmitError::ShuttingDown)
    }

    /// `Started`, `Adopted` for blocks, `Blended`, each remaining token with a draft before it, the scores of each prompt token,
    /// and the terminal event.
    fn max_token_events(&self, request: &Request) -> usize {
        let max_num_tokens = request.max_num_tokens(self.state.config.context_length);
        let max_scored = if request.is_scored() { request.prompt.len() } else { 0 };
        let num_blocks = self.state.storage.layout().num_blocks_for(request.num_known_tokens());
        2 * max_num_tokens.saturating_sub(request.num_known_tokens()) + num_blocks + max_scored + 3
    }
}
