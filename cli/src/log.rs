//! What is logged and how, and where traces go.

use baton_telemetry::{TelemetryConfig, TelemetryGuard};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};

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

/// How the program's last words begin.
const ERROR: &str = "error: ";

impl LogStyle {
    /// The line of the error that a process ends with.
    pub(crate) fn error(self, error: &str) -> String {
        self.line("ERROR", format!("{ERROR}{error}"))
    }

    /// The line of a warning before the log begins.
    pub(crate) fn warning(self, warning: &str) -> String {
        self.line("WARN", format!("warning: {warning}"))
    }

    fn line(self, level: &str, text: String) -> String {
        match self {
            LogStyle::Json => Value::Object(json_event(level, &text)).to_string(),
            LogStyle::Pretty | LogStyle::Compact => text,
        }
    }

    /// The reverse of `error`; `None` for other lines.
    pub(crate) fn error_in(self, line: &str) -> Option<String> {
        let error = |text: &str| text.strip_prefix(ERROR).map(str::to_owned);
        match self {
            // Those of a wrong command line are in words.
            LogStyle::Json => error(line).or_else(|| error(json_object(line)?.get("message")?.as_str()?)),
            LogStyle::Pretty | LogStyle::Compact => error(line),
        }
    }
}

/// An event of this program as JSON log lines have it. `up` puts the names of its children for the process.
pub(crate) fn json_event(level: &str, message: &str) -> Map<String, Value> {
    let timestamp = baton_telemetry::timestamp();
    let fields =
        [("timestamp", timestamp.as_str()), ("level", level), ("message", message), ("process", "baton")];
    fields.into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect()
}

/// A line that is a JSON object.
pub(crate) fn json_object(line: &str) -> Option<Map<String, Value>> {
    serde_json::from_str(line).ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_found_in_every_style() {
        for style in [LogStyle::Pretty, LogStyle::Compact, LogStyle::Json] {
            let error = "no \"model\" here";
            assert_eq!(style.error_in(&style.error(error)).as_deref(), Some(error));
            assert_eq!(style.error_in(&style.warning(error)), None);
            assert_eq!(style.error_in("error: what is --prot?").as_deref(), Some("what is --prot?"));
        }
        assert_eq!(LogStyle::Json.error_in("[1]"), None);
    }
}
