//! The page at `/`, and the stream of events that it watches.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Extension, State},
    response::{IntoResponse, Response, Sse, sse::Event},
    routing::get,
};
use baton_keys::{SharePermit, TenantShares};
use baton_router_core::{Caller, Core, EndedRequest, Listed, RequestArrival};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;
use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    time::{Interval, MissedTickBehavior, interval},
};

use super::error::ApiError;

/// Nothing comes from elsewhere, and no other page frames this one.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Between two pictures of the workers.
const TICK: Duration = Duration::from_millis(500);

/// Streams of events that are open at a time.
const MAX_WATCHERS: usize = 64;
/// Those of one tenant, so that it leaves some to others. Operators have no such limit.
const MAX_WATCHERS_OF_TENANT: usize = 8;

/// The routes of the page. All of it is part of the program, so that it works offline.
pub(crate) fn routes() -> Router<Arc<Core>> {
    let watchers = TenantShares::new(MAX_WATCHERS, MAX_WATCHERS_OF_TENANT);
    Router::new()
        .route("/", get(asset("text/html; charset=utf-8", include_str!("index.html"))))
        .route("/page.css", get(asset("text/css; charset=utf-8", include_str!("page.css"))))
        .route("/page.js", get(asset("text/javascript; charset=utf-8", include_str!("page.js"))))
        .route(
            "/events",
            get(async move |State(core), Extension(arrival): Extension<RequestArrival>| {
                events(core, arrival.caller, watchers)
            }),
        )
}

fn asset(content_type: &'static str, text: &'static str) -> impl IntoResponse + Clone {
    let headers: [(HeaderName, &str); 4] = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // The next version of the program has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}

/// `GET /events`: `cluster` at once and every [`TICK`], `request` when one that the caller may see has ended.
fn events(core: Arc<Core>, caller: Caller, watchers: Arc<TenantShares>) -> Result<Response, ApiError> {
    let permit = watchers.begin(caller.holder()).map_err(|exceeded| {
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, format!("of the streams of events, {exceeded}"))
    })?;
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watcher = Watcher { ended: core.ended.subscribe(), core, caller, ticks, _permit: permit };
    let events = futures_util::stream::unfold(watcher, |mut watcher| async move {
        let event = watcher.next().await?;
        Some((Ok::<_, Infallible>(event), watcher))
    });
    let mut response = Sse::new(events).into_response();
    // Otherwise nginx buffers the events.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// One stream of events.
struct Watcher {
    core: Arc<Core>,
    caller: Caller,
    ended: Receiver<Arc<EndedRequest>>,
    ticks: Interval,
    _permit: SharePermit,
}

impl Watcher {
    /// `None` when the router stops.
    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                () = self.core.drain.cancelled() => return None,
                ended = self.ended.recv() => match ended {
                    Ok(ended) if self.caller.sees_tenant(&ended.tenant) => return Some(event("request", &*ended)),
                    Ok(_) => {}
                    // A slow watcher misses some.
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return None,
                },
                _ = self.ticks.tick() => return Some(event("cluster", &Cluster::of(&self.core))),
            }
        }
    }
}

fn event(name: &str, data: &impl Serialize) -> Event {
    Event::default().event(name).json_data(data).expect("plain data is JSON")
}

/// What the router knows now.
#[derive(Serialize)]
struct Cluster {
    /// Absent while its tokenizer is being loaded.
    model: Option<String>,
    /// Why requests cannot be served, if they cannot.
    missing: Option<String>,
    /// Requests that run.
    num_running: usize,
    workers: Vec<WorkerNow>,
}

/// A worker as its newest report shows it; numbers are null before the first.
#[derive(Serialize)]
struct WorkerNow {
    id: String,
    /// Another after each start of the worker. As text, because JavaScript's numbers have 53 bits.
    incarnation: String,
    role: &'static str,
    state: &'static str,
    num_running: Option<u32>,
    num_waiting: Option<u32>,
    num_queued_tokens: Option<u64>,
    num_free_blocks: Option<u32>,
    num_total_blocks: Option<u32>,
    /// Since the worker started, by transport.
    handoff_bytes: BTreeMap<String, u64>,
}

impl Cluster {
    fn of(core: &Core) -> Cluster {
        Cluster {
            model: core.model().ok().map(|model| model.name.clone()),
            missing: core.missing(),
            num_running: core.active.num_running(),
            workers: core.workers.list().into_iter().map(WorkerNow::of).collect(),
        }
    }
}

impl WorkerNow {
    fn of(listed: Listed) -> WorkerNow {
        let load = listed.report.map(|report| report.load);
        let moved = load.iter().flat_map(|load| &load.handoff_bytes);
        WorkerNow {
            handoff_bytes: moved.map(|moved| (moved.transport.clone(), moved.bytes)).collect(),
            id: listed.record.id.0.clone(),
            incarnation: listed.record.incarnation.to_string(),
            role: listed.record.role.name(),
            state: listed.usability.name(),
            num_running: load.as_ref().map(|load| load.num_running),
            num_waiting: load.as_ref().map(|load| load.num_waiting),
            num_queued_tokens: load.as_ref().map(|load| load.num_queued_tokens),
            num_free_blocks: load.as_ref().map(|load| load.num_free_blocks),
            num_total_blocks: load.as_ref().map(|load| load.num_total_blocks),
        }
    }
}
