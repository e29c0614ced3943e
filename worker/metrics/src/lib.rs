//! What a worker measures of each request and of its engine, and how far its model is loaded.
//!
//! The crate knows no protocol, no handoff and no transport: their metrics are those of the worker.
#![forbid(unsafe_code)]

mod ended;
mod loading;
mod request_clock;
mod vllm;

pub use ended::EndedRequests;
pub use loading::LoadGauges;
pub use request_clock::{PromptPace, RequestClock};
pub use vllm::VllmMetrics;
