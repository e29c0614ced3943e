//! Trace context between clients, router and workers, in the carriers of HTTP and gRPC.

use baton_telemetry::trace_context;
use http::HeaderMap;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};
use tracing::Span;

/// Writes the current span into an outgoing call.
pub(crate) fn inject(metadata: &mut MetadataMap) {
    trace_context::inject(|name, value| {
        if let (Ok(name), Ok(value)) =
            (MetadataKey::from_bytes(name.as_bytes()), MetadataValue::try_from(value))
        {
            metadata.insert(name, value);
        }
    });
}

/// Makes `span` a child of the caller's span.
pub(crate) fn set_parent(span: &Span, headers: &HeaderMap) {
    trace_context::set_parent(span, |name| Some(headers.get(name)?.to_str().ok()?.to_owned()));
}
