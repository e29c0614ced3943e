//! Messages between routers and workers and between two workers, as types of the engine and of handoffs, and back.
//!
//! Nothing else in the workers looks into a message of a request. What comes from the wire is checked here for what the
//! types cannot hold; what a request may ask of a model is checked by the engine
//! ([`Request::validate`](baton_request::Request::validate)).
//!
//! This crate does not know streams, engines that run, or memory.
#![forbid(unsafe_code)]

mod handoffs;
mod requests;

pub use handoffs::{
    FirstToken, Payload, begin_from_proto, decode_message_from_proto, decode_message_to_proto,
    grant_from_proto, grant_to_proto, prefill_message_from_proto, prefill_message_to_proto, wire_from_begin,
    wire_from_generate,
};
pub use requests::{
    TokenNotes, WireError, engine_failure, failed_event, finished_event, leaving_event, progress_event,
    request_from_begin, request_from_generate, scored_event, submit_failure, token_event, token_from_proto,
    token_to_proto,
};
