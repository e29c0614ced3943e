//! What requests leave is saved: when they end, and as they go on.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use baton_engine::{BLOCKING_TOKENS, CachedPrefix, EngineHandle};
use baton_kv_cache::BlockHash;
use baton_kv_events::Keep;
use baton_kv_store::{SaveRest, SequenceBlocks};
use baton_request::Request;
use tokio::{runtime::Handle, sync::oneshot::Receiver, task::spawn_blocking, time::timeout};

use crate::tiers::Tiers;

/// Tokens of output between two saves.
const SAVE_EVERY: usize = 256;
/// The same while less than an eighth of the pool is free: what a preempted sequence has not saved is computed again.
const SAVE_EVERY_IF_SCARCE: usize = 32;

/// How often what waits for room looks whether the worker ends.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Saves the blocks of a request when this is dropped: when the request has ended, whatever its end.
#[derive(Debug)]
pub struct SaveAtEnd {
    tiers: Arc<Tiers>,
    request: Request,
    /// Earlier saves that are not over have it, too.
    saving: Arc<Hashed>,
}

/// The hashes of the blocks that a sequence had at its last save, so that the next one goes on from there. Locked for a copy of the `Arc`.
type Hashed = Mutex<Arc<[BlockHash]>>;

impl SaveAtEnd {
    /// `None` without tiers.
    pub fn new(tiers: Option<&Arc<Tiers>>, request: &Request) -> Option<SaveAtEnd> {
        Some(SaveAtEnd { tiers: tiers?.clone(), request: request.clone(), saving: Arc::default() })
    }

    /// The request has one more token of output. The prompt is saved with the second, when its KV is here also after a handoff,
    /// and what followed 256 tokens later: a worker that is killed has saved as much. Before sequences are preempted, sooner.
    pub fn push(&mut self, token: u32) {
        self.request.output.push(token);
        let num_tokens = self.request.output.len();
        let is_scarce = || {
            let load = self.tiers.limits.engine.load_now();
            load.num_free_blocks * 8 < load.num_total_blocks
        };
        let is_due = num_tokens % SAVE_EVERY == 2 || num_tokens % SAVE_EVERY_IF_SCARCE == 2 && is_scarce();
        if is_due && Arc::strong_count(&self.saving) == 1 {
            self.spawn_save(self.request.clone(), false);
        }
    }

    fn spawn_save(&self, request: Request, has_ended: bool) {
        let (tiers, saving) = (self.tiers.clone(), self.saving.clone());
        self.tiers.tasks.spawn(async move { save(&tiers, request, has_ended, saving).await });
    }
}

impl Drop for SaveAtEnd {
    fn drop(&mut self) {
        // Without a runtime the worker has ended, and its engine.
        if Handle::try_current().is_ok() {
            let request = std::mem::take(&mut self.request);
            self.spawn_save(request, true);
        }
    }
}

/// A sequence that is saved: a request's known tokens in full blocks. All of it but where its blocks are, which may change meanwhile.
struct Saved {
    request_id: String,
    root: BlockHash,
    hashes: Arc<[BlockHash]>,
    keeps: Arc<[Keep]>,
    tokens: Arc<[u32]>,
    has_ended: bool,
}

/// Saves the blocks of a request that the pool has. What a tier has no room for waits: it is saved when the tier's queue has room, if the
/// pool has it still. No block is held meanwhile. `saving` is dropped when all is saved.
async fn save(tiers: &Arc<Tiers>, request: Request, has_ended: bool, saving: Arc<Hashed>) {
    let Some(saved) = Saved::of(&tiers.limits.engine, request, has_ended, &saving).await else { return };
    let saved = Arc::new(saved);
    for rest in saved.copy(tiers, |sequence| tiers.store.save(sequence)).await {
        match tiers.waiting.clone().try_acquire_owned() {
            Ok(permit) => {
                let (tiers, saved, saving) = (tiers.clone(), saved.clone(), saving.clone());
                tiers.tasks.clone().spawn(async move {
                    saved.save_rest(&tiers, rest).await;
                    drop((permit, saving));
                });
            }
            Err(_) => tiers.store.give_up(rest),
        }
    }
}

impl Saved {
    /// What there is to save of a request, off the async threads when it is much.
    async fn of(engine: &EngineHandle, request: Request, has_ended: bool, hashed: &Hashed) -> Option<Saved> {
        let engine = engine.clone();
        let known = hashed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_much = request.num_known_tokens() > BLOCKING_TOKENS;
        let make = move || Saved::new(&engine, &request, has_ended, &known);
        // Nothing in it panics.
        let saved = if is_much { spawn_blocking(make).await.ok().flatten()? } else { make()? };
        *hashed.lock().unwrap_or_else(PoisonError::into_inner) = saved.hashes.clone();
        Some(saved)
    }

    /// `known` are the hashes of its first blocks.
    fn new(engine: &EngineHandle, request: &Request, has_ended: bool, known: &[BlockHash]) -> Option<Saved> {
        let block_size = engine.storage().layout().block_size;
        // The last token is never computed.
        let num_computed = request.num_known_tokens().min(engine.context_length()).saturating_sub(1);
        let request = request.known_prefix(num_computed / block_size * block_size)?;
        let request_id = request.id.clone();
        let valid = engine.validate(&request);
        valid.inspect_err(|error| tracing::debug!(request_id, %error, "kv not saved")).ok()?;
        let hashes = engine.extended_hashes(known, &request, request.prompt.len());
        Some(Saved {
            request_id,
            root: engine.hash_root(&request),
            keeps: engine.keeps(&request, hashes.len()).into(),
            hashes: hashes.into(),
            tokens: request.prompt,
            has_ended,
        })
    }

    /// Holds what the pool has of it until that is copied. Returns what tiers had no room for.
    async fn copy(
        &self,
        tiers: &Tiers,
        save: impl FnOnce(SequenceBlocks<CachedPrefix>) -> Receiver<Vec<SaveRest>>,
    ) -> Vec<SaveRest> {
        // Many sequences may end with one step. Those that wait here hold no blocks.
        let _permit = tiers.copying.acquire().await;
        match self.hold(tiers).await {
            Some(sequence) => save(sequence).await.unwrap_or_default(),
            None => Vec::new(),
        }
    }

    /// Its blocks in the pool, as they are until they are copied.
    async fn hold(&self, tiers: &Tiers) -> Option<SequenceBlocks<CachedPrefix>> {
        let held = tiers.limits.engine.hold_cached(self.hashes.clone()).await;
        let request_id = &self.request_id;
        // Not in the request's span: that would last until all is saved.
        let held = held.inspect_err(|error| tracing::debug!(request_id, %error, "kv not saved")).ok()?;
        Some(SequenceBlocks {
            root: self.root,
            hashes: self.hashes.clone(),
            keeps: self.keeps.clone(),
            tokens: self.tokens.clone(),
            blocks: held.blocks().to_vec(),
            has_ended: self.has_ended,
            guard: held,
        })
    }

    /// Saves piece by piece what a tier had no room for, unless the worker ends.
    async fn save_rest(&self, tiers: &Tiers, rest: SaveRest) {
        let _turn = tiers.turns[rest.target()].lock().await;
        let mut next = Some(rest);
        while let Some(rest) = next {
            while !tiers.tasks.is_closed() && timeout(LOOK_EVERY, tiers.store.room(&rest)).await.is_err() {}
            if tiers.tasks.is_closed() {
                return tiers.store.give_up(rest);
            }
            next = self.copy(tiers, |sequence| tiers.store.save_rest(sequence, rest)).await.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use baton_engine::{EngineConfig, EngineThread};
    use baton_engine_testing::FakeModel;
    use baton_kv_store::{HostSlots, KvStore, Slots};
    use baton_request::SamplingParams;
    use tokio::{runtime::Builder, time::sleep};
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::{limits::FetchLimits, recall::Recall};

    const BLOCK_SIZE: usize = 4;
    const PATIENCE: Duration = Duration::from_secs(60);

    fn open(context_length: usize) -> (EngineThread, Arc<Tiers>) {
        let config = EngineConfig {
            num_blocks: context_length / BLOCK_SIZE,
            max_running: 2,
            token_budget: 16,
            max_drafted_step_tokens: 16,
            itl_target: None,
            context_length,
            max_waiting: 2,
            prefix_cache: true,
            model_revision: "fake".into(),
            step_prior: None,
            grammars: None,
            blending: None,
            clock: Instant::now,
            thread_waits: || Duration::ZERO,
        };
        let (engine, thread) =
            baton_engine::start(FakeModel::new(BLOCK_SIZE).executor(), None, config).expect("it starts");
        let slots: Box<dyn Slots> =
            Box::new(HostSlots::new(1 << 20, engine.storage().layout().block_bytes()));
        let store = KvStore::over_slots(vec![slots], engine.storage().clone(), 1, |_, _| {});
        let limits = FetchLimits { engine, fetch_deadline: None, handoff_deadline: PATIENCE };
        (thread, Arc::new(Tiers::over(store, limits, TaskTracker::new())))
    }

    fn request(num_tokens: usize) -> Request {
        let prompt = (0..num_tokens as u32).map(|idx| idx * idx % 64).collect();
        let sampling = SamplingParams { max_tokens: 16, ..SamplingParams::default() };
        Request { prompt, sampling, ..Request::default() }
    }

    #[tokio::test]
    async fn a_save_goes_on_from_the_hashes_of_the_one_before() {
        let (_thread, tiers) = open(64);
        let engine = &tiers.limits.engine;
        let mut save = SaveAtEnd::new(Some(&tiers), &request(9)).expect("there are tiers");
        save.push(1);
        save.push(2);
        let deadline = Instant::now() + PATIENCE;
        while Arc::strong_count(&save.saving) > 1 {
            assert!(Instant::now() < deadline, "the prompt is not saved");
            sleep(Duration::from_millis(5)).await;
        }
        let known = save.saving.lock().unwrap().clone();
        assert_eq!(known[..], engine.prefix_hashes(&request(9), 8));

        (3..9).for_each(|token| save.push(token));
        let whole = engine.prefix_hashes(&save.request, 16);
        assert_eq!(Saved::new(engine, &save.request, true, &known).expect("it is valid").hashes[..], whole);
        // The hashes of other blocks: those are taken as they are, and followed.
        let other = engine.prefix_hashes(&Request { cache_salt: "other".into(), ..request(9) }, 8);
        let saved = Saved::new(engine, &save.request, true, &other).expect("it is valid");
        assert_eq!(saved.hashes[..2], other);
        assert_eq!(saved.hashes[2], other[1].child(&saved.tokens[8..12]));
    }

    #[tokio::test]
    async fn what_no_engine_takes_is_not_saved() {
        let (_thread, tiers) = open(64);
        let invalid = Request { prompt: [1_000_000; 9].into(), ..request(9) };
        assert!(Saved::new(&tiers.limits.engine, &invalid, true, &[]).is_none());
    }

    #[test]
    fn long_sequences_are_hashed_off_the_async_threads() {
        let long = request(BLOCKING_TOKENS + 2 * BLOCK_SIZE);
        let runtime = Builder::new_current_thread().enable_time().max_blocking_threads(1).build();
        runtime.expect("a runtime").block_on(async {
            let (_thread, tiers) = open(2 * BLOCKING_TOKENS);
            let (let_go, gate) = std::sync::mpsc::channel::<()>();
            let busy = spawn_blocking(move || gate.recv().ok());
            let hashed = Hashed::default();
            let saved = Saved::of(&tiers.limits.engine, long.clone(), true, &hashed);
            assert!(timeout(Duration::from_millis(1), saved).await.is_err(), "the only other thread is busy");
            let recall = Recall::of(Some(&tiers), &long);
            assert!(
                timeout(Duration::from_millis(1), recall).await.is_err(),
                "the only other thread is busy"
            );
            let recall = timeout(PATIENCE, Recall::of(Some(&tiers), &long)).await;
            assert!(recall.expect("it ends").is_none(), "computing is sooner");
            drop(let_go);
            busy.await.expect("no panic");
            let saved =
                Saved::of(&tiers.limits.engine, long.clone(), true, &hashed).await.expect("it is valid");
            assert_eq!(saved.hashes.len(), BLOCKING_TOKENS / BLOCK_SIZE + 1);
            assert!(Recall::of(Some(&tiers), &long).await.is_none(), "the tiers have nothing");
        });
    }
}
