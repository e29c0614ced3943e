//! One worker's `WatchLoad` stream, opened again whenever it ends.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_planner::WorkerKey;
use baton_proto::worker::{WatchLoadRequest, worker_client::WorkerClient};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Status, transport::Channel};

use super::{Report, Workers};

/// A report comes every second at least; two missing ones are silence.
const SILENCE: Duration = Duration::from_millis(2500);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LIMIT: Duration = Duration::from_millis(500);

/// Watches one worker.
pub(super) struct Watcher {
    workers: Arc<Workers>,
    key: WorkerKey,
    channel: Channel,
}

impl Watcher {
    pub(super) fn new(workers: Arc<Workers>, key: WorkerKey, channel: Channel) -> Watcher {
        Watcher { workers, key, channel }
    }

    pub(super) async fn run(self, stop: CancellationToken) {
        // A drop frees everything that the watch holds.
        let _ = stop.run_until_cancelled(self.watch()).await;
    }

    async fn watch(&self) {
        let mut wait = RETRY_FIRST;
        loop {
            let mut answered = false;
            let Err(status) = self.session(&mut answered).await;
            if answered {
                tracing::warn!(worker = %self.key, reason = status.message(), "worker does not answer: no request is sent to it until it reports its load again");
                wait = RETRY_FIRST;
            }
            self.workers.enter(&self.key, None);
            sleep(wait).await;
            wait = (wait * 2).min(RETRY_LIMIT);
        }
    }

    async fn session(&self, answered: &mut bool) -> Result<std::convert::Infallible, Status> {
        let silent = |_| Status::deadline_exceeded("no load report came");
        let mut client = WorkerClient::new(self.channel.clone());
        let response = timeout(SILENCE, client.watch_load(WatchLoadRequest {})).await.map_err(silent)??;
        let mut reports = response.into_inner();
        loop {
            let load = timeout(SILENCE, reports.message()).await.map_err(silent)??;
            let load = load.ok_or_else(|| Status::unavailable("it closed its load reports"))?;
            *answered = true;
            self.workers.enter(&self.key, Some(Report { load, at: Instant::now() }));
        }
    }
}
