//! Requests, tokens and failures.

use std::time::Duration;

use baton_engine::{DraftCounts, EngineError, SampledToken, ScoredToken, SubmitError, TokenLogprobs};
use baton_grammar::GrammarError;
use baton_proto::{MissingField, v1, worker as proto};
use baton_request::{BlendMarks, Failure, FailureKind, FinishReason, Request, Retention};
use baton_worker_metrics::PromptPace;
use tonic::Status;

/// Longest accepted request id.
const MAX_ID_BYTES: usize = 256;

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A field must be there.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A field cannot have this value.
    #[error("{field}: {value} is not {expected}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// What it held.
        value: String,
        /// What it may hold.
        expected: &'static str,
    },
}

impl From<MissingField> for WireError {
    fn from(MissingField(field): MissingField) -> WireError {
        WireError::Missing(field)
    }
}

impl From<WireError> for Status {
    fn from(error: WireError) -> Status {
        Status::invalid_argument(error.to_string())
    }
}

/// A request as the router sends it to a decode worker.
///
/// # Errors
/// When the message is not one.
pub fn request_from_generate(message: &proto::GenerateRequest) -> Result<Request, WireError> {
    check_id("request_id", &message.request_id)?;
    Ok(Request::try_from(message)?)
}

/// A request as a decode worker sends it to a prefill worker.
///
/// # Errors
/// When the message is not one.
pub fn request_from_begin(message: &proto::Begin) -> Result<Request, WireError> {
    check_id("request_id", &message.request_id)?;
    let sampling = message.sampling.as_ref().ok_or(WireError::Missing("sampling"))?;
    let num_tokens = message.token_ids.len();
    let num_prompt_tokens =
        num_tokens.checked_sub(message.num_output_tokens as usize).ok_or_else(|| WireError::Invalid {
            field: "num_output_tokens",
            value: message.num_output_tokens.to_string(),
            expected: "at most the number of token_ids",
        })?;
    let (prompt, output) = message.token_ids.split_at(num_prompt_tokens);
    Ok(Request {
        id: message.request_id.clone(),
        prompt: prompt.into(),
        output: output.to_vec(),
        sampling: sampling.into(),
        priority: message.priority,
        cache_salt: message.cache_salt.clone(),
        blend: message.blend.as_ref().map(BlendMarks::from),
        retention: message.retention.as_ref().map(Retention::from).unwrap_or_default(),
        ..Request::default()
    })
}

fn check_id(field: &'static str, id: &str) -> Result<(), WireError> {
    if id.is_empty() {
        return Err(WireError::Missing(field));
    }
    if id.len() > MAX_ID_BYTES {
        let value = format!("{} bytes", id.len());
        return Err(WireError::Invalid { field, value, expected: "at most 256 bytes" });
    }
    Ok(())
}

/// A token for the wire.
pub fn token_to_proto(token: &SampledToken) -> proto::Token {
    let logprobs = token.logprobs.as_ref().map(|logprobs| logprobs_to_proto(token.id, logprobs));
    proto::Token { id: token.id, logprobs, ..proto::Token::default() }
}

fn logprobs_to_proto(token_id: u32, logprobs: &TokenLogprobs) -> v1::TokenLogprobs {
    let top = logprobs.top.iter().map(|&(token_id, logprob)| v1::TopLogprob { token_id, logprob });
    v1::TokenLogprobs { token_id, logprob: logprobs.logprob, top: top.collect(), rank: 0 }
}

/// A token from the wire.
pub fn token_from_proto(token: proto::Token) -> SampledToken {
    let logprobs = token.logprobs.map(|logprobs| TokenLogprobs {
        logprob: logprobs.logprob,
        top: logprobs.top.into_iter().map(|top| (top.token_id, top.logprob)).collect(),
    });
    SampledToken { id: token.id, logprobs }
}

/// What the router learns with a token.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenNotes {
    /// With the first token: prompt tokens that were cached.
    pub cached_tokens: Option<usize>,
    /// With the first token: prompt tokens whose KV came from kept passages.
    pub blended_tokens: usize,
    /// With the first token.
    pub pace: Option<PromptPace>,
    /// With the first token after a handoff: from when there were both the first token of all and blocks until the KV was there.
    pub exposed: Option<Duration>,
    /// With it: what carried the KV.
    pub transport: Option<&'static str>,
    /// With the first token after a draft: what became of that.
    pub drafts: DraftCounts,
}

/// The next token, as the router gets it.
pub fn token_event(token: &SampledToken, notes: TokenNotes) -> proto::GenerateEvent {
    let count = |num: u64| u32::try_from(num).unwrap_or(u32::MAX);
    event(proto::generate_event::Event::Token(proto::Token {
        cached_tokens: notes.cached_tokens.map(|num| count(num as u64)),
        blended_tokens: count(notes.blended_tokens as u64),
        queue_seconds: notes.pace.map(|pace| pace.queue.as_secs_f64()),
        prefill_seconds: notes.pace.map(|pace| pace.prefill.as_secs_f64()),
        exposed_seconds: notes.exposed.map(|exposed| exposed.as_secs_f64()),
        transport: notes.transport.map(str::to_owned),
        drafted_tokens: count(notes.drafts.drafted),
        accepted_tokens: count(notes.drafts.accepted),
        ..token_to_proto(token)
    }))
}

/// Tokens of the prompt, with their log-probabilities.
pub fn scored_event(first_idx: usize, tokens: &[ScoredToken]) -> proto::GenerateEvent {
    let token = |token: &ScoredToken| v1::TokenLogprobs {
        rank: token.rank,
        ..logprobs_to_proto(token.id, &token.logprobs)
    };
    let (first_idx, tokens) = (first_idx as u32, tokens.iter().map(token).collect());
    event(proto::generate_event::Event::Scored(proto::Scored { first_idx, tokens }))
}

/// A good end.
pub fn finished_event(reason: FinishReason) -> proto::GenerateEvent {
    let reason = v1::FinishReason::from(reason);
    event(proto::generate_event::Event::Finished(proto::Finished { reason: reason.into() }))
}

/// The worker is about to leave.
pub fn leaving_event() -> proto::GenerateEvent {
    event(proto::generate_event::Event::Leaving(proto::Leaving {}))
}

/// What is waited for goes on.
pub fn progress_event() -> proto::GenerateEvent {
    event(proto::generate_event::Event::Progress(proto::Progress {}))
}

/// A bad end.
pub fn failed_event(failure: Failure) -> proto::GenerateEvent {
    event(proto::generate_event::Event::Failed(failure.into()))
}

fn event(event: proto::generate_event::Event) -> proto::GenerateEvent {
    proto::GenerateEvent { event: Some(event) }
}

/// What a refusal by the engine means to the router.
pub fn submit_failure(error: &SubmitError) -> Failure {
    let kind = match error {
        SubmitError::Full { .. } => FailureKind::Full,
        SubmitError::Invalid(_) => FailureKind::Invalid,
        // The router has compiled it in time: this worker is busy.
        SubmitError::Grammar(GrammarError::Busy { .. } | GrammarError::TooSlow { .. }) => FailureKind::Full,
        SubmitError::Grammar(_) => FailureKind::Invalid,
        SubmitError::ShuttingDown => FailureKind::Draining,
    };
    Failure::new(kind, error.to_string())
}

/// What a failure of the engine means to the router.
pub fn engine_failure(error: &EngineError) -> Failure {
    let kind = match error {
        EngineError::ShuttingDown => FailureKind::Draining,
        EngineError::InvalidLogits => FailureKind::Model,
        // Every other worker would find the same.
        EngineError::Grammar(_) => FailureKind::Invalid,
        EngineError::Executor { .. } | EngineError::Panicked { .. } => FailureKind::Internal,
    };
    Failure::new(kind, error.to_string())
}

#[cfg(test)]
mod tests {
    use baton_request::SamplingParams;

    use super::*;

    fn generate() -> proto::GenerateRequest {
        proto::GenerateRequest {
            request_id: "r".into(),
            prompt_token_ids: vec![1, 2],
            output_token_ids: vec![3],
            priority: -4,
            blend: Some(proto::Blend {
                passages: vec![v1::TokenRange { start: 0, end: 1 }],
                ratio: Some(0.5),
                layer: 2,
            }),
            retention: Some(proto::Retention {
                kept: vec![proto::KeptPrefix { num_tokens: 2, ttl_seconds: 60 }],
                rest_is_low: true,
            }),
            sampling: Some(
                (&SamplingParams {
                    logit_bias: vec![(1, 0.5), (7, -1.0)],
                    logprobs: Some(2),
                    seed: 9,
                    ..SamplingParams::default()
                })
                    .into(),
            ),
            ..proto::GenerateRequest::default()
        }
    }

    #[test]
    fn a_request_keeps_its_meaning_over_both_hops() {
        let request = request_from_generate(&generate()).unwrap();
        let begin = proto::Begin {
            request_id: request.id.clone(),
            token_ids: [&request.prompt[..], &request.output].concat(),
            num_output_tokens: 1,
            priority: -4,
            sampling: Some((&request.sampling).into()),
            blend: request.blend.as_ref().map(proto::Blend::from),
            retention: Some((&request.retention).into()),
            ..proto::Begin::default()
        };
        assert_eq!(format!("{:?}", request_from_begin(&begin).unwrap()), format!("{request:?}"));
    }

    #[test]
    fn broken_messages_are_named() {
        let cases = [
            (proto::GenerateRequest { request_id: String::new(), ..generate() }, "request_id is missing"),
            (proto::GenerateRequest { request_id: "x".repeat(257), ..generate() }, "request_id: 257 bytes"),
            (proto::GenerateRequest { sampling: None, ..generate() }, "sampling is missing"),
        ];
        for (message, expected) in cases {
            let error = request_from_generate(&message).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error:?} does not say {expected:?}");
        }
        let begin = proto::Begin {
            request_id: "r".into(),
            num_output_tokens: 1,
            sampling: generate().sampling,
            ..proto::Begin::default()
        };
        let error = request_from_begin(&begin).unwrap_err().to_string();
        assert!(error.starts_with("num_output_tokens: 1 is not at most"), "{error}");
    }

    #[test]
    fn tokens_survive_the_wire() {
        let token = SampledToken {
            id: 5,
            logprobs: Some(TokenLogprobs { logprob: -0.5, top: vec![(5, -0.5), (6, -2.0)] }),
        };
        assert_eq!(token_from_proto(token_to_proto(&token)), token);
    }
}
