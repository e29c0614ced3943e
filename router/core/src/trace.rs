//! The trace context of a request, in the metadata of calls to workers.

use baton_telemetry::trace_context;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};

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
