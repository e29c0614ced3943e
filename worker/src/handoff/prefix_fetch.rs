//! Fetches a prefix that another worker has cached, and adds it to this worker's cache: before a prompt is computed, or where that
//! would take too long its end, meanwhile.
//!
//! A failed fetch costs only the time until it fails: the engine computes what did not arrive.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::{Expectation, PrefixReservation};
use baton_handoff::{
    DecodeMessage, HandoffError, Side,
    decode::{Committed, DecodeAction, DecodeInput, PrefixFetch, PrefixFetchAction},
};
use baton_kv_cache::{BlockHash, BlockId};
use baton_request::{Failure, FailureKind, Request};
use baton_worker_messages::{FirstToken, submit_failure};
use tokio::sync::oneshot;
use tracing::Instrument;

use super::{
    decode_side::{DecodeSide, FENCING, ReservedBlocks, begin, limits},
    opening::PrefixSource,
    stream::sleep_until,
};
use crate::worker::Worker;

/// What a fetch has brought when the prompt can be submitted.
#[derive(Debug, Default)]
pub struct Fetched {
    /// Tokens at the front that this worker has now; 0 if nothing came.
    pub num_tokens: usize,
    /// More comes while the prompt is computed.
    pub coming: Option<Coming>,
}

/// A fetch beside computing. It ends when this is dropped.
#[derive(Debug)]
pub struct Coming {
    _caller: oneshot::Sender<()>,
}

/// Fetches the full blocks of a request's known tokens that `source` has cached and this worker lacks. If that takes more than 0.3 of
/// the time to compute them, as fetches from there have taken, only their end, while the beginning is computed. Nothing comes after
/// `deadline`. Dropping the future cancels it.
pub async fn fetch(
    worker: Arc<Worker>,
    source: PrefixSource,
    request: Request,
    deadline: Duration,
) -> Fetched {
    let PrefixSource { peer, attempt, wire } = source;
    let num_tokens = worker.engine().num_sharable_tokens(&request);
    let Some(request) = request.known_prefix(num_tokens) else { return Fetched::default() };
    // A head is computed as a whole.
    let is_whole = request.blended().is_some();
    let Ok(link) = worker.peers().link(&peer.address) else {
        tracing::warn!(
            address = peer.address,
            "prefix not fetched: the address of its source is invalid; the prompt is computed"
        );
        return Fetched::default();
    };
    let (reply, answer) = oneshot::channel();
    let (caller, left) = oneshot::channel();
    let side = DecodeSide::new(worker.clone(), link, peer, wire);
    let driver = PrefixFetchDriver::new(side, attempt, request, deadline, is_whole, reply, left);
    worker.lifecycle().spawn(driver.run().in_current_span());
    // The driver ends at its deadline at the latest.
    match answer.await {
        Ok(Answer::Ready { num_tokens }) => Fetched { num_tokens, coming: None },
        Ok(Answer::Coming) => Fetched { num_tokens: 0, coming: Some(Coming { _caller: caller }) },
        Err(_) => Fetched::default(),
    }
}

/// What the caller waits for.
enum Answer {
    /// Tokens at the front that this worker has now; 0: the fetch failed.
    Ready { num_tokens: usize },
    /// The prompt is to be computed meanwhile.
    Coming,
}

/// Why a fetch is given up.
const NOT_NEEDED: &str = "the request was cancelled, or its prompt is computed";
const LEAVING: &str = "this worker is leaving";

/// Blocks that are set aside for the end of a prefix.
struct TailBlocks {
    /// Blocks before the reservation.
    num_before: usize,
    reservation: PrefixReservation,
}

impl ReservedBlocks for TailBlocks {
    type Held = TailBlocks;
    /// A prefix has none.
    type Slot = ();

    fn num_cached_blocks(&self) -> usize {
        self.num_before + self.reservation.num_cached_blocks()
    }

    fn new_blocks(&self) -> &[BlockId] {
        &self.reservation.blocks()[self.reservation.num_cached_blocks()..]
    }

    fn split(self) -> ((), TailBlocks) {
        ((), self)
    }

    fn join((): (), held: TailBlocks) -> TailBlocks {
        held
    }
}

/// The driver of a [`PrefixFetch`].
struct PrefixFetchDriver {
    machine: PrefixFetch,
    /// Actions of the machine that are not done yet.
    actions: VecDeque<PrefixFetchAction>,
    started: Instant,
    /// The deadline.
    until: Instant,
    /// When blocks were granted, and their bytes.
    granted: Option<(Instant, u64)>,
    request: Request,
    /// Whether the prompt can only be computed after all has come.
    is_whole: bool,
    side: DecodeSide<TailBlocks>,
    /// `None` after the caller was answered.
    reply: Option<oneshot::Sender<Answer>>,
    /// Whether the caller has left; `None` after it did.
    left: Option<oneshot::Receiver<()>>,
    /// Why this worker does not want the prefix any more.
    refusal: Option<&'static str>,
    /// The engine ends its chunks before what comes.
    expected: Option<Expectation>,
}

impl PrefixFetchDriver {
    fn new(
        side: DecodeSide<TailBlocks>,
        attempt: u32,
        request: Request,
        deadline: Duration,
        is_whole: bool,
        reply: oneshot::Sender<Answer>,
        left: oneshot::Receiver<()>,
    ) -> PrefixFetchDriver {
        let started = Instant::now();
        let begin = begin(side.worker(), side.peer(), attempt, &request, deadline);
        let num_layers = side.worker().engine().storage().layout().num_layers;
        let (machine, actions) = PrefixFetch::begin(begin, num_layers, limits(deadline), started);
        PrefixFetchDriver {
            machine,
            actions: actions.into(),
            started,
            until: started + deadline,
            granted: None,
            request,
            is_whole,
            side,
            reply: Some(reply),
            left: Some(left),
            refusal: None,
            expected: None,
        }
    }

    async fn run(mut self) {
        loop {
            while let Some(action) = self.actions.pop_front() {
                self.act(action).await;
            }
            if self.machine.is_over() {
                break;
            }
            let input = self.next().await;
            self.actions.extend(self.machine.on(input, Instant::now()));
        }
        self.side.end().await;
    }

    async fn next(&mut self) -> DecodeInput<FirstToken> {
        if let Some(why) = self.refusal.take() {
            self.left = None;
            return DecodeInput::Cancel(why.into());
        }
        let halted = self.side.worker().lifecycle().halted();
        let deadline = self.machine.deadline();
        let why = tokio::select! {
            // The deadline comes first: a busy stream must not delay it.
            biased;
            () = sleep_until(deadline) => return DecodeInput::Tick,
            input = self.side.next() => return input,
            () = gone(&mut self.left) => NOT_NEEDED,
            () = halted.cancelled(), if self.left.is_some() => LEAVING,
        };
        self.left = None;
        DecodeInput::Cancel(why.into())
    }

    async fn act(&mut self, action: PrefixFetchAction) {
        match action {
            DecodeAction::Send(message) => {
                if let DecodeMessage::Grant(grant) = &message {
                    let block_bytes = self.side.worker().engine().storage().layout().block_bytes();
                    self.granted = Some((Instant::now(), (grant.block_ids.len() * block_bytes) as u64));
                }
                self.side.send(message, &self.request, None);
            }
            DecodeAction::Reserve { num_tokens } => self.reserve(num_tokens).await,
            DecodeAction::FirstToken(never) => match never {},
            DecodeAction::Verify(pieces) => self.side.verify(pieces),
            DecodeAction::Revoke(generation) => self.side.revoke(generation),
            DecodeAction::WriterStopped(generation) => self.side.writer_stopped(generation),
            DecodeAction::Finish(result) => self.finish(result).await,
            // `run` ends, and with it the stream.
            DecodeAction::Close => {}
        }
    }

    /// The peer holds so many tokens. Sets blocks aside for all of them, or for the end that comes while the rest is computed.
    async fn reserve(&mut self, num_tokens: usize) {
        let worker = self.side.worker().clone();
        let (engine, halted) = (worker.engine(), worker.lifecycle().halted());
        // It may wait for a thread.
        let (hashes, num_pooled) = tokio::select! {
            found = engine.find_prefix(&self.request, num_tokens) => found,
            () = sleep_until(Some(self.until)) => return,
            () = gone(&mut self.left) => return self.refusal = Some(NOT_NEEDED),
            () = halted.cancelled() => return self.refusal = Some(LEAVING),
        };
        let meeting = self.meeting(&hashes, num_pooled);
        if meeting == Some(0) {
            self.refusal = Some("computing is sooner");
            return;
        }
        let first = meeting.map_or(0, |num_blocks| hashes.len() - num_blocks);
        if meeting.is_some() {
            self.expected = Some(engine.expect(&hashes, first));
        }
        let reserving = engine.reserve_blocks(&hashes, first, hashes.len() - first);
        // The engine has both before it has the prompt: a long step of the prompt delays neither.
        if meeting.is_some() {
            self.answer(Answer::Coming);
        }
        self.side.reserve(Box::pin(async move {
            match reserving.await {
                Ok(Some(reservation)) => Ok(TailBlocks { num_before: first, reservation }),
                // It does not wait until blocks become free.
                Ok(None) => Err(Failure::new(FailureKind::Full, "no blocks are free for a prefix")),
                Err(error) => Err(submit_failure(&error)),
            }
        }));
    }

    /// Blocks at the end of a prefix that come while those before them are computed. `None`: all of them are waited for.
    fn meeting(&self, hashes: &[BlockHash], num_pooled: usize) -> Option<usize> {
        let worker = self.side.worker();
        let line = worker.peer_links().line(&self.side.peer().worker_id).filter(|_| !self.is_whole)?;
        let block_bytes = worker.engine().storage().layout().block_bytes();
        let bring = |num_blocks: usize| line.seconds((num_blocks * block_bytes) as f64);
        worker.fetch_limits().meeting(num_pooled, hashes.len() - num_pooled, bring)
    }

    async fn finish(&mut self, result: Result<Committed, HandoffError>) {
        let elapsed = self.started.elapsed();
        let source = self.side.peer().worker_id.clone();
        let result = match result {
            Ok(committed) => {
                tracing::debug!(%source, bytes = committed.bytes, ?elapsed, "prefix fetched");
                let cached = self.cache().await;
                cached.inspect_err(|error| tracing::info!(%source, %error, "fetched prefix not used"))
            }
            Err(error) => {
                self.side.cancel_reservation();
                if let (
                    HandoffError::Deadline { .. } | HandoffError::Cancelled(_),
                    Some((granted, num_bytes)),
                ) = (&error, self.granted)
                {
                    let took = granted.elapsed().as_secs_f64();
                    self.side.worker().peer_links().note_late(&source, num_bytes, took);
                }
                tracing::info!(%source, ?elapsed, %error, "prefix not fetched");
                Err(error)
            }
        };
        let num_tokens = result.unwrap_or_else(|error| {
            self.side.worker().metrics().prefix_fetched(error.label(), 0);
            0
        });
        self.expected = None;
        self.answer(Answer::Ready { num_tokens });
    }

    fn answer(&mut self, answer: Answer) {
        if let Some(reply) = self.reply.take() {
            // A caller that has gone needs no answer.
            let _ = reply.send(answer);
        }
    }

    /// Adds the received blocks to the prefix cache. Returns how many tokens the prefix has.
    async fn cache(&mut self) -> Result<usize, HandoffError> {
        let refused = |failed| HandoffError::Refused { by: Side::Decode, failed };
        let took = self.granted.map(|(granted, num_bytes)| (granted.elapsed(), num_bytes));
        let halted = self.side.worker().lifecycle().halted();
        // Blocks that are not waited for return by themselves.
        let tail = tokio::select! {
            biased;
            tail = self.side.commit() => tail.map_err(refused)?,
            () = sleep_until(Some(self.until)) => return Err(HandoffError::Deadline { state: FENCING }),
            () = gone(&mut self.left) => return Err(HandoffError::Cancelled(NOT_NEEDED.into())),
            () = halted.cancelled() => return Err(HandoffError::Cancelled(LEAVING.into())),
        };
        let worker = self.side.worker();
        let layout = worker.engine().storage().layout();
        let num_new = tail.new_blocks().len();
        let num_blocks = tail.num_cached_blocks() + num_new;
        if let Some((took, num_bytes)) = took {
            worker.peer_links().observe(&self.side.peer().worker_id, num_bytes, took.as_secs_f64());
        }
        // Counted first: the prompt may end as soon as the engine has the blocks.
        worker.metrics().prefix_fetched("fetched", num_new * layout.block_size);
        worker.engine().cache_prefix(tail.reservation);
        Ok(num_blocks * layout.block_size)
    }
}

/// Completes when the caller has gone; never after that.
async fn gone(left: &mut Option<oneshot::Receiver<()>>) {
    match left {
        // Nothing is sent.
        Some(left) => drop(left.await),
        None => std::future::pending().await,
    }
}
