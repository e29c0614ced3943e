//! What every process agrees on about a request: its tokens ([`Request`]), which of them are passages of other prompts, too ([`BlendMarks`]), how long its KV is kept ([`Retention`]), how tokens are sampled
//! ([`SamplingParams`]), what they must match ([`Grammar`]), the one validation of both ([`InvalidRequest`] names the field), how a sequence ends
//! ([`FinishReason`]) and why an attempt fails ([`FailureKind`]).
//!
//! Plain data. It knows neither text nor messages, neither blocks nor threads.
#![forbid(unsafe_code)]

mod blend;
mod grammar;
mod request;
mod retention;
mod sampling;

mod failure;
mod invalid;
mod json_schema;

pub use blend::{BlendMarks, BlendPoint, NUM_FIRST_TOKENS, max_passages};
pub use failure::{Failure, FailureKind};
pub use grammar::{Grammar, GrammarKind, MAX_GRAMMAR_BYTES};
pub use invalid::{InvalidRequest, Problem, check_tokens};
pub use json_schema::{make_plain, output_schema, rounded_constant};
pub use request::{FinishReason, Request, SpeculationMode};
pub use retention::{KeptPrefix, Retention};
pub use sampling::{MAX_LOGPROBS, SamplingParams};
