//! What is slow to read of a prompt is read from its end while it is computed from its beginning. Both meet in the middle: the
//! scheduler lets a prompt adopt what has come, and ends its chunks before what is expected.

use std::{sync::Arc, time::Instant};

use anyhow::Context;
use baton_cost::MIN_BROUGHT;
use baton_engine::Expectation;
use baton_kv_cache::BlockHash;
use baton_kv_store::Record;
use tokio::{
    sync::mpsc::{self, Receiver},
    task::{AbortHandle, spawn_blocking},
};
use tracing::Instrument;

use crate::tiers::Tiers;

/// What is left of a [`Recall`](crate::Recall) when its prompt begins to be computed.
#[derive(Debug)]
pub struct BesideRecall {
    tiers: Arc<Tiers>,
    hashes: Vec<BlockHash>,
    /// Blocks at the front that are in the pool, or soon: the engine may not have said so yet.
    num_ready: usize,
}

/// A recall beside computing. It ends when this is dropped.
#[derive(Debug)]
pub struct Beside {
    task: AbortHandle,
}

/// Blocks that are read next, and the word to the scheduler.
struct Plan {
    first: usize,
    _expected: Expectation,
}

/// Records that follow each other, and the place of the first one in the prompt.
type Piece = (usize, Vec<Arc<Record>>);

impl BesideRecall {
    pub(crate) fn new(tiers: Arc<Tiers>, hashes: Vec<BlockHash>, num_ready: usize) -> BesideRecall {
        BesideRecall { tiers, hashes, num_ready }
    }

    /// Begins to read, if that saves time. `num_tokens` at the front have come from elsewhere meanwhile. To be called before the
    /// prompt is submitted, so that its first chunk leaves out what is read.
    pub fn start(mut self, num_tokens: usize) -> Option<Beside> {
        self.num_ready = self.num_ready.max(num_tokens / self.tiers.block_size());
        let plan = self.plan(self.hashes.len())?;
        let tasks = self.tiers.tasks.clone();
        let recall = async move {
            let started = Instant::now();
            match self.run(plan).await {
                Ok(num_blocks) => {
                    let num_tokens = num_blocks * self.tiers.block_size();
                    tracing::debug!(num_tokens, elapsed = ?started.elapsed(), "the end of a prefix recalled beside computing");
                }
                Err(error) => tracing::warn!(%error, "the end of a prefix not recalled; it is computed"),
            }
        };
        let task = tasks.spawn(recall.in_current_span());
        Some(Beside { task: task.abort_handle() })
    }

    /// Blocks at the front that are in the pool: what the engine has computed counts.
    fn num_pooled(&self) -> usize {
        let num_pooled = self.tiers.limits.engine.cache_log().num_in_pool(&self.hashes);
        num_pooled.max(self.num_ready).min(self.hashes.len())
    }

    /// What to read of the blocks before `end`. `None`: the engine will have computed it sooner.
    fn plan(&self, end: usize) -> Option<Plan> {
        let first = self.num_pooled();
        let hashes = self.hashes.get(first..end)?;
        let compute = |num_blocks| self.tiers.limits.compute_blocks(first, num_blocks);
        let num_blocks = self.tiers.store.meeting(hashes, compute);
        (num_blocks * self.tiers.block_size() >= MIN_BROUGHT).then(|| {
            let first = end - num_blocks;
            Plan { first, _expected: self.tiers.limits.engine.expect(&self.hashes, first) }
        })
    }

    /// Returns how many blocks came.
    async fn run(&self, plan: Plan) -> anyhow::Result<usize> {
        let num_all = self.hashes.len();
        let (mut end, mut next) = (num_all, Some(plan));
        while let Some(plan) = next {
            let Some(mut pieces) = self.read(plan.first, end).await else { break };
            while let Some((first, records)) = next_pieces(&mut pieces).await {
                if !self.bring_in(first, records, end).await? {
                    return Ok(num_all - end);
                }
                end = first;
            }
            // Late or lost: what is before it would be in vain.
            if end > plan.first {
                break;
            }
            // The prompt had to wait, or computing takes longer than it should: more can be read.
            next = self.plan(end);
        }
        Ok(num_all - end)
    }

    /// Reads the blocks from `first` to `end`, the last ones first. `None`: other recalls read for too long.
    async fn read(&self, first: usize, end: usize) -> Option<Receiver<Piece>> {
        let compute = || {
            let num_pooled = self.num_pooled();
            self.tiers.limits.compute_blocks(num_pooled, end.saturating_sub(num_pooled))
        };
        let wanted = &self.hashes[first..end];
        let permit = self.tiers.permit(wanted, compute()).await?;
        if !self.tiers.is_permitted(wanted, &permit) {
            return None;
        }
        let until = Instant::now() + compute();
        let (tiers, hashes) = (self.tiers.clone(), wanted.to_vec());
        // While a piece is written, or the engine is in a step, the next ones are read.
        let (sender, pieces) = mpsc::channel(self.tiers.store.num_pieces_ahead());
        spawn_blocking(move || {
            let _permit = permit;
            tiers.store.read_from_end(&hashes, until, |idx, records| {
                sender.blocking_send((first + idx, records)).is_ok()
            });
        });
        Some(pieces)
    }

    /// Brings records into the pool. False: the engine has computed them, there is no room, or a record is not what was saved.
    async fn bring_in(&self, first: usize, records: Vec<Arc<Record>>, end: usize) -> anyhow::Result<bool> {
        let engine = &self.tiers.limits.engine;
        let found = engine.reserve_blocks(&self.hashes[..end], first, end - first).await?;
        let Some(reservation) = found.filter(|found| found.num_cached_blocks() < records.len()) else {
            return Ok(false);
        };
        let tiers = self.tiers.clone();
        let written = spawn_blocking(move || {
            let num_cached = reservation.num_cached_blocks();
            let (blocks, records) = (&reservation.blocks()[num_cached..], &records[num_cached..]);
            let num_whole = tiers.store.write_to_pool(records, blocks)?;
            // What is before one that is not would end in a hole.
            anyhow::Ok((num_whole == records.len()).then_some(reservation))
        });
        let Some(reservation) = written.await?.context("the pool's device")? else { return Ok(false) };
        engine.cache_prefix(reservation);
        Ok(true)
    }
}

/// All pieces that were read, as one: the blocks before those of the last call.
async fn next_pieces(pieces: &mut Receiver<Piece>) -> Option<Piece> {
    let (mut first, last) = pieces.recv().await?;
    // The last ones come first.
    let mut runs = vec![last];
    while let Ok((before, records)) = pieces.try_recv() {
        first = before;
        runs.push(records);
    }
    Some((first, runs.into_iter().rev().flatten().collect()))
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.task.abort();
    }
}
