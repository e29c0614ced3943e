//! Logs, traces and metrics.
//!
//! [`init`] once per process; then `tracing` macros anywhere, [`trace_context`] where a request
//! crosses a process, [`TracePoint`] where its parts are measured, and one [`Metrics`] handed to every part that counts something. The crate knows
//! no gRPC, no HTTP and nothing of what is measured.
#![forbid(unsafe_code)]

mod init;
mod otlp;
mod panics;
mod trace_point;
mod watched_exporter;

mod metrics;
mod process;
pub mod thread_waits;
pub mod trace_context;
mod watched;

pub use init::{LogFormat, TelemetryConfig, TelemetryGuard, init, timestamp};
pub use metrics::{Metrics, e2e_histogram, itl_histogram, token_count_histogram, ttft_histogram};
pub use opentelemetry::KeyValue;
pub use trace_point::TracePoint;
