//! Copies between the pool and the tiers below it: what requests leave is saved, and what the pool lacks is recalled before a
//! prompt, or a preempted sequence, is computed. A recall is like the fetch of a prefix: blocks are reserved, written and cached.
//! If it fails or takes too long, the engine computes what did not come.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use baton_engine::{EngineHandle, Resumption};
use baton_kv_cache::BlockHash;
use baton_kv_store::{SequenceBlocks, Worth};
use baton_request::Request;
use tokio::{
    runtime::Handle,
    sync::mpsc,
    task::spawn_blocking,
    time::{error::Elapsed, timeout},
};

use crate::{
    handoff::prefix_fetch::{compute_time, fetch_deadline},
    tiers::Tiers,
    worker::Worker,
};

/// Tokens of output between two saves.
const SAVE_EVERY: usize = 256;
/// The same while less than an eighth of the pool is free: what a preempted sequence has not saved is computed again.
const SAVE_EVERY_IF_SCARCE: usize = 32;

/// What tiers have of a request and the pool lacks.
#[derive(Debug)]
pub struct Recall {
    tiers: Arc<Tiers>,
    request: Request,
    hashes: Vec<BlockHash>,
    /// Blocks at the front that are in the pool.
    num_pooled: usize,
    /// Of the others.
    worth: Worth,
}

/// Saves the blocks of a request when this is dropped: when the request has ended, whatever its end.
#[derive(Debug)]
pub struct SaveAtEnd {
    worker: Arc<Worker>,
    request: Request,
}

impl Recall {
    /// `None` when the pool has all that the tiers have of the request, or there are no tiers.
    pub fn of(worker: &Worker, request: &Request) -> Option<Recall> {
        let (tiers, engine) = (worker.tiers()?.clone(), worker.engine());
        let mut hashes = engine.prefix_hashes(request, engine.num_sharable_tokens(request));
        let num_pooled = engine.cache_log().num_in_pool(&hashes);
        let worth = worth(worker, &tiers, &hashes, num_pooled);
        hashes.truncate(num_pooled + worth.num_blocks);
        let request = request.clone();
        (worth.num_blocks > 0).then_some(Recall { tiers, request, hashes, num_pooled, worth })
    }

    /// Brings the blocks into the pool, as far as there is room, and no longer than it would take to compute them. Dropping the
    /// future ends it; blocks that are being written are free when that is done.
    pub async fn run(self, worker: Arc<Worker>) {
        let block_size = worker.engine().storage().layout().block_size;
        let num_tokens = self.worth.num_blocks * block_size;
        let started = Instant::now();
        let (limit, until) = bounds(&worker, &self.worth);
        match timeout(limit, self.bring_in(worker.engine(), until)).await {
            Ok(Ok(num_blocks)) => {
                let num_recalled = num_blocks * block_size;
                self.tiers.store.note_recall(num_blocks, started.elapsed());
                tracing::debug!(num_tokens, num_recalled, elapsed = ?started.elapsed(), "prefix recalled from tiers");
            }
            Ok(Err(error)) => tracing::warn!(%error, "prefix not recalled; the prompt is computed"),
            Err(Elapsed { .. }) => {
                // It would have taken longer.
                self.tiers.store.note_recall(self.worth.num_blocks, limit);
                tracing::info!(num_tokens, ?limit, "prefix not recalled in time; the rest is computed");
            }
        }
    }

    /// Returns how many blocks came.
    async fn bring_in(&self, engine: &EngineHandle, until: Instant) -> anyhow::Result<usize> {
        let block_size = engine.storage().layout().block_size;
        let mut end = self.num_pooled;
        while end < self.hashes.len() {
            let (mut records, permit) = self.tiers.read(&self.hashes[end..], until).await?;
            if records.is_empty() {
                break;
            }
            let start = end;
            let reservation = loop {
                let num_tokens = (start + records.len()) * block_size;
                match engine.reserve_prefix(&self.request, num_tokens).await? {
                    // Its beginning may have room.
                    None if records.len() > 16 => records.truncate(records.len() / 4),
                    found => break found,
                }
            };
            // Without room, or after blocks before these were evicted, the engine computes them.
            let Some(reservation) = reservation.filter(|found| found.num_cached_blocks() >= start) else {
                break;
            };
            end += records.len();
            let tiers = self.tiers.clone();
            let written = spawn_blocking(move || {
                let _permit = permit;
                let num_cached = reservation.num_cached_blocks();
                let (blocks, records) = (&reservation.blocks()[num_cached..], &records[num_cached - start..]);
                tiers.store.write_to_pool(records, blocks).map(|()| reservation)
            });
            engine.cache_prefix(written.await?.context("the pool's device")?);
        }
        Ok(end - self.num_pooled)
    }
}

impl SaveAtEnd {
    /// `None` without tiers.
    pub fn new(worker: &Arc<Worker>, request: &Request) -> Option<SaveAtEnd> {
        worker.tiers()?;
        Some(SaveAtEnd { worker: worker.clone(), request: request.clone() })
    }

    /// The request has one more token of output. The prompt is saved with the second, when its KV is here also after a handoff,
    /// and what followed 256 tokens later: a worker that is killed has saved as much. Before sequences are preempted, sooner.
    pub fn push(&mut self, token: u32) {
        self.request.output.push(token);
        let num_tokens = self.request.output.len();
        let is_scarce = || {
            let load = self.worker.engine().load_now();
            load.num_free_blocks * 8 < load.num_total_blocks
        };
        if num_tokens % SAVE_EVERY == 2 || num_tokens % SAVE_EVERY_IF_SCARCE == 2 && is_scarce() {
            self.spawn_save(self.request.clone(), false);
        }
    }

    fn spawn_save(&self, request: Request, has_ended: bool) {
        let worker = self.worker.clone();
        self.worker.lifecycle().spawn(async move { save(&worker, request, has_ended).await });
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

/// What the tiers have of the blocks after the first `num_before`, as far as reading them saves time.
fn worth(worker: &Worker, tiers: &Tiers, hashes: &[BlockHash], num_before: usize) -> Worth {
    let block_size = worker.engine().storage().layout().block_size;
    let compute =
        |num_blocks| compute_time(worker, (num_before + num_blocks) * block_size, num_before * block_size);
    tiers.store.worth(&hashes[num_before..], compute)
}

/// How long a recall may take, and when an object store is given up that is slower than expected: before computing would end, and
/// what came is kept.
fn bounds(worker: &Worker, worth: &Worth) -> (Duration, Instant) {
    let num_tokens = worth.num_blocks * worker.engine().storage().layout().block_size;
    let limit = fetch_deadline(worker, num_tokens).max(worth.compute);
    (limit, Instant::now() + (worth.expected + worth.compute) / 2)
}

/// Recalls what preempted sequences lost, until the engine ends.
pub(crate) async fn resume_preempted(worker: Arc<Worker>, mut resumptions: mpsc::Receiver<Resumption>) {
    while let Some(resumption) = resumptions.recv().await {
        let own = worker.clone();
        worker.lifecycle().spawn(async move { resume(&own, resumption).await });
    }
}

/// Invariant 6: whatever ends it, the sequence runs again.
async fn resume(worker: &Worker, resumption: Resumption) {
    let Some(tiers) = worker.tiers() else { return };
    let block_size = worker.engine().storage().layout().block_size;
    let num_cached = resumption.num_ready();
    let worth = worth(worker, tiers, resumption.hashes(), num_cached);
    let (limit, until) = bounds(worker, &worth);
    let end = num_cached + worth.num_blocks;
    match timeout(limit, load(tiers, resumption, end, until)).await {
        Ok(Ok(num_ready)) => {
            let num_tokens = (num_ready - num_cached) * block_size;
            worker.metrics().preempted_recalled(num_tokens);
            tracing::debug!(num_tokens, "preempted sequence recalled from tiers");
        }
        Ok(Err(error)) => tracing::warn!(%error, "preempted sequence not recalled; it is computed again"),
        Err(Elapsed { .. }) => tracing::info!(?limit, "preempted sequence not recalled in time"),
    }
}

/// Loads the blocks of a preempted sequence before `end`. Returns how many at its front are ready.
async fn load(
    tiers: &Arc<Tiers>,
    mut resumption: Resumption,
    end: usize,
    until: Instant,
) -> anyhow::Result<usize> {
    while resumption.num_ready() < end {
        let start = resumption.num_ready();
        let (records, permit) = tiers.read(&resumption.hashes()[start..end], until).await?;
        if records.is_empty() {
            break;
        }
        let tiers = tiers.clone();
        // Invariant 3: the writer keeps the blocks, also when this future is dropped.
        let written = spawn_blocking(move || {
            let _permit = permit;
            tiers.store.write_to_pool(&records, &resumption.blocks()[start..])?;
            resumption.loaded(records.len());
            anyhow::Ok(resumption)
        });
        resumption = written.await?.context("the pool's device")?;
    }
    Ok(resumption.num_ready())
}

/// Copies the blocks of a request's known tokens that the pool has.
async fn save(worker: &Worker, request: Request, has_ended: bool) {
    let (Some(tiers), engine) = (worker.tiers(), worker.engine()) else { return };
    let block_size = engine.storage().layout().block_size;
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
