//! KV of a prompt that is elsewhere comes into the pool: before the prompt is computed, and meanwhile.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_request::Request;
use baton_worker_tiers::{Beside, Recall};
use tracing::{Instrument, Span};

use crate::{
    handoff::{
        opening::PrefixSource,
        prefix_fetch::{self, Coming, Fetched},
    },
    worker::Worker,
};

/// A source that has less time left is not asked. Peers count deadlines in milliseconds.
const MIN_FETCH: Duration = Duration::from_millis(1);

/// What comes while a prompt is computed. It ends when this is dropped.
#[derive(Debug, Default)]
pub struct Meanwhile {
    _from_tiers: Option<Beside>,
    _from_peer: Option<Coming>,
}

/// Brings in what this worker's tiers have, then, in the time that they leave, what `source` has more: both together take no longer than
/// computing the prompt. Returns when the prompt is to be submitted.
pub async fn bring_in(
    worker: Arc<Worker>,
    recall: Option<Recall>,
    source: Option<PrefixSource>,
    request: Request,
) -> Meanwhile {
    let num_tokens = worker.engine().num_sharable_tokens(&request);
    let until = Instant::now() + worker.fetch_limits().deadline(num_tokens);
    let rest = match recall {
        Some(recall) if recall.is_awaited() => {
            wait(&worker, "tiers", tracing::info_span!("recall"), recall.run()).await
        }
        Some(recall) => recall.run().await,
        None => None,
    };
    let left = until.saturating_duration_since(Instant::now());
    let Fetched { num_tokens, coming } = match source {
        Some(source) if left >= MIN_FETCH => {
            let span =
                tracing::info_span!("fetch prefix", otel.kind = "client", source = source.peer.worker_id);
            let fetch = prefix_fetch::fetch(worker.clone(), source, request, left);
            wait(&worker, "worker", span, fetch).await
        }
        _ => Fetched::default(),
    };
    // One of them is enough for the end of the prompt.
    let rest = rest.filter(|_| coming.is_none());
    Meanwhile { _from_tiers: rest.and_then(|rest| rest.start(num_tokens)), _from_peer: coming }
}

/// Waits for what comes from `source`, in this span, and measures how long.
async fn wait<T>(worker: &Worker, source: &'static str, span: Span, coming: impl Future<Output = T>) -> T {
    let started = Instant::now();
    let came = coming.instrument(span).await;
    worker.metrics().prefix_waited(source, started.elapsed());
    came
}
