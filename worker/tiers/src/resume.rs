//! What preempted sequences lost is recalled before they run again.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
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
        // Nothing is read, so it waits for no permit.
        if worth.num_blocks == 0 {
            return;
        }
        let (limit, patience) = self.bounds(&worth);
        let end = num_cached + worth.num_blocks;
        match timeout(limit, self.load(resumption, end, limit, patience)).await {
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
        limit: Duration,
        patience: Duration,
    ) -> anyhow::Result<usize> {
        let wanted = &resumption.hashes()[resumption.num_ready()..end];
        let Some(permit) = self.permit(wanted, limit).await else { return Ok(resumption.num_ready()) };
        let until = Instant::now() + patience;
        while resumption.num_ready() < end {
            let start = resumption.num_ready();
            let batch = self.batch(&resumption.hashes()[start..end], &permit);
            let (records, _) = self.read(batch, until, &permit).await?;
            if records.is_empty() {
                break;
            }
            let (tiers, permit, end_read) = (self.clone(), permit.clone(), start + records.len());
            // Invariant 3: the writer keeps the blocks, also when this future is dropped.
            let written = spawn_blocking(move || {
                let _permit = permit;
                resumption.loaded(tiers.store.write_to_pool(&records, &resumption.blocks()[start..])?);
                anyhow::Ok(resumption)
            });
            resumption = written.await?.context("the pool's device")?;
            // A record is not what was saved.
            if resumption.num_ready() < end_read {
                break;
            }
        }
        Ok(resumption.num_ready())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use baton_engine::EngineConfig;
    use baton_engine_testing::FakeModel;
    use baton_kv_store::{HostSlots, KvStore, Slots};
    use baton_request::{Request, SamplingParams};
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::limits::FetchLimits;

    const BLOCK_SIZE: usize = 4;
    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_sequence_of_which_tiers_have_nothing_waits_for_no_permit() {
        // Room for one of two sequences: the younger one is preempted, and loses its blocks to the older one.
        let config = EngineConfig {
            num_blocks: 8,
            max_running: 2,
            token_budget: 16,
            max_drafted_step_tokens: 16,
            itl_target: None,
            context_length: 8 * BLOCK_SIZE,
            max_waiting: 2,
            prefix_cache: true,
            model_revision: "fake".into(),
            step_prior: None,
            grammars: None,
            blending: None,
            clock: Instant::now,
            thread_waits: || Duration::ZERO,
        };
        let (let_go, gate) = mpsc::channel::<()>();
        let executor = FakeModel::new(BLOCK_SIZE).executor_with_hook(move |_| {
            let _ = gate.recv();
            Ok(())
        });
        let (engine, _thread) = baton_engine::start(executor, None, config).expect("it starts");
        let mut resumptions = engine.resumptions();
        let generate = |first: u32| {
            let sampling = SamplingParams { max_tokens: 24, ..SamplingParams::default() };
            let prompt = (first..first + 8).collect();
            engine.generate(Request { prompt, sampling, ..Request::default() }).expect("accepted")
        };
        let _streams = [generate(0), generate(20)];
        drop(let_go);
        let resumption = timeout(PATIENCE, resumptions.recv()).await.expect("in time").expect("it runs");
        assert!(!resumption.hashes().is_empty());

        let record_bytes = engine.storage().layout().block_bytes();
        let slots: Box<dyn Slots> = Box::new(HostSlots::new(1 << 20, record_bytes));
        let store = KvStore::over_slots(vec![slots], engine.storage().clone(), 1, |_, _| {});
        let limits = FetchLimits { engine, fetch_deadline: None, handoff_deadline: PATIENCE };
        let tiers = Arc::new(Tiers::over(store, limits, TaskTracker::new()));
        let _reading = [&tiers.reading.memory, &tiers.reading.devices].map(|permits| {
            let num_permits = permits.available_permits() as u32;
            permits.try_acquire_many(num_permits).expect("all are free")
        });
        let resumed = timeout(Duration::ZERO, tiers.resume(resumption)).await;
        assert!(resumed.is_ok(), "it waits");
    }
}
