//! Prefixes that another worker has cached: asked for before a prompt is computed, and put into this worker's cache.
//!
//! Whatever goes wrong costs the time until then, and no more: what did not come is computed.

use std::{sync::Arc, time::Duration};

use baton_engine::Request;
use baton_handoff::Extent;
use baton_proto::worker::PrefillPeer;
use tokio::sync::mpsc;
use tracing::Instrument;

use super::decode::{Handoff, HandoffEvent, Plan};
use crate::worker::Worker;

/// It says one thing: how it ended.
const EVENTS_BOUND: usize = 1;

/// A fetch may take as long as the computing that it saves, by what steps took here. So a source that is slow, or
/// silent, at most doubles the time to the first token.
fn patience(worker: &Worker, num_tokens: usize) -> Duration {
    let config = worker.config();
    let computing = || worker.engine().prefill_time(num_tokens).unwrap_or(UNKNOWN).max(SHORTEST);
    config.fetch_deadline.unwrap_or_else(computing).min(config.handoff_deadline)
}

/// Nothing was computed here yet.
const UNKNOWN: Duration = Duration::from_secs(1);
/// Less says nothing about the source: connecting to it for the first time, and one step of its engine, take as long.
const SHORTEST: Duration = Duration::from_millis(250);

/// Fetches the full blocks of a request's known tokens that `source` has cached and this worker lacks. Dropping the
/// future cancels it.
pub async fn fetch(worker: Arc<Worker>, source: PrefillPeer, attempt: u32, request: Request) {
    let num_tokens = worker.engine().num_sharable_tokens(&request);
    if num_tokens == 0 {
        return;
    }
    let prompt = request.prompt.iter().chain(&request.output).copied().take(num_tokens).collect();
    let request = Request { prompt, output: Vec::new(), ..request };
    let Ok(link) = worker.peers().link(&source.address) else {
        tracing::warn!(address = source.address, "the source of a prefix has no usable address");
        return;
    };
    let deadline = patience(&worker, num_tokens);
    let (events, mut received) = mpsc::channel(EVENTS_BOUND);
    // What is cached is everybody's: what one request likes does not count.
    let wire = worker.config().kv_wire;
    let plan = Plan { request, attempt, peer: source, wire, extent: Extent::Cached, prefix_source: None };
    let handoff = Handoff::new(worker.clone(), link, plan, deadline, events);
    worker.lifecycle().spawn(handoff.run().in_current_span());
    let metrics = worker.metrics();
    // It ends by its deadline.
    match received.recv().await {
        Some(HandoffEvent::Prefix(Ok(num_tokens))) => metrics.prefix_fetched("fetched", num_tokens),
        Some(HandoffEvent::Prefix(Err(error))) => metrics.prefix_fetched(error.label(), 0),
        _ => metrics.prefix_fetched("broken", 0),
    }
}
