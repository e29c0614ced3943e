//! Blocks whose KV may be wrong leave the tiers, as they left the pool.

use std::sync::Arc;

use baton_kv_cache::BlockHash;
use baton_kv_store::MAX_SAVES;
use tokio::task::spawn_blocking;

use crate::tiers::Tiers;

impl Tiers {
    /// Forgets the blocks of requests whose logits were not finite, until the engine ends.
    pub async fn forget_spoiled(self: Arc<Self>) {
        let mut spoiled = self.limits.engine.spoiled_blocks();
        while let Some(hashes) = spoiled.recv().await {
            self.forget(hashes).await;
        }
    }

    async fn forget(self: &Arc<Self>, hashes: Vec<BlockHash>) {
        tracing::info!(
            num_blocks = hashes.len(),
            "kv of a request is forgotten in the tiers: its logits were not finite"
        );
        // What was held before the pool forgot these blocks is copied now. The store forgets after that.
        let _all = self.copying.acquire_many(MAX_SAVES as u32).await;
        let tiers = self.clone();
        // The store's thread may be busy. Its disk is not waited for.
        let forget = move || drop(tiers.store.forget(hashes));
        spawn_blocking(forget).await.expect("the store does not panic, and runs while its tiers do");
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use baton_engine::{EngineConfig, EngineError, TokenEvent};
    use baton_engine_testing::FakeModel;
    use baton_kv_store::{HostSlots, KvStore, Slots};
    use baton_request::{Request, SamplingParams};
    use tokio::time::sleep;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::{limits::FetchLimits, recall::Recall, save::SaveAtEnd};

    const BLOCK_SIZE: usize = 4;
    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn blocks_of_a_request_with_invalid_logits_leave_the_tiers_and_are_not_saved() {
        let config = EngineConfig {
            num_blocks: 16,
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
        let executor = FakeModel { nan_after: Some(13), ..FakeModel::new(BLOCK_SIZE) }.executor();
        let (engine, thread) = baton_engine::start(executor, None, config).expect("it starts");
        let record_bytes = engine.storage().layout().block_bytes();
        let slots: Box<dyn Slots> = Box::new(HostSlots::new(1 << 20, record_bytes));
        let store = KvStore::over_slots(vec![slots], engine.storage().clone(), 1, |_, _| {});
        let limits = FetchLimits { engine: engine.clone(), fetch_deadline: None, handoff_deadline: PATIENCE };
        let tiers = Arc::new(Tiers::over(store, limits, TaskTracker::new()));
        let forgetting = tokio::spawn(tiers.clone().forget_spoiled());

        // Two blocks, and a token.
        let request = |last: u32| {
            let sampling = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
            let prompt = (20..28).chain([last]).collect();
            Request { prompt, sampling, ..Request::default() }
        };
        let num_held = || tiers.counts()[0].num_held;
        let deadline = Instant::now() + PATIENCE;
        let save = SaveAtEnd::new(Some(&tiers), &request(1));
        let mut stream = engine.generate(request(1)).expect("accepted");
        while !matches!(stream.next().await.expect("it ends"), TokenEvent::Finished(_)) {}
        drop(save);
        while num_held() < 2 {
            assert!(Instant::now() < deadline, "{:?}", tiers.counts());
            sleep(Duration::from_millis(5)).await;
        }
        // The first to fail may be too early: the engine does not know yet whom to tell.
        while num_held() > 0 {
            assert!(Instant::now() < deadline, "{:?}", tiers.counts());
            let save = SaveAtEnd::new(Some(&tiers), &request(13));
            let mut stream = engine.generate(request(13)).expect("accepted");
            let failed = TokenEvent::Failed(EngineError::InvalidLogits);
            while stream.next().await.expect("it ends") != failed {}
            drop(save);
            sleep(Duration::from_millis(5)).await;
        }
        tiers.tasks().close();
        tiers.tasks().wait().await;
        assert_eq!(num_held(), 0, "nothing of it is saved");
        assert!(Recall::of(Some(&tiers), &request(1)).await.is_none());
        engine.shutdown();
        forgetting.await.expect("it ends with the engine");
        thread.join().expect("it ends");
    }
}
