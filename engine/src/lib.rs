//! The engine: one thread that advances many sequences, a step at a time.
//!
//! In reading order:
//! - [`block_pool`]: who owns which KV block, and the prefix cache;
//! - [`sequence`], [`plan`] and [`scheduler`]: which tokens are computed in the next step, decided purely;
//! - `step_time`: what steps take, and how much of prompts fits beside decodes;
//! - [`sampler`]: from logits to a token;
//! - [`speculation`]: who drafts tokens, and how many;
//! - `live`: the requests under way, from submission to their terminal event;
//! - `compute`: plans as batches, and the calls of an executor;
//! - `step_loop`: the thread that owns all of the above and an [`Executor`](baton_model::Executor);
//! - [`handle`] and [`events`]: how other threads talk to it.
//!
//! One loop serves both phases and every role. A step has no "prefill mode": each sequence has
//! computed tokens and tokens, and a step lets the former catch up with the latter under a budget.
//! A prefill worker's sequences end after their first token with the blocks held; a decode worker's
//! arrive with their blocks computed.
//!
//! The engine does not know the network, protocol messages, text, or how blocks travel.

// One call and the fake executor need unsafe code; each says why at its place.
#![deny(unsafe_code)]

pub mod block_pool;
mod claims;
mod command;
mod compute;
mod config;
pub mod events;
pub mod handle;
mod live;
mod pages;
pub mod plan;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod speculation;
mod step_loop;
mod step_time;
#[doc(hidden)]
pub mod testing;

pub use baton_model::{SampledToken, TokenLogprobs};
pub use baton_request::{FinishReason, InvalidRequest, Problem, Request, SamplingParams, SpeculationMode};
pub use block_pool::{BlockPool, IntegrityError, PoolReport};
pub use config::{EngineConfig, StartError};
pub use events::{EngineError, PrefillEvent, PrefillEvents, TokenEvent, TokenStream};
pub use handle::{
    CachedPrefix, EngineHandle, EngineLoad, EngineThread, HeldBlocks, IdleError, PrefixReservation,
    Reservation, SubmitError, start, start_over,
};
pub use speculation::{DraftCounts, Drafter, Speculation};
