//! What requests leave is saved: when they end, and as they go on.

use std::{sync::Arc, time::Duration};

use baton_engine::CachedPrefix;
use baton_kv_store::{SaveRest, SequenceBlocks};
use baton_request::Request;
use tokio::{runtime::Handle, sync::oneshot::Receiver, time::timeout};

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
    saving: Arc<()>,
}

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

/// A sequence that is saved: a request's known tokens in full blocks, as the prompt of a request.
struct Saved {
    request: Request,
    has_ended: bool,
}

/// Saves the blocks of a request that the pool has. What a tier has no room for waits: it is saved when the tier's queue has room, if the
/// pool has it still. No block is held meanwhile. `saving` is dropped when all is saved.
async fn save(tiers: &Arc<Tiers>, request: Request, has_ended: bool, saving: Arc<()>) {
    let engine = &tiers.limits.engine;
    let block_size = tiers.block_size();
    // The last token is never computed.
    let num_computed = request.num_known_tokens().min(engine.context_length()).saturating_sub(1);
    let Some(request) = request.known_prefix(num_computed / block_size * block_size) else { return };
    let saved = Arc::new(Saved { request, has_ended });
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
        let engine = &tiers.limits.engine;
        let hashes = engine.prefix_hashes(&self.request, self.request.prompt.len());
        let held = engine.hold_cached(&self.request).await;
        let request_id = &self.request.id;
        // Not in the request's span: that would last until all is saved.
        let held = held.inspect_err(|error| tracing::debug!(request_id, %error, "kv not saved")).ok()?;
        Some(SequenceBlocks {
            root: engine.hash_root(&self.request),
            keeps: engine.keeps(&self.request, hashes.len()),
            hashes,
            tokens: self.request.prompt.to_vec(),
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
