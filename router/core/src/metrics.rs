//! The router's metrics, `baton_router_*`. Durations are in seconds, as Prometheus has them. Workers have their own, under
//! other names.

use std::{
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use baton_journal::Journal;
use baton_kv_cache::KvFormat;
use baton_kv_index::SourceState;
use baton_planner::{ClusterView, Plan};
use baton_request::FailureKind;
use baton_router_workers::Workers;
use baton_telemetry::{Metrics, e2e_histogram, itl_histogram, ttft_histogram};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Unit,
};
use tokio::sync::watch;

use crate::{journal_metrics::JournalCollector, waiting::WaitingRequests};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    endpoint: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answer {
    endpoint: &'static str,
    status: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Endpoint {
    endpoint: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    prefill: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Migrated {
    cause: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleState {
    role: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Worker {
    worker: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerState {
    worker: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerTransport {
    worker: String,
    transport: String,
}

/// Paths and methods that generate: they have series, and traces, from the start.
pub const GENERATION_ENDPOINTS: [&str; 5] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/baton.v1.Inference/Generate",
];

/// Statuses whose series exist from the start.
const STATUSES: [&str; 5] = ["200", "400", "429", "500", "503"];

/// Handles to every metric; clones share them.
#[derive(Clone, Debug)]
pub struct RouterMetrics {
    metrics: Metrics,
    /// Held from the first gauge that a scrape sets until all are written: another would clear them.
    scrape: Arc<Mutex<()>>,
    answers: Family<Answer, Counter>,
    generations: Family<Outcome, Counter>,
    ttft: Histogram,
    predicted_ttft: Histogram,
    ttft_ratio: Histogram,
    itl: Histogram,
    e2e: Family<Endpoint, Histogram>,
    prompt_tokens: Counter,
    output_tokens: Counter,
    plans: Family<Kind, Counter>,
    retries: Family<Reason, Counter>,
    migrations: Family<Migrated, Counter>,
    prefix_sources: Counter,
    running: Gauge,
    pub(crate) waiting: WaitingRequests,
    pub(crate) body_bytes: Gauge,
    /// Connections of the port that are open.
    pub connections: Gauge,
    /// Those that came when the port had as many as it may have.
    pub connections_full: Counter,
    workers: Family<RoleState, Gauge>,
    kv_formats: Gauge,
    worker_running: Family<Worker, Gauge>,
    worker_waiting: Family<Worker, Gauge>,
    worker_queued_tokens: Family<Worker, Gauge>,
    worker_free_blocks: Family<Worker, Gauge>,
    worker_failures: Family<Worker, Counter>,
    handoff_bytes: Family<WorkerTransport, Gauge<u64, AtomicU64>>,
    index_sources: Family<State, Gauge>,
    worker_index_source: Family<WorkerState, Gauge>,
    index_memberships: Gauge<u64, AtomicU64>,
    index_bytes: Gauge<u64, AtomicU64>,
    object_store_blocks: Gauge<u64, AtomicU64>,
}

/// Formats of which none can be exchanged for another.
fn num_kv_formats(view: &ClusterView) -> usize {
    let mut formats: Vec<&KvFormat> = Vec::new();
    for worker in &view.workers {
        let format = &worker.record.kv_format;
        if formats.iter().all(|known| known.difference(format).is_some()) {
            formats.push(format);
        }
    }
    formats.len()
}

impl RouterMetrics {
    /// Registers every metric.
    pub fn new(metrics: &Metrics) -> RouterMetrics {
        let this = RouterMetrics {
            metrics: metrics.clone(),
            scrape: Arc::default(),
            answers: Family::default(),
            generations: Family::default(),
            ttft: ttft_histogram(),
            predicted_ttft: ttft_histogram(),
            // From a 16th to 16 times, by the square root of two.
            ttft_ratio: Histogram::new(exponential_buckets(0.0625, std::f64::consts::SQRT_2, 17)),
            itl: itl_histogram(),
            e2e: Family::new_with_constructor(e2e_histogram),
            prompt_tokens: Counter::default(),
            output_tokens: Counter::default(),
            plans: Family::default(),
            retries: Family::default(),
            migrations: Family::default(),
            prefix_sources: Counter::default(),
            running: Gauge::default(),
            waiting: WaitingRequests::default(),
            body_bytes: Gauge::default(),
            connections: Gauge::default(),
            connections_full: Counter::default(),
            workers: Family::default(),
            kv_formats: Gauge::default(),
            worker_running: Family::default(),
            worker_waiting: Family::default(),
            worker_queued_tokens: Family::default(),
            worker_free_blocks: Family::default(),
            worker_failures: Family::default(),
            handoff_bytes: Family::default(),
            index_sources: Family::default(),
            worker_index_source: Family::default(),
            index_memberships: Gauge::default(),
            index_bytes: Gauge::default(),
            object_store_blocks: Gauge::default(),
        };
        this.start_at_zero();
        metrics.register(|registry| {
            let registry = registry.sub_registry_with_prefix("baton_router");
            registry.register("requests", "Requests answered, by endpoint and status", this.answers.clone());
            registry.register(
                "generations",
                "Admitted generations that ended, by how: ok, error, aborted, cancelled (by the client), parked, \
                 resumed (by another connection)",
                this.generations.clone(),
            );
            registry.register_with_unit(
                "ttft",
                "From the request's arrival to a choice's first token",
                Unit::Seconds,
                this.ttft.clone(),
            );
            registry.register_with_unit(
                "predicted_ttft",
                "From an attempt's plan to its first token, as the plan predicted it",
                Unit::Seconds,
                this.predicted_ttft.clone(),
            );
            registry.register(
                "ttft_ratio",
                "Measured by predicted time from an attempt's plan to its first token",
                this.ttft_ratio.clone(),
            );
            registry.register_with_unit(
                "itl",
                "Between two tokens of a choice",
                Unit::Seconds,
                this.itl.clone(),
            );
            registry.register_with_unit(
                "e2e",
                "From a generation's arrival to its end",
                Unit::Seconds,
                this.e2e.clone(),
            );
            registry.register("prompt_tokens", "Prompt tokens admitted", this.prompt_tokens.clone());
            registry.register("output_tokens", "Tokens generated", this.output_tokens.clone());
            registry.register("plans", "Plans made, by where the prompt is computed", this.plans.clone());
            registry.register("attempt_failures", "Attempts that failed, by reason", this.retries.clone());
            registry.register(
                "migrations",
                "Running requests that were to go to another decode worker, by why and by what came of it",
                this.migrations.clone(),
            );
            registry.register(
                "prefix_sources",
                "Plans that name a worker to fetch a cached prefix from",
                this.prefix_sources.clone(),
            );
            registry.register("requests_running", "Generations that run now", this.running.clone());
            registry.register(
                "requests_waiting",
                "Choices of requests that wait for a usable worker now",
                this.waiting.num.clone(),
            );
            registry.register(
                "body_bytes",
                "Bytes of request bodies that are being read, prepared or journalled, and of streams that are being found",
                this.body_bytes.clone(),
            );
            registry.register("connections", "Connections that are open", this.connections.clone());
            registry.register(
                "connections_full",
                "Connections that came when as many were open as may be: refused, but for probes",
                this.connections_full.clone(),
            );
            registry.register("workers", "Workers, by role and state", this.workers.clone());
            registry.register(
                "kv_formats",
                "KV formats among the workers that cannot be exchanged: more than one while weights are updated",
                this.kv_formats.clone(),
            );
            registry.register(
                "worker_running_sequences",
                "Sequences in the worker's batch",
                this.worker_running.clone(),
            );
            registry.register(
                "worker_waiting_sequences",
                "Sequences that wait at the worker",
                this.worker_waiting.clone(),
            );
            registry.register(
                "worker_queued_tokens",
                "Prompt tokens that wait to be computed at the worker",
                this.worker_queued_tokens.clone(),
            );
            registry.register(
                "worker_free_blocks",
                "Blocks that are free at the worker",
                this.worker_free_blocks.clone(),
            );
            registry.register(
                "worker_attempt_failures",
                "Attempts that failed by the worker's fault",
                this.worker_failures.clone(),
            );
            registry.register(
                "worker_handoff_bytes",
                "KV bytes that handoffs moved since the worker started, by what carried them",
                this.handoff_bytes.clone(),
            );
            registry.register(
                "index_sources",
                "Workers in the index of cached blocks, by how far it is known what they hold",
                this.index_sources.clone(),
            );
            registry.register(
                "worker_index_source",
                "1, with how far it is known what the worker holds",
                this.worker_index_source.clone(),
            );
            registry.register(
                "index_memberships",
                "Pairs of a block and a worker that has it cached, in the index",
                this.index_memberships.clone(),
            );
            registry.register(
                "index_bytes",
                "Memory of the index of cached blocks",
                this.index_bytes.clone(),
            );
            registry.register(
                "object_store_blocks",
                "Blocks in the object stores that workers share",
                this.object_store_blocks.clone(),
            );
        });
        this
    }

    /// Registers the journal's counts.
    pub(crate) fn watch_journal(&self, journal: Option<&Arc<Journal>>) {
        let Some(journal) = journal.cloned() else { return };
        let collector = Box::new(JournalCollector(journal));
        self.metrics.register(|registry| registry.register_collector(collector));
    }

    /// Registers whether discovery works.
    pub fn watch_discovery(&self, is_connected: watch::Receiver<bool>) {
        let help = "1 if the discovery service answers; without it no worker is added";
        self.metrics.watch("baton_router_discovery_connected", help, move || *is_connected.borrow());
    }

    /// Series exist from the start: a rate over a series that appears later misses its first count.
    fn start_at_zero(&self) {
        for endpoint in GENERATION_ENDPOINTS {
            for status in STATUSES {
                drop(self.answers.get_or_create(&Answer { endpoint, status: status.to_owned() }));
            }
            for outcome in ["ok", "error", "aborted", "cancelled", "parked", "resumed"] {
                drop(self.generations.get_or_create(&Outcome { endpoint, outcome }));
            }
            drop(self.e2e.get_or_create(&Endpoint { endpoint }));
        }
        for prefill in ["local", "remote"] {
            drop(self.plans.get_or_create(&Kind { prefill }));
        }
        for kind in FailureKind::ALL {
            drop(self.retries.get_or_create(&Reason { reason: kind.name() }));
        }
        for cause in ["drain", "balance"] {
            for outcome in ["moved", "nowhere"] {
                drop(self.migrations.get_or_create(&Migrated { cause, outcome }));
            }
        }
    }

    /// The text of `/metrics`, with the workers' newest reports.
    pub fn encode(&self, workers: &Workers) -> String {
        let _scrape = self.scrape.lock().unwrap_or_else(PoisonError::into_inner);
        self.take_reports(workers);
        self.metrics.encode()
    }

    /// A response to a client has this HTTP status.
    pub fn on_answer(&self, endpoint: &'static str, status: String) {
        self.answers.get_or_create(&Answer { endpoint, status }).inc();
    }

    pub(crate) fn on_start(&self, prompt_tokens: u32) {
        self.running.inc();
        self.prompt_tokens.inc_by(u64::from(prompt_tokens));
    }

    pub(crate) fn on_end(&self, endpoint: &'static str, outcome: &'static str, took: Duration) {
        self.running.dec();
        self.generations.get_or_create(&Outcome { endpoint, outcome }).inc();
        self.e2e.get_or_create(&Endpoint { endpoint }).observe(took.as_secs_f64());
    }

    pub(crate) fn on_first_token(&self, after: Duration) {
        self.output_tokens.inc();
        self.ttft.observe(after.as_secs_f64());
    }

    /// The first token of an attempt came after `measured`; its plan had predicted so many seconds.
    pub(crate) fn on_predicted(&self, predicted: f64, measured: Duration) {
        self.predicted_ttft.observe(predicted);
        if predicted > 0.0 {
            self.ttft_ratio.observe(measured.as_secs_f64() / predicted);
        }
    }

    pub(crate) fn on_next_token(&self, after: Duration) {
        self.output_tokens.inc();
        self.itl.observe(after.as_secs_f64());
    }

    pub(crate) fn on_plan(&self, plan: &Plan) {
        self.plans.get_or_create(&Kind { prefill: plan.prefill.name() }).inc();
        self.prefix_sources.inc_by(u64::from(plan.prefix_source.is_some()));
    }

    /// "moved", "nowhere", or why the new attempt failed.
    pub(crate) fn on_migration(&self, cause: &'static str, outcome: &'static str) {
        self.migrations.get_or_create(&Migrated { cause, outcome }).inc();
    }

    pub(crate) fn on_failed_attempt(&self, reason: &'static str) {
        self.retries.get_or_create(&Reason { reason }).inc();
    }

    fn take_reports(&self, workers: &Workers) {
        let size = workers.index_size();
        for role in ["prefill", "decode"] {
            for state in ["ready", "backing_off", "draining", "unreachable"] {
                self.workers.get_or_create(&RoleState { role, state }).set(0);
            }
        }
        let view = workers.view();
        self.kv_formats.set(num_kv_formats(&view) as i64);
        for worker in view.workers {
            let (role, state) = (worker.record.role.name(), worker.usability.name());
            self.workers.get_or_create(&RoleState { role, state }).inc();
        }
        // A worker that has left has no series any more.
        self.worker_running.clear();
        self.worker_waiting.clear();
        self.worker_queued_tokens.clear();
        self.worker_free_blocks.clear();
        self.worker_failures.clear();
        self.worker_index_source.clear();
        self.handoff_bytes.clear();
        self.index_memberships.set(size.num_memberships);
        self.index_bytes.set(size.num_bytes);
        self.object_store_blocks.set(workers.num_stored_blocks() as u64);
        for state in SourceState::ALL {
            self.index_sources.get_or_create(&State { state: state.name() }).set(0);
        }
        for listed in workers.list() {
            let label = Worker { worker: listed.record.id.0.clone() };
            let state = listed.source.name();
            self.index_sources.get_or_create(&State { state }).inc();
            let source = WorkerState { worker: label.worker.clone(), state };
            self.worker_index_source.get_or_create(&source).set(1);
            self.worker_failures.get_or_create(&label).inc_by(listed.num_failures);
            let Some(report) = listed.report else { continue };
            let load = report.load;
            self.worker_running.get_or_create(&label).set(load.num_running.into());
            self.worker_waiting.get_or_create(&label).set(load.num_waiting.into());
            self.worker_queued_tokens.get_or_create(&label).set(load.num_queued_tokens as i64);
            self.worker_free_blocks.get_or_create(&label).set(load.num_free_blocks.into());
            for moved in load.handoff_bytes {
                let label = WorkerTransport { worker: label.worker.clone(), transport: moved.transport };
                self.handoff_bytes.get_or_create(&label).set(moved.bytes);
            }
        }
    }
}
