//! What requests leave is saved: when they end, and as they go on.

use std::sync::Arc;

use baton_kv_store::SequenceBlocks;
use baton_request::Request;
use tokio::runtime::Handle;

use crate::tiers::Tiers;

/// Tokens of output between two saves.
const SAVE_EVERY: usize = 256;
/// The same while less than an eighth of the pool is free: what a preempted sequence has not saved is computed again.
const SAVE_EVERY_IF_SCARCE: usize = 32;

/// Saves the blocks of a request when this is dropped: when the request has ended, whatever its end.
#[derive(Debug)]
pub struct SaveAtEnd {
    tiers: Arc<Tiers>,
    request: Request,
}

impl SaveAtEnd {
    /// `None` without tiers.
    pub fn new(tiers: Option<&Arc<Tiers>>, request: &Request) -> Option<SaveAtEnd> {
        Some(SaveAtEnd { tiers: tiers?.clone(), request: request.clone() })
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
        if num_tokens % SAVE_EVERY == 2 || num_tokens % SAVE_EVERY_IF_SCARCE == 2 && is_scarce() {
            self.spawn_save(self.request.clone(), false);
        }
    }

    fn spawn_save(&self, request: Request, has_ended: bool) {
        let tiers = self.tiers.clone();
        self.tiers.tasks.spawn(async move { save(&tiers, request, has_ended).await });
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

/// Copies the blocks of a request's known tokens that the pool has.
async fn save(tiers: &Tiers, request: Request, has_ended: bool) {
    let engine = &tiers.limits.engine;
    let block_size = tiers.block_size();
    // As a prompt: a request that has all of its output is not valid. The last token is never computed.
    let mut tokens = [&request.prompt[..], &request.output].concat();
    tokens.truncate(tokens.len().min(engine.context_length()).saturating_sub(1) / block_size * block_size);
    if tokens.is_empty() {
        return;
    }
    let request = Request { prompt: tokens.clone().into(), output: Vec::new(), ..request };
    let hashes = engine.prefix_hashes(&request, tokens.len());
    // Held, so that the blocks stay as they are until they are copied.
    match engine.hold_cached(&request).await {
        Ok(held) => tiers.store.save(SequenceBlocks {
            root: engine.hash_root(&request),
            keeps: engine.keeps(&request, hashes.len()),
            hashes,
            tokens,
            blocks: held.blocks().to_vec(),
            has_ended,
            guard: held,
        }),
        Err(error) => tracing::debug!(%error, "kv not saved"),
    }
}
