//! Exports spans to an OpenTelemetry collector over gRPC.

use std::time::Duration;

use anyhow::Context;
use opentelemetry::{KeyValue, trace::TracerProvider};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::{
    Resource,
    trace::{SdkTracer, SdkTracerProvider},
};
use tokio::runtime::{self, Runtime};

/// A collector that does not answer must not keep a process from ending.
const LAST_EXPORT: Duration = Duration::from_secs(3);

/// A running export; dropping it sends what is left.
///
/// The exporter's connection lives on a runtime of its own: it works before the process has a
/// runtime, and a busy process cannot starve it.
#[derive(Debug)]
pub(crate) struct Export {
    provider: SdkTracerProvider,
    runtime: Option<Runtime>,
}

impl Export {
    pub(crate) fn start(endpoint: &str, service_name: &str, instance: &str) -> anyhow::Result<Self> {
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("otlp")
            .enable_all()
            .build()
            .context("cannot start the thread that exports spans")?;
        let _inside = runtime.enter();
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .with_timeout(LAST_EXPORT)
            .build()
            .with_context(|| format!("cannot export spans to {endpoint:?}"))?;
        let resource = Resource::builder()
            .with_service_name(service_name.to_owned())
            .with_attribute(KeyValue::new("service.instance.id", instance.to_owned()))
            .build();
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        drop(_inside);
        Ok(Self { provider, runtime: Some(runtime) })
    }

    pub(crate) fn tracer(&self) -> SdkTracer {
        self.provider.tracer("baton")
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(LAST_EXPORT) {
            tracing::debug!(%error, "the last spans were not exported");
        }
        // Not a plain drop, which panics when the guard is dropped inside of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
