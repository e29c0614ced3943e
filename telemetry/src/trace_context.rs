//! W3C trace context: carries a trace over a process boundary in `traceparent` and `tracestate`.
//!
//! Carriers are closures over names and values, so that gRPC metadata, HTTP headers and maps of tests can all be
//! used.

use opentelemetry::{
    propagation::{Extractor, Injector, TextMapPropagator},
    trace::{Status, TraceContextExt},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The names that [`set_parent`] asks for.
pub const NAMES: [&str; 2] = ["traceparent", "tracestate"];

/// Bytes of a value that is taken from a caller and sent on to workers, who bound the headers of a call. The recommendation asks for 512
/// of a `tracestate`.
const MAX_VALUE_BYTES: usize = 4 << 10;

/// Writes the current span into an outgoing call. Calls `set` with each name and value, or never if no trace is
/// recorded.
pub fn inject(set: impl FnMut(&str, String)) {
    inject_span(&Span::current(), set);
}

/// Writes `span` into an outgoing call.
pub fn inject_span(span: &Span, set: impl FnMut(&str, String)) {
    let mut carrier = Set(set);
    TraceContextPropagator::new().inject_context(&span.context(), &mut carrier);
}

/// Makes `span` a child of the caller's span that an incoming call names. Must come before `span` is
/// entered for the first time. Without a valid `traceparent`, or when no trace is recorded, nothing
/// happens. A `tracestate` of more than 4 KiB is left out.
pub fn set_parent(span: &Span, get: impl Fn(&str) -> Option<String>) {
    let values = NAMES.map(|name| (name, get(name).filter(|value| value.len() <= MAX_VALUE_BYTES)));
    let context = TraceContextPropagator::new().extract(&Get(values));
    // Fails when no spans are recorded, which is fine.
    let _ = span.set_parent(context);
}

/// The id of the trace that `span` belongs to, in hexadecimal; `None` when no trace is recorded.
pub fn trace_id(span: &Span) -> Option<String> {
    let context = span.context();
    let context = context.span().span_context().clone();
    context.is_valid().then(|| context.trace_id().to_string())
}

/// Marks the span as failed; `kind` is a word for what went wrong, and `message` says it to people.
pub fn fail(span: &Span, kind: &'static str, message: &str) {
    span.set_attribute("error.type", kind);
    set_failed(span, message);
}

/// Marks the span as failed, by something that its other attributes name.
pub fn set_failed(span: &Span, message: &str) {
    span.set_status(Status::error(message.to_owned()));
}

struct Set<F>(F);

impl<F: FnMut(&str, String)> Injector for Set<F> {
    fn set(&mut self, key: &str, value: String) {
        // An empty tracestate holds no information.
        if !value.is_empty() {
            (self.0)(key, value);
        }
    }
}

struct Get([(&'static str, Option<String>); 2]);

impl Extractor for Get {
    fn get(&self, key: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(name, _)| name.eq_ignore_ascii_case(key))?;
        value.as_deref()
    }

    fn keys(&self) -> Vec<&str> {
        NAMES.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::TracerProvider;
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn injected(span: &Span) -> Vec<(String, String)> {
        let mut headers = Vec::new();
        inject_span(span, |name, value| headers.push((name.to_owned(), value)));
        headers
    }

    #[test]
    fn trace_goes_on_in_the_next_process() {
        let provider = SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("request");
            set_parent(&span, |name| (name == "traceparent").then(|| PARENT.to_owned()));
            let headers = injected(&span);
            let [(name, value)] = headers.as_slice() else { panic!("{headers:?}") };
            assert_eq!(name, "traceparent");
            assert!(value.starts_with("00-0af7651916cd43dd8448eb211c80319c-"), "same trace: {value}");
            assert!(!value.contains("b7ad6b7169203331"), "another span: {value}");
            assert_eq!(trace_id(&span).as_deref(), Some("0af7651916cd43dd8448eb211c80319c"));
        });
    }

    #[test]
    fn long_state_is_left_out() {
        let provider = SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let of_state = |state: &str| {
                let span = tracing::info_span!("request");
                let get =
                    |name: &str| if name == "traceparent" { PARENT.to_owned() } else { state.to_owned() };
                set_parent(&span, |name| Some(get(name)));
                let mut headers = injected(&span);
                headers.retain(|(name, _)| name == "tracestate");
                headers
            };
            let members = |count| (0..count).map(|idx| format!("vendor{idx}={}", "x".repeat(200)));
            let short = members(2).collect::<Vec<_>>().join(",");
            assert_eq!(of_state(&short), [("tracestate".to_owned(), short)]);
            assert_eq!(of_state(&members(30).collect::<Vec<_>>().join(",")), []);
        });
    }

    #[test]
    fn malformed_parent_starts_a_new_trace() {
        let provider = SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("request");
            set_parent(&span, |_| Some("nonsense".to_owned()));
            assert!(injected(&span)[0].1.starts_with("00-"));
        });
    }

    #[test]
    fn nothing_is_sent_when_nothing_is_recorded() {
        let subscriber = tracing_subscriber::registry();
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("request");
            set_parent(&span, |_| Some(PARENT.to_owned()));
            assert_eq!(injected(&span), []);
            assert_eq!(trace_id(&span), None);
        });
    }
}
