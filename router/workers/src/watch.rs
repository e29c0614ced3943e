//! One worker's `WatchLoad` stream, opened again whenever it ends.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_kv_index::{CacheSource, EventBatch, MAX_TIERS};
use baton_planner::WorkerKey;
use baton_proto::{
    v1,
    worker::{WatchLoadRequest, worker_client::WorkerClient},
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Status, transport::Channel};

/// A report comes every second at least; two missing ones are silence.
const SILENCE: Duration = Duration::from_millis(2500);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LIMIT: Duration = Duration::from_millis(500);

/// A worker's load, and when its report came.
#[derive(Clone, Debug)]
pub struct Report {
    /// What it says.
    pub load: v1::Load,
    /// When it came.
    pub at: Instant,
}

/// Watches one worker. Each report goes to `take`; `None` when the worker does not answer.
pub(super) struct Watcher<F> {
    key: WorkerKey,
    /// The router's name in tickets.
    router: u64,
    channel: Channel,
    cache: Arc<CacheSource>,
    take: F,
}

/// Why a stream is not read any more.
enum Ended {
    Broken(Status),
    /// Events of the cache are missing: another stream begins with them.
    Gap,
}

impl From<Status> for Ended {
    fn from(status: Status) -> Ended {
        Ended::Broken(status)
    }
}

impl<F: Fn(Option<Report>)> Watcher<F> {
    pub(super) fn new(
        key: WorkerKey,
        router: u64,
        channel: Channel,
        cache: Arc<CacheSource>,
        take: F,
    ) -> Watcher<F> {
        Watcher { key, router, channel, cache, take }
    }

    pub(super) async fn run(self, stop: CancellationToken) {
        // A drop frees everything that the watch holds.
        let _ = stop.run_until_cancelled(self.watch()).await;
    }

    async fn watch(&self) {
        let mut wait = RETRY_FIRST;
        loop {
            let mut answered = false;
            let Err(ended) = self.session(&mut answered).await;
            let status = match ended {
                Ended::Broken(status) => status,
                Ended::Gap => {
                    // It answers, and goes on to.
                    sleep(RETRY_FIRST).await;
                    continue;
                }
            };
            if answered {
                tracing::warn!(worker = %self.key, reason = status.message(), "worker does not answer: no request is sent to it until it reports its load again");
                wait = RETRY_FIRST;
            }
            (self.take)(None);
            sleep(wait).await;
            wait = (wait * 2).min(RETRY_LIMIT);
        }
    }

    async fn session(&self, answered: &mut bool) -> Result<std::convert::Infallible, Ended> {
        let silent = |_| Status::deadline_exceeded("no load report came");
        let mut client = WorkerClient::new(self.channel.clone());
        let request = WatchLoadRequest {
            router: self.router,
            cache_events: true,
            cache_from: self.cache.resume_from(),
        };
        let response = timeout(SILENCE, client.watch_load(request)).await.map_err(silent)??;
        let mut reports = response.into_inner();
        loop {
            let load = timeout(SILENCE, reports.message()).await.map_err(silent)??;
            let mut load = load.ok_or_else(|| Status::unavailable("it closed its load reports"))?;
            *answered = true;
            let events = load.cache.take().map(EventBatch::from);
            let num_slots = of_tiers(&load, |tier| usize::try_from(tier.num_slots).unwrap_or(usize::MAX));
            let said = self.cache.report(events, num_slots);
            if let Some(error) = said.news {
                tracing::warn!(worker = %self.key, %error, "what the worker says of its cache is incomplete; prompts are planned by what is known of it");
            }
            (self.take)(Some(Report { load, at: Instant::now() }));
            if said.wants_replay {
                return Err(Ended::Gap);
            }
        }
    }
}

/// Of each tier of the worker's own; 0 of one that is not there. An object store is the last.
pub(super) fn of_tiers<T: Default>(load: &v1::Load, number: impl Fn(&v1::KvTier) -> T) -> [T; MAX_TIERS] {
    let own = |tier: &&v1::KvTier| tier.store_name == 0;
    std::array::from_fn(|tier| load.tiers.get(tier).filter(own).map(&number).unwrap_or_default())
}
