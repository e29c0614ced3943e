//! What preempted sequences lost is recalled before they run again.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use anyhow::Context;
use baton_engine::Resumption;
use baton_tier_policy::ReadMode;
use tokio::{
    task::spawn_blocking,
    time::{error::Elapsed, timeout},
};

use crate::tiers::Tiers;

impl Tiers {
    /// Recalls what preempted sequences lost, until the engine ends.
    pub async fn resume_preempted(self: Arc<Self>) {
        let mut resumptions = self.limits.engine.resumptions();
        while let Some(resumption) = resumptions.recv().await {
            let tiers = self.clone();
            self.tasks.spawn(async move { tiers.resume(resumption).await });
        }
    }

    /// Invariant 6: whatever ends it, the sequence runs again.
    async fn resume(self: &Arc<Self>, resumption: Resumption) {
        let block_size = self.block_size();
        let num_cached = resumption.num_ready();
        let worth = self.worth(resumption.hashes(), num_cached, ReadMode::Alone);
        let (limit, until) = self.bounds(&worth);
        let end = num_cached + worth.num_blocks;
        match timeout(limit, self.load(resumption, end, until)).await {
            Ok(Ok(num_ready)) => {
                let num_tokens = (num_ready - num_cached) * block_size;
                self.num_resumed_tokens.fetch_add(num_tokens as u64, Ordering::Relaxed);
                tracing::debug!(num_tokens, "preempted sequence recalled from tiers");
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "preempted sequence not recalled; it is computed again");
            }
            Err(Elapsed { .. }) => tracing::info!(?limit, "preempted sequence not recalled in time"),
        }
    }

    /// Loads the blocks of a preempted sequence before `end`. Returns how many at its front are ready.
    async fn load(
        self: &Arc<Self>,
        mut resumption: Resumption,
        end: usize,
        until: Instant,
    ) -> anyhow::Result<usize> {
        let permit = self.permit().await?;
        while resumption.num_ready() < end {
            let start = resumption.num_ready();
            let (records, _) = self.read(&resumption.hashes()[start..end], until, &permit).await?;
            if records.is_empty() {
                break;
            }
            let (tiers, permit) = (self.clone(), permit.clone());
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
}
