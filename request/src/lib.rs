//! What every process agrees on about a request: its tokens ([`Request`]), how tokens are sampled
//! ([`SamplingParams`]), the one validation of both ([`InvalidRequest`] names the field), how a sequence ends
//! ([`FinishReason`]) and why an attempt fails ([`FailureKind`]).
//!
//! Plain data. It knows neither text nor messages, neither blocks nor threads.
#![forbid(unsafe_code)]

mod request;
mod sampling;

mod failure;
mod invalid;

pub use failure::{Failure, FailureKind};
pub use invalid::{InvalidRequest, Problem, check_tokens};
pub use request::{FinishReason, Request, SpeculationMode};
pub use sampling::{MAX_LOGPROBS, SamplingParams};
