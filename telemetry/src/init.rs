//! Sets up logging and the export of spans for a process.

use std::{
    env, fmt,
    io::{self, IsTerminal},
    str::FromStr,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use tracing_subscriber::{
    EnvFilter, Layer, Registry, filter,
    fmt::{format::Writer, time::FormatTime},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use crate::{
    otlp::{self, OtlpProtocol},
    panics,
};

/// What a process logs and exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// What to log: a level, or directives such as `info,baton_engine=debug`. OpenTelemetry logs only what a directive of its
    /// own asks for, such as `opentelemetry=warn`.
    pub log: String,
    /// How a log line looks.
    pub format: LogFormat,
    /// Colours in the log; `None`: when standard error is a terminal and `NO_COLOR` is not set.
    pub color: Option<bool>,
    /// Endpoint of an OpenTelemetry collector, such as `http://localhost:4317`. `None`: the environment's
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`; without either, no spans are exported. `OTEL_EXPORTER_OTLP_PROTOCOL` says whether
    /// spans travel over gRPC (the default) or HTTP, and `OTEL_TRACES_SAMPLER` which traces are sampled.
    pub otlp_endpoint: Option<String>,
    /// What kind of process this is: `baton-router`.
    pub service_name: String,
    /// Which one of its kind: a worker's id.
    pub instance: String,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            log: "info".to_owned(),
            format: LogFormat::Pretty,
            color: None,
            otlp_endpoint: None,
            service_name: "baton".to_owned(),
            instance: String::new(),
        }
    }
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people: the time of day, the message, then its fields.
    #[default]
    Pretty,
    /// For grep: full timestamps and module paths on one line.
    Compact,
    /// For machines: one JSON object per line.
    Json,
}

impl LogFormat {
    /// All of them, for help texts.
    pub const NAMES: [&'static str; 3] = ["pretty", "compact", "json"];
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "pretty" => Ok(Self::Pretty),
            "compact" => Ok(Self::Compact),
            "json" => Ok(Self::Json),
            other => Err(format!("unknown log format {other:?}: one of {}", Self::NAMES.join(", "))),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pretty => "pretty",
            Self::Compact => "compact",
            Self::Json => "json",
        })
    }
}

/// Exports the last spans when dropped, within a few seconds. Keep it until the process ends.
#[derive(Debug)]
#[must_use = "dropping it ends the export of spans"]
pub struct TelemetryGuard {
    _otlp: Option<otlp::Export>,
}

/// Starts logging to standard error, including panics, and exporting spans if an endpoint is set. Once per process.
/// Needs no async runtime. Each log line is one write.
///
/// # Errors
/// When the filter or the endpoint is not valid, or logging has been set up already.
pub fn init(config: &TelemetryConfig) -> anyhow::Result<TelemetryGuard> {
    let mut log_filter = EnvFilter::builder()
        .parse(&config.log)
        .with_context(|| format!("the log filter {:?} is not valid", config.log))?;
    // OpenTelemetry logs every batch that fails; `WatchedExporter` logs the first.
    if !config.log.contains("opentelemetry") {
        let off = "opentelemetry=off".parse().expect("it is a directive");
        log_filter = log_filter.add_directive(off);
    }
    let endpoint = config
        .otlp_endpoint
        .clone()
        .or_else(|| env::var("OTEL_EXPORTER_OTLP_ENDPOINT").ok())
        .filter(|endpoint| !endpoint.is_empty());
    let export = endpoint
        .map(|endpoint| {
            let protocol = otlp_protocol()?;
            otlp::Export::start(&endpoint, protocol, &config.service_name, &config.instance)
        })
        .transpose()?;
    // Of our own spans only: those of the exporter's own connection would never end.
    let spans = export.as_ref().map(|export| {
        tracing_opentelemetry::layer()
            .with_tracer(export.tracer())
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(filter::filter_fn(|metadata| {
                metadata.target().starts_with("baton") && *metadata.level() <= tracing::Level::INFO
            }))
    });
    tracing_subscriber::registry()
        .with(log_lines(config).with_filter(log_filter))
        .with(spans)
        .try_init()
        .context("logging can be set up only once in a process")?;
    panics::log_panics();
    Ok(TelemetryGuard { _otlp: export })
}

/// How spans travel, as OpenTelemetry's variables say it.
fn otlp_protocol() -> anyhow::Result<OtlpProtocol> {
    for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
        if let Some(protocol) = env::var(name).ok().filter(|protocol| !protocol.is_empty()) {
            return protocol.parse().context(name);
        }
    }
    Ok(OtlpProtocol::default())
}

fn log_lines(config: &TelemetryConfig) -> Box<dyn Layer<Registry> + Send + Sync> {
    let color = config.color.unwrap_or_else(|| {
        io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
    });
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(color);
    match config.format {
        LogFormat::Pretty => lines.with_target(false).with_timer(TimeOfDay).boxed(),
        LogFormat::Compact => lines.compact().boxed(),
        // With all spans of an event: the id of a request is in an outer one.
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    }
}

/// Now, as JSON log lines say it: `2026-01-31T07:05:09.123456Z`.
pub fn timestamp() -> String {
    let mut text = String::new();
    tracing_subscriber::fmt::time::SystemTime
        .format_time(&mut Writer::new(&mut text))
        .expect("a string takes every text");
    text
}

/// `07:05:09.123`, UTC.
struct TimeOfDay;

impl FormatTime for TimeOfDay {
    fn format_time(&self, line: &mut Writer<'_>) -> fmt::Result {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = now.as_secs() % 86_400;
        let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
        write!(line, "{hours:02}:{minutes:02}:{:02}.{:03}", seconds % 60, now.subsec_millis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_have_names() {
        for name in LogFormat::NAMES {
            assert_eq!(name.parse::<LogFormat>().unwrap().to_string(), name);
        }
        let error = "xml".parse::<LogFormat>().unwrap_err();
        assert_eq!(error, "unknown log format \"xml\": one of pretty, compact, json");
    }

    #[test]
    fn unreadable_filter_is_quoted_in_the_error() {
        let config = TelemetryConfig { log: "baton=loud".into(), ..TelemetryConfig::default() };
        let error = init(&config).unwrap_err();
        assert!(error.to_string().contains("baton=loud"), "{error}");
    }

    #[test]
    fn unreadable_endpoint_is_quoted_in_the_error() {
        let config =
            TelemetryConfig { otlp_endpoint: Some("not a url".into()), ..TelemetryConfig::default() };
        let error = init(&config).unwrap_err();
        assert!(error.to_string().contains("not a url"), "{error}");
    }
}
