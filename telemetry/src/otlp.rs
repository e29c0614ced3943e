//! Exports spans to an OpenTelemetry collector, over gRPC or HTTP.

use std::{env, fs, str::FromStr, time::Duration};

use anyhow::Context;
use bytes::Bytes;
use http::{Request, Response};
use opentelemetry::{KeyValue, global, trace::TracerProvider};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{
    Protocol, SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig,
    tonic_types::transport::{Certificate, ClientTlsConfig},
};
use opentelemetry_sdk::{
    Resource,
    trace::{SdkTracer, SdkTracerProvider},
};
use tokio::runtime::{self, Handle, Runtime};

use crate::{
    trace_point::SCOPE,
    watched_exporter::{SpanCounts, WatchedExporter},
};

/// A collector that does not answer must not keep a process from ending.
const LAST_EXPORT: Duration = Duration::from_secs(3);

/// Where collectors take spans over HTTP.
const HTTP_PATH: &str = "/v1/traces";

/// How spans travel: `OTEL_EXPORTER_OTLP_PROTOCOL`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OtlpProtocol {
    /// gRPC, usually on port 4317.
    #[default]
    Grpc,
    /// Protobuf in the body of an HTTP/1.1 POST, usually on port 4318.
    HttpProtobuf,
}

impl FromStr for OtlpProtocol {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        match name {
            "grpc" => Ok(Self::Grpc),
            "http/protobuf" => Ok(Self::HttpProtobuf),
            other => anyhow::bail!("unknown OTLP protocol {other:?}: one of grpc, http/protobuf"),
        }
    }
}

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
    /// `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG` say which traces are sampled; the SDK reads them.
    pub(crate) fn start(
        endpoint: &str,
        protocol: OtlpProtocol,
        service_name: &str,
        instance: &str,
    ) -> anyhow::Result<Self> {
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("otlp")
            .enable_all()
            .build()
            .context("cannot start the thread that exports spans")?;
        let inside = runtime.enter();
        let exporter = match exporter(endpoint, protocol, runtime.handle()) {
            Ok(exporter) => exporter,
            Err(error) => {
                drop(inside);
                // Not a plain drop, which panics inside of another runtime.
                runtime.shutdown_background();
                return Err(error.context(format!("cannot export spans to {endpoint:?}")));
            }
        };
        let resource = Resource::builder()
            .with_service_name(service_name.to_owned())
            .with_attribute(KeyValue::new("service.instance.id", instance.to_owned()))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let exporter = WatchedExporter::new(exporter, endpoint, SpanCounts::of_process());
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        global::set_tracer_provider(provider.clone());
        drop(inside);
        Ok(Self { provider, runtime: Some(runtime) })
    }

    pub(crate) fn tracer(&self) -> SdkTracer {
        self.provider.tracer(SCOPE)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(LAST_EXPORT) {
            tracing::debug!(%error, "the last spans were not exported");
        }
        // As above.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Collectors at `https:` need a certificate of an authority that the system trusts, or of `OTEL_EXPORTER_OTLP_CERTIFICATE`.
fn exporter(endpoint: &str, protocol: OtlpProtocol, runtime: &Handle) -> anyhow::Result<SpanExporter> {
    let authority = authority()?;
    let exporter = match protocol {
        OtlpProtocol::Grpc => {
            let builder =
                SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(LAST_EXPORT);
            if !endpoint.starts_with("https:") {
                return Ok(builder.build()?);
            }
            let mut tls = ClientTlsConfig::new().with_enabled_roots();
            if let Some(pem) = authority {
                tls = tls.ca_certificate(Certificate::from_pem(pem));
            }
            builder.with_tls_config(tls).build()?
        }
        OtlpProtocol::HttpProtobuf => {
            let base = endpoint.trim_end_matches('/').trim_end_matches(HTTP_PATH);
            baton_tls::compute_with_ring();
            let client = reqwest::Client::builder().http1_only().timeout(LAST_EXPORT);
            let client = if endpoint.starts_with("https:") {
                let pem = authority.unwrap_or_default();
                client.tls_certs_merge(reqwest::Certificate::from_pem_bundle(&pem)?)
            } else {
                // Plain text works where the system has no authorities.
                client.tls_certs_only([])
            };
            SpanExporter::builder()
                .with_http()
                .with_http_client(OnRuntime { client: client.build()?, runtime: runtime.clone() })
                .with_endpoint(format!("{base}{HTTP_PATH}"))
                .with_protocol(Protocol::HttpBinary)
                .with_timeout(LAST_EXPORT)
                .build()?
        }
    };
    Ok(exporter)
}

/// The certificates, in PEM, that a collector's may come from besides those that the system trusts.
fn authority() -> anyhow::Result<Option<Vec<u8>>> {
    for name in ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"] {
        if let Some(path) = env::var_os(name).filter(|path| !path.is_empty()) {
            return fs::read(&path).map(Some).with_context(|| format!("{name}: cannot read {path:?}"));
        }
    }
    Ok(None)
}

/// Sends on the runtime: the thread that collects batches of spans has none.
#[derive(Debug)]
struct OnRuntime {
    client: reqwest::Client,
    runtime: Handle,
}

#[async_trait::async_trait]
impl HttpClient for OnRuntime {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        self.runtime.spawn(async move { client.send_bytes(request).await }).await?
    }
}
