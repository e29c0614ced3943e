//! What the pool lacks of a prompt is recalled: before it is computed what is fast, and meanwhile, from its end, what is slow.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context;
use baton_engine::PrefixReservation;
use baton_kv_cache::BlockHash;
use baton_kv_store::Record;
use baton_request::Request;
use baton_tier_policy::{ReadMode, Worth};
use tokio::{
    task::spawn_blocking,
    time::{error::Elapsed, timeout},
};

use crate::{
    beside::BesideRecall,
    tiers::{Permit, Tiers},
};

/// What tiers have of a request and the pool lacks.
#[derive(Debug)]
pub struct Recall {
    tiers: Arc<Tiers>,
    /// Of the blocks in the pool, then of those that are read.
    hashes: Vec<BlockHash>,
    /// Blocks at the front that are in the pool.
    num_pooled: usize,
    /// Of those after them, what is read before anything is computed.
    worth: Worth,
    mode: ReadMode,
    /// Where the batch begins and ends that is being read, and since when that goes on. Locked for a copy.
    reading: Mutex<Option<(usize, usize, Instant)>>,
}

impl Recall {
    /// Of a prompt that will be computed here. `None` when the pool has all that the tiers have of it, there are no
    /// tiers, or it is scored.
    pub fn of(tiers: Option<&Arc<Tiers>>, request: &Request) -> Option<Recall> {
        // A head is computed as a whole.
        let mode = if request.blended().is_some() { ReadMode::Alone } else { ReadMode::BesideComputing };
        Recall::new(tiers?, request, mode)
    }

    /// The same of a prompt that is not computed here: another worker asks for its KV.
    pub fn for_peer(tiers: Option<&Arc<Tiers>>, request: &Request) -> Option<Recall> {
        Recall::new(tiers?, request, ReadMode::Alone)
    }

    fn new(tiers: &Arc<Tiers>, request: &Request, mode: ReadMode) -> Option<Recall> {
        // A scored prompt shares no blocks: cached tokens have no logits.
        if request.is_scored() {
            return None;
        }
        let engine = &tiers.limits.engine;
        let mut hashes = engine.prefix_hashes(request, engine.num_sharable_tokens(request));
        let num_pooled = engine.cache_log().num_in_pool(&hashes);
        let worth = tiers.worth(&hashes, num_pooled, mode);
        let num_wanted = match mode {
            ReadMode::Alone => worth.num_blocks,
            ReadMode::BesideComputing => worth.num_held,
        };
        hashes.truncate(num_pooled + num_wanted);
        let reading = Mutex::default();
        (num_wanted > 0).then(|| Recall { tiers: tiers.clone(), hashes, num_pooled, worth, mode, reading })
    }

    /// Brings the fast blocks into the pool, as far as there is room, and no longer than it would take to compute them. Dropping the
    /// future ends it; blocks that are being written are free when that is done. Returns what to [start](BesideRecall::start) before
    /// the rest is computed.
    pub async fn run(self) -> Option<BesideRecall> {
        let num_recalled = if self.worth.num_blocks > 0 { self.run_before().await } else { 0 };
        let Recall { tiers, hashes, num_pooled, mode, .. } = self;
        let num_ready = num_pooled + num_recalled;
        let is_more = mode == ReadMode::BesideComputing && num_ready < hashes.len();
        is_more.then(|| BesideRecall::new(tiers, hashes, num_ready))
    }

    /// Returns how many blocks came, unless it was too late.
    async fn run_before(&self) -> usize {
        let block_size = self.tiers.block_size();
        let num_tokens = self.worth.num_blocks * block_size;
        let started = Instant::now();
        let (limit, patience) = self.tiers.bounds(&self.worth);
        match timeout(limit, self.bring_in(limit, patience)).await {
            Ok(Ok((num_blocks, reading))) => {
                let num_recalled = num_blocks * block_size;
                let elapsed = started.elapsed();
                self.tiers.store.note_rest(num_blocks, elapsed.saturating_sub(reading));
                tracing::debug!(num_tokens, num_recalled, ?elapsed, "prefix recalled from tiers");
                return num_blocks;
            }
            Ok(Err(error)) => tracing::warn!(%error, "prefix not recalled; the prompt is computed"),
            Err(Elapsed { .. }) => {
                // Otherwise the engine was slow, or other recalls.
                let reading = *self.reading.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((first, end, since)) = reading {
                    self.tiers.store.note_late(&self.hashes[first..end], since.elapsed());
                }
                tracing::info!(num_tokens, ?limit, "prefix not recalled in time; the rest is computed");
            }
        }
        0
    }

    /// Hashes of the blocks from `first` on that are read before anything is computed.
    fn wanted(&self, first: usize) -> &[BlockHash] {
        &self.hashes[first..self.num_pooled + self.worth.num_blocks]
    }

    /// Returns how many blocks came, and how long their records were read.
    async fn bring_in(&self, limit: Duration, patience: Duration) -> anyhow::Result<(usize, Duration)> {
        let first = self.num_pooled;
        let Some(permit) = self.tiers.permit(self.wanted(first), limit).await else {
            return Ok((0, Duration::ZERO));
        };
        let until = Instant::now() + patience;
        // The engine answers after its step: the first batch is read meanwhile.
        let (reservation, mut next) = tokio::join!(self.reserve(), self.read(first, until, &permit));
        // Without room, or after blocks before these were evicted, the engine computes them.
        let Some(reservation) = reservation? else { return Ok((0, Duration::ZERO)) };
        let reservation = Arc::new(reservation);
        let num_reserved = reservation.blocks().len();
        let (mut end, mut reading) = (first, Duration::ZERO);
        while let Some(batch) = next {
            let (mut records, took) = batch?;
            reading += took;
            records.truncate(num_reserved - end);
            // A record is missing.
            if records.is_empty() {
                break;
            }
            let start = end;
            end += records.len();
            let write = self.write(start, records, reservation.clone(), permit.clone());
            let read = async { if end < num_reserved { self.read(end, until, &permit).await } else { None } };
            let (written, following) = tokio::join!(write, read);
            written?;
            self.tiers.limits.engine.cache_blocks(&reservation, start..end);
            next = following;
        }
        Ok((end - first, reading))
    }

    /// Writes the records of blocks from `start` on. Invariant 3: the writer keeps the blocks, also when this future is dropped.
    async fn write(
        &self,
        start: usize,
        records: Vec<Arc<Record>>,
        reservation: Arc<PrefixReservation>,
        permit: Permit,
    ) -> anyhow::Result<()> {
        let tiers = self.tiers.clone();
        let written = spawn_blocking(move || {
            let _permit = permit;
            let end = start + records.len();
            let num_ready = reservation.num_cached_blocks().clamp(start, end);
            let (records, blocks) = (&records[num_ready - start..], &reservation.blocks()[num_ready..end]);
            tiers.store.write_to_pool(records, blocks)
        });
        written.await?.context("the pool's device")
    }

    /// Blocks for as many of those that are wanted as there is room for.
    async fn reserve(&self) -> anyhow::Result<Option<PrefixReservation>> {
        let first = self.num_pooled;
        let wanted = &self.hashes[..first + self.worth.num_blocks];
        let found = self.tiers.limits.engine.reserve_blocks(wanted, 0, first + 1).await?;
        Ok(found.filter(|found| found.num_cached_blocks() >= first))
    }

    /// The records of a batch from block `first` on, and how long reading them took; `None`: no more are wanted.
    async fn read(
        &self,
        first: usize,
        until: Instant,
        permit: &Permit,
    ) -> Option<anyhow::Result<(Vec<Arc<Record>>, Duration)>> {
        let wanted = self.wanted(first);
        if wanted.is_empty() {
            return None;
        }
        let batch = self.tiers.batch(wanted, permit);
        let note = |reading| *self.reading.lock().unwrap_or_else(PoisonError::into_inner) = reading;
        note(Some((first, first + batch.len(), Instant::now())));
        let read = self.tiers.read(batch, until, permit).await;
        note(None);
        Some(read)
    }
}

impl Tiers {
    /// What the tiers have of the blocks after the first `num_before`, as far as reading them saves time.
    pub(crate) fn worth(&self, hashes: &[BlockHash], num_before: usize, mode: ReadMode) -> Worth {
        let compute = |num_blocks| self.limits.compute_blocks(num_before, num_blocks);
        self.store.worth(&hashes[num_before..], compute, mode)
    }

    /// How long a recall may take, and for how long it may read before an object store is given up that is slower than expected: less than
    /// computing takes, and what came is kept.
    pub(crate) fn bounds(&self, worth: &Worth) -> (Duration, Duration) {
        let num_tokens = worth.num_blocks * self.block_size();
        let limit = self.limits.deadline(num_tokens).max(worth.compute);
        (limit, (worth.expected + worth.compute) / 2)
    }
}
