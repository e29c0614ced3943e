//! What operators see: the metrics that dashboards and alerts read, and the trace of a request over three processes.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value as AnyValue},
    trace::v1::{Span, span::SpanKind, status::StatusCode},
};
use serde_json::json;
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use crate::{
    harness::{Cluster, Http},
    prompts::filler,
};

const ROOT: &str = "POST /v1/completions";
const NUM_REQUESTS: usize = 4;

/// A span and the service that exported it.
type Exported = (String, Span);

/// An OpenTelemetry collector that keeps what it gets.
#[derive(Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Exported>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.spans.lock().expect("no test panics with it");
        for of_process in request.into_inner().resource_spans {
            let attributes = of_process.resource.expect("a process names itself").attributes;
            let service = text(&attributes, "service.name").expect("by its service");
            let exported = of_process.scope_spans.into_iter().flat_map(|scope| scope.spans);
            spans.extend(exported.map(|span| (service.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Its endpoint, and the task that serves it.
    async fn serve(&self) -> (String, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has ports");
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        let service = TraceServiceServer::new(self.clone());
        let server = Server::builder().add_service(service);
        let serving = tokio::spawn(async move {
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.expect("the collector serves");
        });
        (endpoint, serving)
    }
}

fn value(attributes: &[KeyValue], key: &str) -> Option<AnyValue> {
    attributes.iter().find(|attribute| attribute.key == key)?.value.clone()?.value
}

fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    match value(attributes, key)? {
        AnyValue::StringValue(text) => Some(text),
        other => panic!("{key} is {other:?}"),
    }
}

/// Names of metrics in a text: words that begin as ours, vLLM's and those of processes do.
fn metric_names(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    words.filter(|word| {
        let is_ours = ["baton_", "vllm:", "process_"].iter().any(|prefix| word.starts_with(prefix));
        // `baton_*` and `vllm:*` name many of them.
        is_ours && !word.ends_with(['_', ':'])
    })
}

/// Names of the series of an exposition; of a family without series yet, the name that they would have.
fn exported_names(exposition: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in exposition.lines() {
        match line.strip_prefix("# TYPE ").and_then(|family| family.split_once(' ')) {
            Some((name, "counter")) => names.insert(format!("{name}_total")),
            Some((name, "info")) => names.insert(format!("{name}_info")),
            Some((name, _)) => names.insert(name.to_owned()),
            None => names.insert(line.split(['{', ' ']).next().unwrap_or_default().to_owned()),
        };
    }
    names
}

/// Every text that reads metrics: dashboards, alerts, runbooks, the page, and the chart's autoscaling.
fn readers_of_metrics() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files =
        vec![root.join("docs/guide/observing.md"), root.join("helm/baton/templates/_autoscaler.tpl")];
    for folder in ["deploy/observability", "deploy/observability/dashboards"] {
        let entries = fs::read_dir(root.join(folder)).expect("it is part of the project");
        files.extend(
            entries.map(|entry| entry.expect("it can be listed").path()).filter(|path| path.is_file()),
        );
    }
    files
}

/// Every name that is read is exported from the start, before the first request.
async fn check_names(cluster: &Cluster) {
    let mut exported = exported_names(&cluster.http.get("/metrics").await.expect("metrics are served").text);
    let mut of_workers = BTreeSet::new();
    for worker in cluster.loads().await {
        let metrics = Http::new(worker.address).get("/metrics").await.expect("metrics are served").text;
        of_workers.append(&mut exported_names(&metrics));
    }
    let twice: Vec<_> =
        exported.intersection(&of_workers).filter(|name| name.starts_with("baton_")).collect();
    let of_every_process = ["baton_build_info", "baton_exported_spans_total", "baton_lost_spans_total"];
    assert_eq!(twice, of_every_process, "a name means one thing, on routers or on workers");
    exported.append(&mut of_workers);
    let (mut num_read, mut missing) = (0, Vec::new());
    for file in readers_of_metrics() {
        let text = fs::read_to_string(&file).expect("it can be read");
        for name in metric_names(&text) {
            num_read += 1;
            if !exported.contains(name) {
                missing.push(format!("{} reads {name}", file.display()));
            }
        }
    }
    assert!(missing.is_empty(), "no process exports these: {missing:#?}");
    assert!(num_read > 100, "only {num_read} names were found in dashboards and alerts");
}

/// The part of `start..end` that the spans cover, 0 to 1.
fn covered(spans: &[&Span], start: u64, end: u64) -> f64 {
    let clip = |span: &&Span| {
        let (from, to) = (span.start_time_unix_nano.max(start), span.end_time_unix_nano.min(end));
        (from < to).then_some((from, to))
    };
    let mut parts: Vec<(u64, u64)> = spans.iter().filter_map(clip).collect();
    parts.sort_unstable();
    let (mut sum, mut until) = (0, start);
    for (from, to) in parts {
        sum += to.saturating_sub(from.max(until));
        until = until.max(to);
    }
    sum as f64 / (end - start) as f64
}

/// The spans of one remote request, checked one by one. Returns the part of its TTFT that they cover.
fn check_trace(trace: &[&Exported]) -> f64 {
    let list =
        || trace.iter().map(|(service, span)| format!("{service}: {}\n", span.name)).collect::<String>();
    let find = |service: &str, name: &str| {
        let found = trace.iter().find(|(by, span)| by == service && span.name == name);
        &found.unwrap_or_else(|| panic!("no span {name:?} of {service} in\n{}", list())).1
    };
    let by_id: HashMap<_, _> = trace.iter().map(|(_, span)| (&span.span_id, span)).collect();
    let tree = [
        ("baton-router", "tokenise", SpanKind::Internal, "POST /v1/completions"),
        ("baton-router", "plan", SpanKind::Internal, "POST /v1/completions"),
        ("baton-router", "attempt", SpanKind::Client, "POST /v1/completions"),
        ("baton-decode-worker", "generate", SpanKind::Server, "attempt"),
        ("baton-decode-worker", "handoff", SpanKind::Client, "generate"),
        ("baton-decode-worker", "wait for prefill worker", SpanKind::Internal, "handoff"),
        ("baton-decode-worker", "exposed transfer", SpanKind::Internal, "handoff"),
        ("baton-decode-worker", "decode", SpanKind::Internal, "generate"),
        ("baton-prefill-worker", "handoff", SpanKind::Server, "handoff"),
        ("baton-prefill-worker", "queue", SpanKind::Internal, "handoff"),
        ("baton-prefill-worker", "prefill", SpanKind::Internal, "handoff"),
        ("baton-prefill-worker", "prefill chunk", SpanKind::Internal, "prefill"),
        ("baton-prefill-worker", "transfer", SpanKind::Internal, "handoff"),
    ];
    for (service, name, kind, parent) in tree {
        let span = find(service, name);
        assert_eq!(span.kind(), kind, "{service}: {name}");
        assert_eq!(by_id[&span.parent_span_id].name, parent, "{service}: {name}");
        let code = span.status.clone().unwrap_or_default().code();
        assert_ne!(code, StatusCode::Error, "{service}: {name}");
    }
    let root = find("baton-router", ROOT);
    assert_eq!(root.kind(), SpanKind::Server);
    assert_eq!(text(&root.attributes, "gen_ai.request.model").as_deref(), Some("baton-tiny"));
    assert_eq!(value(&root.attributes, "gen_ai.usage.output_tokens"), Some(AnyValue::IntValue(8)));
    assert_eq!(value(&root.attributes, "http.response.status_code"), Some(AnyValue::IntValue(200)));

    // The parts alone, without the spans that contain them.
    let contain_others = [ROOT, "attempt", "generate", "handoff"];
    let spans = trace.iter().map(|(_, span)| span);
    let parts: Vec<&Span> = spans.filter(|span| !contain_others.contains(&span.name.as_str())).collect();
    let ttft = value(&root.attributes, "gen_ai.latency.time_to_first_token");
    let Some(AnyValue::DoubleValue(ttft)) = ttft else { panic!("the TTFT is {ttft:?}") };
    let start = root.start_time_unix_nano;
    covered(&parts, start, start + (ttft * 1e9) as u64)
}

#[tokio::test]
async fn dashboards_read_what_is_exported_and_one_trace_covers_a_remote_request() {
    let collector = Collector::default();
    let (endpoint, serving) = collector.serve().await;
    let flags = format!("--otlp-endpoint {endpoint}");
    let dir = tempfile::tempdir().expect("a directory");
    // A router has the metrics of a journal if it has one.
    let router_flags = format!("{flags} --durable {}", dir.path().join("journal").display());
    let mut cluster = Cluster::new().router_flags(&router_flags).worker_flags(&flags).start().await;
    check_names(&cluster).await;

    for seed in 0..NUM_REQUESTS {
        let body = json!({
            "model": "baton-tiny", "prompt": filler(seed, 600), "max_tokens": 8, "temperature": 0,
            "ignore_eos": true, "prefill_mode": "remote",
        });
        cluster.complete(&body).await;
    }
    // At its end a process exports what is left. Workers first: the router would wait for them.
    for name in ["decode-0", "prefill-0", "router"] {
        cluster.signal(name, libc::SIGTERM);
        cluster.wait_for_end(name).await;
    }
    serving.abort();

    let exported = collector.spans.lock().expect("no test panics with it").clone();
    let mut traces: HashMap<&[u8], Vec<&Exported>> = HashMap::new();
    for span in &exported {
        traces.entry(&span.1.trace_id).or_default().push(span);
    }
    // Probes, scrapes, registrations and calls between processes for other reasons would be other traces.
    assert_eq!(traces.len(), NUM_REQUESTS, "{:#?}", traces.values());
    let shares: Vec<f64> = traces.values().map(|trace| check_trace(trace)).collect();
    // A part without a span is missing in every trace; a busy machine's pause between two spans is not.
    let share = shares.iter().copied().fold(0.0, f64::max);
    assert!(share >= 0.95, "spans cover {shares:.3?} of the TTFTs");
}

#[test]
fn every_alert_has_a_section_of_the_runbooks_and_refused_requests_have_an_alert() {
    let read = |file: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/observability").join(file);
        fs::read_to_string(path).expect("it is part of the project")
    };
    let (rules, runbooks) = (read("alerts.yaml"), read("runbooks.md"));
    let alerts: Vec<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let sections: Vec<_> = runbooks.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    assert_eq!(alerts, sections);
    // No other metric has those that are refused before they are admitted.
    assert!(metric_names(&rules).any(|name| name == "baton_router_requests_total"), "{alerts:?}");
}
