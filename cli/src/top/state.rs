//! What is known of a router: its newest picture, and the requests that have ended. Pure.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Instant,
};

use serde::Deserialize;

/// Requests that are kept.
const MAX_REQUESTS: usize = 200;

/// An event of `/events`. The two have no field in common, so their names are not needed.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Event {
    Cluster(Cluster),
    Request(Request),
}

/// What a router knows now.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Cluster {
    pub(super) model: Option<String>,
    /// Why requests cannot be served, if they cannot.
    pub(super) missing: Option<String>,
    pub(super) num_running: usize,
    pub(super) workers: Vec<Worker>,
}

/// A worker by its newest report.
#[derive(Debug, Deserialize)]
pub(super) struct Worker {
    pub(super) id: String,
    /// Another after each start of the worker.
    incarnation: String,
    pub(super) role: String,
    pub(super) state: String,
    pub(super) num_running: Option<u32>,
    pub(super) num_waiting: Option<u32>,
    pub(super) num_queued_tokens: Option<u64>,
    pub(super) num_free_blocks: Option<u32>,
    pub(super) num_total_blocks: Option<u32>,
    pub(super) handoff_bytes: BTreeMap<String, u64>,
}

impl Worker {
    /// Blocks of KV in use, and all.
    pub(super) fn blocks(&self) -> Option<(u32, u32)> {
        let (free, total) = (self.num_free_blocks?, self.num_total_blocks?);
        Some((total.saturating_sub(free), total))
    }
}

/// A request that has ended.
#[derive(Debug, Deserialize)]
pub(super) struct Request {
    pub(super) id: String,
    pub(super) outcome: String,
    pub(super) prompt_tokens: u64,
    pub(super) completion_tokens: u64,
    pub(super) ttft_ms: Option<f64>,
    pub(super) tpot_ms: Option<f64>,
    pub(super) prefill_worker: Option<String>,
    pub(super) decode_worker: Option<String>,
}

/// Whether events come.
#[derive(Debug, PartialEq)]
pub(super) enum Connection {
    Open,
    Lost(String),
}

/// Bytes of handoffs since the worker started, by its last report.
#[derive(Debug)]
struct Moved {
    incarnation: String,
    at: Instant,
    bytes: u64,
}

/// All of it.
#[derive(Debug)]
pub(super) struct State {
    pub(super) url: String,
    pub(super) connection: Connection,
    pub(super) cluster: Cluster,
    /// The newest first.
    pub(super) requests: VecDeque<Request>,
    /// Bytes per second of handoffs, by transport; only transports that moved some.
    pub(super) rates: BTreeMap<String, f64>,
    /// By worker and transport. What a worker moved is kept while its report is missing.
    moved: HashMap<(String, String), Moved>,
}

impl State {
    pub(super) fn new(url: &str) -> State {
        State {
            url: url.to_owned(),
            connection: Connection::Open,
            cluster: Cluster::default(),
            requests: VecDeque::new(),
            rates: BTreeMap::new(),
            moved: HashMap::new(),
        }
    }

    pub(super) fn take(&mut self, event: Event, now: Instant) {
        self.connection = Connection::Open;
        match event {
            Event::Cluster(cluster) => {
                self.take_rates(&cluster, now);
                self.cluster = cluster;
            }
            Event::Request(request) => {
                self.requests.truncate(MAX_REQUESTS - 1);
                self.requests.push_front(request);
            }
        }
    }

    /// Half of what the workers count: each byte is counted where it is sent and where it is received. A worker that has
    /// started again, or is seen for the first time, has no rate yet.
    fn take_rates(&mut self, cluster: &Cluster, now: Instant) {
        self.rates.clear();
        for worker in &cluster.workers {
            for (transport, &bytes) in &worker.handoff_bytes {
                let moved = Moved { incarnation: worker.incarnation.clone(), at: now, bytes };
                let before = self.moved.insert((worker.id.clone(), transport.clone()), moved);
                let Some(before) = before.filter(|before| before.incarnation == worker.incarnation) else {
                    continue;
                };
                if bytes > 0 {
                    let elapsed = now.duration_since(before.at).as_secs_f64().max(1e-3);
                    let rate = bytes.saturating_sub(before.bytes) as f64 / elapsed;
                    *self.rates.entry(transport.clone()).or_default() += rate / 2.0;
                }
            }
        }
    }

    /// TTFT of the requests that are kept, in milliseconds, the newest first.
    pub(super) fn ttfts(&self) -> Vec<f64> {
        self.requests.iter().filter_map(|request| request.ttft_ms).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    pub(crate) fn worker(id: &str, role: &str, moved: u64) -> Value {
        json!({
            "id": id, "incarnation": "1", "role": role, "state": "ready", "num_running": 2, "num_waiting": 1,
            "num_queued_tokens": 640, "num_free_blocks": 48, "num_total_blocks": 64,
            "handoff_bytes": {"shm": moved, "tcp": 0},
        })
    }

    pub(crate) fn cluster(workers: &[Value]) -> Event {
        let cluster = json!({"model": "baton-tiny", "missing": null, "num_running": 3, "workers": workers});
        serde_json::from_value(cluster).unwrap()
    }

    pub(crate) fn request(nth: usize, ttft_ms: Value) -> Event {
        let request = json!({
            "id": format!("chatcmpl-{nth}"), "x_request_id": "x", "trace_id": null, "endpoint": "/v1/chat/completions",
            "outcome": "ok", "num_choices": 1, "prompt_tokens": 79, "completion_tokens": 9, "ttft_ms": ttft_ms,
            "tpot_ms": 0.5, "prefill_worker": "prefill-0", "decode_worker": "decode-0", "e2e_ms": 20.0,
        });
        serde_json::from_value(request).unwrap()
    }

    #[test]
    fn rates_are_of_what_moved_between_two_pictures() {
        let mut state = State::new("");
        let start = Instant::now();
        let mut take = |at: u64, workers: &[Value]| {
            state.take(cluster(workers), start + Duration::from_secs(at));
            state.rates.clone()
        };
        let rate = |rate: f64| BTreeMap::from([("shm".to_owned(), rate)]);
        let (prefill, decode) =
            (|moved| worker("prefill-0", "prefill", moved), |moved| worker("decode-0", "decode", moved));
        assert!(take(0, &[prefill(1000), decode(1000)]).is_empty(), "one picture is no rate");
        assert_eq!(
            take(2, &[prefill(5000), decode(5000)]),
            rate(2000.0),
            "a byte counts once, tcp moved nothing"
        );

        let mut silent = decode(0);
        silent["handoff_bytes"] = json!({});
        assert_eq!(take(3, &[prefill(5000), silent]), rate(0.0), "a report is missing");
        assert_eq!(take(4, &[prefill(5000)]), rate(0.0), "a worker is missing");
        assert_eq!(
            take(6, &[prefill(5000), decode(9000)]),
            rate(500.0),
            "4000 bytes in the 4 s since its last report"
        );

        let mut again = decode(90_000);
        again["incarnation"] = json!("2");
        assert_eq!(take(7, &[prefill(5000), again]), rate(0.0), "a worker that has started again");
        assert_eq!(take(8, &[worker("decode-1", "decode", 90_000)]), BTreeMap::new(), "a worker that is new");
    }

    #[test]
    fn requests_are_bounded_and_those_without_a_first_token_have_no_ttft() {
        let mut state = State::new("");
        state.take(request(0, Value::Null), Instant::now());
        for nth in 1..=MAX_REQUESTS {
            state.take(request(nth, json!(nth as f64)), Instant::now());
        }
        assert_eq!(state.requests.len(), MAX_REQUESTS);
        assert_eq!(state.requests[0].id, format!("chatcmpl-{MAX_REQUESTS}"));
        let ttfts = state.ttfts();
        assert_eq!(
            (ttfts.len(), ttfts[0], ttfts[MAX_REQUESTS - 1]),
            (MAX_REQUESTS, MAX_REQUESTS as f64, 1.0)
        );
    }
}
