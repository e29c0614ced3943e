//! What an object store has that workers share: one of them tells it, and another one when that has gone.

use std::{convert::Infallible, sync::Arc, time::Duration};

use baton_kv_index::{BlockKey, StoredBlocks};
use baton_planner::WorkerKey;
use baton_proto::{
    v1,
    worker::{Segment, WatchSegmentsRequest, worker_client::WorkerClient},
};
use tokio::time::{sleep, timeout};
use tonic::{Status, transport::Channel};

/// How long a worker may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two workers that are asked.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The object store that a report names.
pub(super) fn object_tier(load: &v1::Load) -> Option<&v1::KvTier> {
    load.tiers.iter().find(|tier| tier.store_name != 0)
}

/// Follows what a store has. `teller` gives a worker that shares it, the next one after that which was asked last; `None`: there is none,
/// and the watch ends. `take` gets the blocks when a worker has told all of them; they change from then on.
pub(super) async fn watch(
    teller: impl Fn(Option<&WorkerKey>) -> Option<(WorkerKey, Channel)>,
    take: impl Fn(Arc<StoredBlocks>),
) {
    let mut last = None;
    while let Some((key, channel)) = teller(last.as_ref()) {
        let Err(status) = follow(channel, &take).await;
        tracing::debug!(worker = %key, reason = status.message(), "the worker does not tell any more what its object store has");
        last = Some(key);
        sleep(RETRY_AFTER).await;
    }
}

async fn follow(channel: Channel, take: impl Fn(Arc<StoredBlocks>)) -> Result<Infallible, Status> {
    let late = |_| Status::deadline_exceeded("no answer came");
    let mut client = WorkerClient::new(channel);
    let answer = client.watch_segments(WatchSegmentsRequest {});
    let mut changes = timeout(ANSWER_TIMEOUT, answer).await.map_err(late)??.into_inner();
    let blocks = Arc::new(StoredBlocks::default());
    loop {
        // A worker that is gone breaks the connection, at the latest by its keep-alive.
        let change = changes.message().await?.ok_or_else(|| Status::unavailable("the stream ended"))?;
        change.removed.iter().for_each(|&number| blocks.remove(number));
        for Segment { number, blocks: names } in change.added {
            blocks.add(number, names.into_iter().map(BlockKey));
        }
        // Until all is told, what another worker told before holds.
        if change.is_current {
            take(blocks.clone());
        }
    }
}
