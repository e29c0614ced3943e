//! Streams that survive their client's connection and the router: what of a call is journalled. `resume.rs` takes it up again.
//!
//! The journal has three things, each as it was: the call as the client sent it, the request as workers were asked for it, and
//! the tokens as workers sent them. A resumed stream is the same call again: the edge reads it, the core takes the request from the
//! journal instead of a tokenizer, and a choice delivers the tokens again before it plans an attempt. So every API's events
//! are rebuilt by the code that built them first, and the edge leaves out those that the client has.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use baton_journal::{Ending, Session, SessionWriter};
use baton_proto::worker::{GenerateRequest, Token};
use baton_request::{FinishReason, Request};
use prost::Message;
use tokio::task::coop::consume_budget;

use crate::{BodyRoom, CoreError, ReadBody};

/// A call whose stream can be resumed.
#[derive(Debug)]
pub struct DurableCall {
    /// The path or method.
    pub endpoint: String,
    /// Of a new call, until it begins: then the journal has it, or does not need it. Locked for a move.
    body: Mutex<Option<ReadBody>>,
    /// What the client has of the answer already, in units of its API.
    pub(crate) num_delivered: u64,
    /// Whether the client knows the id before it has an event.
    pub(crate) is_named: bool,
    pub(crate) resumption: Option<Resumption>,
}

/// What the journal has of a call beside the call.
#[derive(Debug)]
pub(crate) struct Resumption {
    pub(crate) id: String,
    pub(crate) kept: Kept,
    pub(crate) request: Request,
    /// Events are made otherwise now: another one may have a number that the client knows.
    pub(crate) is_renumbered: bool,
    /// Until the stream begins, with its room. Then it is taken from the connection that still has it.
    pub(crate) found: Mutex<Option<(Session, Arc<BodyRoom>)>>,
}

/// What the router made of a call.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Kept {
    #[prost(message, optional, tag = "1")]
    pub(crate) request: Option<GenerateRequest>,
    /// Seconds since 1970.
    #[prost(uint64, tag = "2")]
    pub(crate) created: u64,
    #[prost(string, tag = "3")]
    pub(crate) model: String,
    #[prost(uint64, tag = "4")]
    pub(crate) vocab_size: u64,
    /// See [`ServedModel::making_of_events`](crate::ServedModel). Without it their making is not known.
    #[prost(string, tag = "5")]
    pub(crate) making_of_events: String,
}

/// The journal's side of a running choice.
#[derive(Debug)]
pub(crate) struct DurableSession {
    pub(crate) writer: SessionWriter,
    /// Tokens that are delivered again; `None` once that is done.
    pub(crate) replay: Option<VecDeque<Token>>,
    /// How it had ended.
    pub(crate) ending: Option<Ending>,
}

/// The next step of a replay.
pub(crate) enum Replayed {
    /// A token that was delivered before.
    Token(Token),
    /// All were delivered; if it had ended, that is next.
    All(Option<FinishReason>),
}

impl DurableCall {
    /// A new call.
    pub fn new(endpoint: &str, body: ReadBody) -> DurableCall {
        DurableCall {
            endpoint: endpoint.to_owned(),
            body: Mutex::new(Some(body)),
            num_delivered: 0,
            is_named: false,
            resumption: None,
        }
    }

    /// The call of a stream that was found. The edge has its body.
    pub(crate) fn resumed(endpoint: String, resumption: Resumption) -> DurableCall {
        DurableCall {
            endpoint,
            body: Mutex::default(),
            num_delivered: 0,
            is_named: true,
            resumption: Some(resumption),
        }
    }

    /// Its body, once: the call itself is kept as long as its request runs.
    pub(crate) fn take_body(&self) -> Option<ReadBody> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The client has chosen the id, so it can resume the stream before it has any event.
    pub fn named(self) -> DurableCall {
        DurableCall { is_named: true, ..self }
    }

    /// Whether it is the call of a stream that has ended, which is delivered again.
    pub fn has_ended(&self) -> bool {
        self.resumption.as_ref().is_some_and(|resumption| {
            let found = resumption.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.as_ref().is_some_and(|(session, _)| session.ending.is_some())
        })
    }

    /// The client has so many events of the answer, over HTTP.
    ///
    /// # Errors
    /// When their numbers count other events now.
    pub fn after(self, num_events: u64) -> Result<DurableCall, CoreError> {
        match &self.resumption {
            Some(Resumption { id, is_renumbered: true, .. }) if num_events > 0 => Err(CoreError::Invalid {
                message: format!(
                    "the router makes the events of the stream {id:?} otherwise than before: resume it from its first event"
                ),
                param: None,
                code: Some("stream_changed"),
            }),
            _ => Ok(DurableCall { num_delivered: num_events, ..self }),
        }
    }

    /// The client has so many tokens of the answer, over gRPC.
    ///
    /// # Errors
    /// When the answer cannot have so many.
    pub fn after_tokens(self, num_tokens: u32) -> Result<DurableCall, CoreError> {
        match self.max_tokens() {
            Some(most) if u64::from(num_tokens) > most => Err(CoreError::Invalid {
                message: format!("next_token_idx is {num_tokens}, but the answer has at most {most} tokens"),
                param: Some("next_token_idx".to_owned()),
                code: None,
            }),
            _ => Ok(DurableCall { num_delivered: num_tokens.into(), ..self }),
        }
    }

    /// The most tokens of a stream that was found: those that it has once it has ended, else those that it may get.
    fn max_tokens(&self) -> Option<u64> {
        let resumption = self.resumption.as_ref()?;
        let found = resumption.found.lock().unwrap_or_else(PoisonError::into_inner);
        let (session, _) = found.as_ref()?;
        Some(match session.ending {
            Some(Ending::Stop | Ending::Length) => session.tokens.len() as u64,
            // A lost router may have delivered a few that it had not journalled yet.
            Some(Ending::Abort) | None => resumption.request.sampling.max_tokens.into(),
        })
    }
}

impl DurableSession {
    /// Tokens that are delivered again. They were charged to a key when they were delivered first.
    pub(crate) fn num_replayed(&self) -> usize {
        self.replay.as_ref().map_or(0, VecDeque::len)
    }

    /// Whether its key pays for the prompt, before anything is replayed: if it is new, or its prompt is computed again after that
    /// was for nothing.
    pub(crate) fn costs_prompt(&self) -> bool {
        self.replay.is_none() || self.ending.is_none() && self.writer.had_stalled()
    }

    /// `None` when there is nothing to deliver again.
    pub(crate) async fn replay(&mut self) -> Option<Replayed> {
        let replay = self.replay.as_mut()?;
        // Nothing else in a replay waits: a long one would keep the thread from other requests.
        consume_budget().await;
        if let Some(token) = replay.pop_front() {
            return Some(Replayed::Token(token));
        }
        self.replay = None;
        self.writer.goes_on();
        Some(Replayed::All(self.ending.map(|ending| match ending {
            Ending::Stop => FinishReason::Stop,
            Ending::Length => FinishReason::Length,
            Ending::Abort => FinishReason::Abort,
        })))
    }

    /// Ends it before it began.
    pub(crate) fn abort(&self) {
        self.writer.end(Ending::Abort, 0);
    }

    /// A new token, the one with this index.
    pub(crate) fn push(&self, idx: usize, token: &Token) {
        self.writer.push(idx, token.encode_to_vec());
    }

    /// The choice has ended after so many tokens.
    pub(crate) fn end(&self, reason: FinishReason, num_tokens: usize) {
        let ending = match reason {
            FinishReason::Stop => Ending::Stop,
            FinishReason::Length => Ending::Length,
            FinishReason::Abort => Ending::Abort,
        };
        self.writer.end(ending, num_tokens);
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;

    #[test]
    fn the_body_of_a_call_is_kept_and_counted_until_it_begins() {
        let num_bytes = Gauge::default();
        let room = Arc::new(BodyRoom::new(num_bytes.clone(), 100));
        room.grow(60).expect("there is room");
        let body = ReadBody { bytes: vec![b' '; 60].into(), room };
        let call = DurableCall::new("/v1/completions", body.clone());
        // It was parsed.
        drop(body);
        assert_eq!(num_bytes.get(), 60);
        let journalled = call.take_body().expect("it has not begun");
        assert_eq!((Vec::from(journalled.bytes).len(), num_bytes.get()), (60, 60));
        drop(journalled.room);
        assert!(call.take_body().is_none() && num_bytes.get() == 0);
    }
}
