//! The engine: one thread that advances many sequences, one step at a time.
//!
//! In reading order:
//! - [`baton_scheduler`], a crate: which tokens the next step computes, and the owners of KV blocks;
//! - [`events`] and `streams`: what the engine says about a request;
//! - `cache_log`: what its prefix cache stores and evicts;
//! - `status`: what the engine publishes about itself;
//! - `constraint`: the grammar of a request, and the masks of allowed tokens;
//! - `execution`: calls of an executor;
//! - `passage_store` and `blending`: KV of passages of text, and prompts that are blended from it;
//! - `live_request`: one request, from its submission to its terminal event;
//! - `command`: what other threads ask of the engine thread;
//! - `live`: all requests of an engine, and its scheduler;
//! - `batch`: what an executor computes for a plan;
//! - [`speculation`]: which tokens are drafted;
//! - `step_loop`: the thread that owns all of the above and an [`Executor`](baton_model_spec::Executor);
//! - `submission`: a request for an engine;
//! - [`handle`] and `prefix`: how other threads use the engine;
//! - `start`: how an engine starts.
//!
//! A module uses only modules above it in this list.
//!
//! One loop serves both phases and every role. A step has no "prefill mode": each sequence has tokens and computed
//! tokens, and a step lets the latter catch up with the former under a budget. On a prefill worker a sequence ends
//! after its first token, and its blocks stay held. On a decode worker a sequence arrives with its prompt computed.
//!
//! The engine does not know the network, protocol messages, text, or how blocks are transferred.

// Calls of an executor need unsafe code; each says why.
#![deny(unsafe_code)]

mod batch;
mod blending;
mod cache_log;
mod command;
mod config;
mod constraint;
pub mod events;
mod execution;
pub mod handle;
mod live;
mod live_request;
mod passage_store;
mod prefix;
pub mod speculation;
mod start;
mod status;
mod step_loop;
mod streams;
mod submission;

pub use baton_model_spec::{SampledToken, TokenLogprobs};
pub use baton_request::{
    BlendMarks, FinishReason, InvalidRequest, NUM_FIRST_TOKENS, Problem, Request, SamplingParams,
    SpeculationMode,
};
pub use baton_sampler::{self as sampler, ScoredToken};
pub use baton_scheduler::{IntegrityError, PoolReport};
pub use blending::BlendCounts;
pub use cache_log::{CacheLog, CacheLogReader};
pub use command::Resumption;
pub use config::{BlendConfig, EngineConfig, EngineStartError};
pub use events::{DraftCounts, EngineError, PrefillEvent, TokenEvent};
pub use handle::{DecodeSlot, EngineHandle, HeldBlocks, Reservation, SubmitError};
pub use prefix::{BLOCKING_TOKENS, CachedPrefix, Expectation, PrefixReservation};
pub use speculation::{Drafter, Speculation};
pub use start::{EngineThread, start, start_over};
pub use status::{EngineLoad, EnginePace, EngineTotals, IdleError};
pub use streams::{PrefillEvents, TokenStream};
pub use submission::Submission;
