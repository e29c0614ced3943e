//! What the pool lacks of a prompt is recalled before it is computed.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use baton_kv_cache::BlockHash;
use baton_kv_store::Worth;
use baton_request::Request;
use tokio::{
    task::spawn_blocking,
    time::{error::Elapsed, timeout},
};

use crate::tiers::Tiers;

/// What tiers have of a request and the pool lacks.
#[derive(Debug)]
pub struct Recall {
    tiers: Arc<Tiers>,
    hashes: Vec<BlockHash>,
    /// Blocks at the front that are in the pool.
    num_pooled: usize,
    /// Of the others.
    worth: Worth,
}

impl Recall {
    /// `None` when the pool has all that the tiers have of the request, or there are no tiers.
    pub fn of(tiers: Option<&Arc<Tiers>>, request: &Request) -> Option<Recall> {
        let tiers = tiers?.clone();
        let engine = &tiers.limits.engine;
        let mut hashes = engine.prefix_hashes(request, engine.num_sharable_tokens(request));
        let num_pooled = engine.cache_log().num_in_pool(&hashes);
        let worth = tiers.worth(&hashes, num_pooled);
        hashes.truncate(num_pooled + worth.num_blocks);
        (worth.num_blocks > 0).then_some(Recall { tiers, hashes, num_pooled, worth })
    }

    /// Brings the blocks into the pool, as far as there is room, and no longer than it would take to compute them. Dropping the
    /// future ends it; blocks that are being written are free when that is done.
    pub async fn run(self) {
        let block_size = self.tiers.block_size();
        let num_tokens = self.worth.num_blocks * block_size;
        let started = Instant::now();
        let (limit, until) = self.tiers.bounds(&self.worth);
        match timeout(limit, self.bring_in(until)).await {
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
    async fn bring_in(&self, until: Instant) -> anyhow::Result<usize> {
        let engine = &self.tiers.limits.engine;
        let mut end = self.num_pooled;
        while end < self.hashes.len() {
            let (mut records, permit) = self.tiers.read(&self.hashes[end..], until).await?;
            if records.is_empty() {
                break;
            }
            let start = end;
            let reservation = loop {
                match engine.reserve_blocks(&self.hashes[..start + records.len()], 0).await? {
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

impl Tiers {
    /// What the tiers have of the blocks after the first `num_before`, as far as reading them saves time.
    pub(crate) fn worth(&self, hashes: &[BlockHash], num_before: usize) -> Worth {
        let (limits, block_size) = (&self.limits, self.block_size());
        let compute =
            |num_blocks| limits.compute_time((num_before + num_blocks) * block_size, num_before * block_size);
        self.store.worth(&hashes[num_before..], compute)
    }

    /// How long a recall may take, and when an object store is given up that is slower than expected: before computing would end,
    /// and what came is kept.
    pub(crate) fn bounds(&self, worth: &Worth) -> (Duration, Instant) {
        let num_tokens = worth.num_blocks * self.block_size();
        let limit = self.limits.deadline(num_tokens).max(worth.compute);
        (limit, Instant::now() + (worth.expected + worth.compute) / 2)
    }
}
