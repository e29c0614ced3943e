//! Spans of what was measured: made after the fact, from instants, and only in traces that are sampled.
//!
//! A request waits in queues and in the engine, where no guard of a span can be held. The code that measures it holds a
//! [`TracePoint`] instead.

use std::time::{Instant, SystemTime};

use opentelemetry::{
    Array, Context, KeyValue, StringValue, Value, global,
    trace::{Span as _, Status, TraceContextExt, Tracer},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The name under which all spans are exported.
pub(crate) const SCOPE: &str = "baton";

/// A span of a sampled trace, to which others can be added.
#[derive(Clone, Debug)]
pub struct TracePoint(Context);

impl TracePoint {
    /// At `span`; `None` when its trace is not sampled, or no spans are exported. The parent of `span` is fixed from then on.
    pub fn of(span: &Span) -> Option<TracePoint> {
        let context = span.context();
        context.span().span_context().is_sampled().then_some(TracePoint(context))
    }

    /// Records a child that began and ended at these instants. Returns it, for children of its own.
    pub fn record(
        &self,
        name: &'static str,
        start: Instant,
        end: Instant,
        attributes: Vec<KeyValue>,
    ) -> TracePoint {
        self.child(name, start, end, attributes, Status::Unset)
    }

    /// Records a child that failed; `kind` is a word for what went wrong, and `message` says it to people.
    pub fn record_failed(
        &self,
        name: &'static str,
        start: Instant,
        end: Instant,
        mut attributes: Vec<KeyValue>,
        kind: &'static str,
        message: &str,
    ) {
        attributes.push(KeyValue::new("error.type", kind));
        self.child(name, start, end, attributes, Status::error(message.to_owned()));
    }

    fn child(
        &self,
        name: &'static str,
        start: Instant,
        end: Instant,
        attributes: Vec<KeyValue>,
        status: Status,
    ) -> TracePoint {
        let tracer = global::tracer(SCOPE);
        let child = tracer.span_builder(name).with_start_time(wall_time(start)).with_attributes(attributes);
        let mut child = tracer.build_with_context(child, &self.0);
        child.set_status(status);
        child.end_with_timestamp(wall_time(end));
        TracePoint(self.0.with_remote_span_context(child.span_context().clone()))
    }

    /// Adds an attribute to the span itself.
    pub fn set(&self, key: &'static str, value: impl Into<Value>) {
        self.0.span().set_attribute(KeyValue::new(key, value));
    }

    /// Adds an attribute that is a list of texts.
    pub fn set_list(&self, key: &'static str, texts: &[&'static str]) {
        let texts: Vec<StringValue> = texts.iter().map(|&text| text.into()).collect();
        self.set(key, Value::Array(Array::String(texts)));
    }
}

/// Spans have wall-clock times.
fn wall_time(instant: Instant) -> SystemTime {
    SystemTime::now() - instant.elapsed()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use opentelemetry::trace::{SpanKind, TracerProvider};
    use opentelemetry_sdk::trace::{InMemorySpanExporter, Sampler, SdkTracerProvider};
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::trace_context;

    fn with_provider(provider: &SdkTracerProvider, run: impl FnOnce()) {
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), run);
    }

    #[test]
    fn a_failed_span_has_its_status_and_kind() {
        let exported = InMemorySpanExporter::default();
        let provider = SdkTracerProvider::builder().with_simple_exporter(exported.clone()).build();
        with_provider(&provider, || {
            let span = tracing::info_span!("attempt", otel.kind = "client");
            trace_context::fail(&span, "lost", "the worker has gone");
        });
        let spans = exported.get_finished_spans().expect("kept in memory");
        assert_eq!(spans[0].status, Status::error("the worker has gone"));
        assert_eq!(spans[0].span_kind, SpanKind::Client);
        assert!(
            spans[0].attributes.contains(&KeyValue::new("error.type", "lost")),
            "{:?}",
            spans[0].attributes
        );
    }

    // One test: the provider that `record` uses belongs to the process.
    #[test]
    fn measured_spans_have_their_parents_and_times_and_cost_nothing_in_traces_that_are_not_sampled() {
        let unsampled = SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOff).build();
        with_provider(&unsampled, || assert!(TracePoint::of(&tracing::info_span!("request")).is_none()));
        assert!(TracePoint::of(&Span::none()).is_none(), "without a span");

        let exported = InMemorySpanExporter::default();
        let provider = SdkTracerProvider::builder().with_simple_exporter(exported.clone()).build();
        global::set_tracer_provider(provider.clone());
        with_provider(&provider, || {
            let span = tracing::info_span!("request");
            let point = TracePoint::of(&span).expect("sampled");
            point.set_list("reasons", &["stop", "length"]);
            // What is recorded is past.
            let start = Instant::now().checked_sub(Duration::from_secs(1)).expect("the machine ran then");
            let prefill = point.record("prefill", start, start + Duration::from_millis(30), vec![]);
            prefill.record("chunk", start, start + Duration::from_millis(10), vec![]);
            point.record_failed("plan", start, Instant::now(), vec![], "no_plan", "no worker came");
        });
        let spans = exported.get_finished_spans().expect("kept in memory");
        let named = |name| spans.iter().find(|span| span.name == name).expect(name);
        let (request, prefill, chunk) = (named("request"), named("prefill"), named("chunk"));
        let reasons = Value::Array(Array::String(vec!["stop".into(), "length".into()]));
        assert!(request.attributes.contains(&KeyValue::new("reasons", reasons)), "{:?}", request.attributes);
        let plan = named("plan");
        assert_eq!((&prefill.status, &plan.status), (&Status::Unset, &Status::error("no worker came")));
        assert!(plan.attributes.contains(&KeyValue::new("error.type", "no_plan")), "{:?}", plan.attributes);
        assert_eq!(prefill.parent_span_id, request.span_context.span_id());
        assert_eq!(chunk.parent_span_id, prefill.span_context.span_id());
        assert_eq!(chunk.span_context.trace_id(), request.span_context.trace_id());
        let took = prefill.end_time.duration_since(prefill.start_time).expect("it ended later");
        assert!(took.abs_diff(Duration::from_millis(30)) < Duration::from_millis(1), "{took:?}");
    }
}
