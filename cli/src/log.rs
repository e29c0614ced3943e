//! What is logged and how, and where traces go.

use baton_telemetry::{TelemetryConfig, TelemetryGuard};
use clap::{Args, ValueEnum};

/// What is logged, and where traces go.
#[derive(Clone, Debug, Args)]
pub(crate) struct LogArgs {
    /// What to log: error, warn, info, debug, trace, or rules such as info,baton_router=debug.
    #[arg(long, value_name = "FILTER", default_value = "info", env = "BATON_LOG")]
    pub log: String,
    /// Format of log lines.
    #[arg(long, value_enum, default_value_t = LogStyle::Pretty, env = "BATON_LOG_FORMAT")]
    pub log_format: LogStyle,
    /// Colours in log lines.
    #[arg(long, value_enum, default_value_t = LogColor::Auto, env = "BATON_LOG_COLOR")]
    pub log_color: LogColor,
    /// OpenTelemetry collector that traces are sent to, such as http://127.0.0.1:4317; see docs/guide/observing.md.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
}

impl LogArgs {
    /// Starts logs, traces and metrics of this process.
    pub(crate) fn init(&self, service: &str, instance: &str) -> anyhow::Result<TelemetryGuard> {
        baton_telemetry::init(&TelemetryConfig {
            log: self.log.clone(),
            format: match self.log_format {
                LogStyle::Pretty => baton_telemetry::LogFormat::Pretty,
                LogStyle::Compact => baton_telemetry::LogFormat::Compact,
                LogStyle::Json => baton_telemetry::LogFormat::Json,
            },
            color: match self.log_color {
                LogColor::Auto => None,
                LogColor::Always => Some(true),
                LogColor::Never => Some(false),
            },
            otlp_endpoint: self.otlp_endpoint.clone(),
            service_name: service.to_owned(),
            instance: instance.to_owned(),
        })
    }

    /// The settings of logs as flags of a child. Their output is a pipe; whether it ends on a terminal only the supervisor can tell.
    pub(crate) fn flags(&self, colour: bool) -> Vec<String> {
        let LogArgs { log, log_format, log_color, otlp_endpoint } = self;
        let colour = match log_color {
            LogColor::Auto => colour,
            LogColor::Always => true,
            LogColor::Never => false,
        };
        let format = log_format.to_possible_value().expect("no format is hidden");
        let flags = [
            Some(format!("--log={log}")),
            Some(format!("--log-format={}", format.get_name())),
            Some(format!("--log-color={}", if colour { "always" } else { "never" })),
            otlp_endpoint.as_ref().map(|endpoint| format!("--otlp-endpoint={endpoint}")),
        ];
        flags.into_iter().flatten().collect()
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogStyle {
    /// For people: the time of day, the message, its fields.
    Pretty,
    /// For grep: one line with the full time and the module.
    Compact,
    /// For machines: one JSON object per line.
    Json,
}

/// Whether log lines are coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogColor {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}
