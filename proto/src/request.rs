//! Between the messages and the types of `baton-request`: sampling parameters, a request as a decode worker gets it,
//! reasons to finish, and failures, both as messages and as the status of a refused call.
//!
//! Every process converts here, so that all of them mean the same.

use std::time::Duration;

use baton_request::{
    BlendMarks, Failure, FailureKind, FinishReason, Grammar, GrammarKind, KeptPrefix, Request, Retention,
    SamplingParams, SpeculationMode,
};
use tonic::{Code, Status, metadata::MetadataValue};

use crate::{v1, worker};

impl From<&SamplingParams> for worker::Sampling {
    fn from(sampling: &SamplingParams) -> worker::Sampling {
        worker::Sampling {
            max_tokens: sampling.max_tokens,
            min_tokens: sampling.min_tokens,
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias: sampling.logit_bias.iter().copied().collect(),
            seed: sampling.seed,
            stop_token_ids: sampling.stop_token_ids.clone(),
            logprobs: sampling.logprobs,
            prompt_logprobs: sampling.prompt_logprobs,
            grammar: sampling.grammar.as_ref().map(v1::Grammar::from),
        }
    }
}

impl From<&Grammar> for v1::Grammar {
    fn from(grammar: &Grammar) -> v1::Grammar {
        use v1::grammar::Kind;
        let kind = match grammar.kind {
            GrammarKind::JsonSchema => Kind::JsonSchema,
            GrammarKind::Regex => Kind::Regex,
            GrammarKind::Choice => Kind::Choice,
            GrammarKind::Lark => Kind::Lark,
        };
        v1::Grammar { kind: kind.into(), text: grammar.text.to_string() }
    }
}

/// A grammar of an unknown kind, such as a later version may have, becomes one that does not compile: to ignore it
/// would change the answer.
impl From<&v1::Grammar> for Grammar {
    fn from(grammar: &v1::Grammar) -> Grammar {
        use v1::grammar::Kind;
        let kind = match grammar.kind() {
            Kind::JsonSchema => GrammarKind::JsonSchema,
            Kind::Regex => GrammarKind::Regex,
            Kind::Choice => GrammarKind::Choice,
            Kind::Lark => GrammarKind::Lark,
            Kind::Unspecified => {
                return Grammar::new(GrammarKind::Choice, format!("unknown kind {}", grammar.kind));
            }
        };
        Grammar::new(kind, grammar.text.as_str())
    }
}

impl From<&worker::Sampling> for SamplingParams {
    fn from(sampling: &worker::Sampling) -> SamplingParams {
        let mut logit_bias: Vec<_> = sampling.logit_bias.iter().map(|(&id, &bias)| (id, bias)).collect();
        // A map has no order; equal requests must be equal.
        logit_bias.sort_by_key(|&(id, _)| id);
        SamplingParams {
            max_tokens: sampling.max_tokens,
            min_tokens: sampling.min_tokens,
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias,
            seed: sampling.seed,
            stop_token_ids: sampling.stop_token_ids.clone(),
            logprobs: sampling.logprobs,
            prompt_logprobs: sampling.prompt_logprobs,
            grammar: sampling.grammar.as_ref().map(Grammar::from),
        }
    }
}

/// Without a plan: attempt, peers and wire format are the sender's to add.
impl From<&Request> for worker::GenerateRequest {
    fn from(request: &Request) -> worker::GenerateRequest {
        worker::GenerateRequest {
            request_id: request.id.clone(),
            prompt_token_ids: request.prompt.to_vec(),
            output_token_ids: request.output.clone(),
            sampling: Some((&request.sampling).into()),
            cache_salt: request.cache_salt.clone(),
            priority: request.priority,
            speculation_mode: v1::SpeculationMode::from(request.speculation).into(),
            blend: request.blend.as_ref().map(worker::Blend::from),
            retention: Some((&request.retention).into()),
            ..worker::GenerateRequest::default()
        }
    }
}

/// A message of a request lacks a field that every request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is missing")]
pub struct MissingField(pub &'static str);

/// What a request asks for is checked where it is served ([`Request::validate`]).
impl TryFrom<&worker::GenerateRequest> for Request {
    type Error = MissingField;

    fn try_from(message: &worker::GenerateRequest) -> Result<Request, MissingField> {
        Ok(Request {
            id: message.request_id.clone(),
            prompt: message.prompt_token_ids.as_slice().into(),
            output: message.output_token_ids.clone(),
            sampling: message.sampling.as_ref().ok_or(MissingField("sampling"))?.into(),
            priority: message.priority,
            cache_salt: message.cache_salt.clone(),
            speculation: message.speculation_mode().into(),
            blend: message.blend.as_ref().map(BlendMarks::from),
            retention: message.retention.as_ref().map(Retention::from).unwrap_or_default(),
        })
    }
}

impl From<&BlendMarks> for worker::Blend {
    fn from(marks: &BlendMarks) -> worker::Blend {
        // A position that does not fit is beyond every prompt: it is refused where it arrives.
        let position = |idx: usize| u32::try_from(idx).unwrap_or(u32::MAX);
        let range = |range: &std::ops::Range<usize>| v1::TokenRange {
            start: position(range.start),
            end: position(range.end),
        };
        let passages = marks.passages.iter().map(range).collect();
        worker::Blend { passages, layer: marks.layer, ratio: marks.ratio }
    }
}

impl From<&worker::Blend> for BlendMarks {
    fn from(blend: &worker::Blend) -> BlendMarks {
        let range = |range: &v1::TokenRange| range.start as usize..range.end as usize;
        let passages = blend.passages.iter().map(range).collect();
        // An older router names no layer.
        BlendMarks { passages, layer: blend.layer.max(1), ratio: blend.ratio }
    }
}

impl From<&Retention> for worker::Retention {
    fn from(retention: &Retention) -> worker::Retention {
        let kept = |kept: &KeptPrefix| worker::KeptPrefix {
            num_tokens: kept.num_tokens.try_into().unwrap_or(u32::MAX),
            ttl_seconds: kept.ttl.as_secs().try_into().unwrap_or(u32::MAX),
        };
        let kept = retention.kept.iter().map(kept).collect();
        worker::Retention { kept, rest_is_low: retention.rest_is_low }
    }
}

impl From<&worker::Retention> for Retention {
    fn from(retention: &worker::Retention) -> Retention {
        let kept = |kept: &worker::KeptPrefix| KeptPrefix {
            num_tokens: kept.num_tokens as usize,
            ttl: Duration::from_secs(kept.ttl_seconds.into()),
        };
        Retention { kept: retention.kept.iter().map(kept).collect(), rest_is_low: retention.rest_is_low }
    }
}

impl From<SpeculationMode> for v1::SpeculationMode {
    fn from(mode: SpeculationMode) -> v1::SpeculationMode {
        match mode {
            SpeculationMode::Auto => v1::SpeculationMode::Unspecified,
            SpeculationMode::Off => v1::SpeculationMode::Off,
        }
    }
}

impl From<v1::SpeculationMode> for SpeculationMode {
    fn from(mode: v1::SpeculationMode) -> SpeculationMode {
        match mode {
            v1::SpeculationMode::Unspecified => SpeculationMode::Auto,
            v1::SpeculationMode::Off => SpeculationMode::Off,
        }
    }
}

impl From<FinishReason> for v1::FinishReason {
    fn from(reason: FinishReason) -> v1::FinishReason {
        match reason {
            FinishReason::Stop => v1::FinishReason::Stop,
            FinishReason::Length => v1::FinishReason::Length,
            FinishReason::Abort => v1::FinishReason::Abort,
        }
    }
}

impl From<v1::FinishReason> for FinishReason {
    fn from(reason: v1::FinishReason) -> FinishReason {
        match reason {
            v1::FinishReason::Stop => FinishReason::Stop,
            v1::FinishReason::Length => FinishReason::Length,
            v1::FinishReason::Abort | v1::FinishReason::Unspecified => FinishReason::Abort,
        }
    }
}

impl From<Failure> for worker::Failed {
    fn from(failure: Failure) -> worker::Failed {
        use worker::failed::Kind;
        let kind = match failure.kind {
            FailureKind::Invalid => Kind::Invalid,
            FailureKind::Full => Kind::Full,
            FailureKind::PrefillLost => Kind::PrefillLost,
            FailureKind::KvRejected => Kind::KvRejected,
            FailureKind::Deadline => Kind::Deadline,
            FailureKind::Draining => Kind::Draining,
            FailureKind::PrefillDraining => Kind::PrefillDraining,
            FailureKind::PrefillFull => Kind::PrefillFull,
            FailureKind::Model => Kind::Model,
            FailureKind::MigrationRefused => Kind::MigrationRefused,
            // The last three are what a router finds of a worker; no worker says them.
            FailureKind::Internal | FailureKind::Lost | FailureKind::Stalled | FailureKind::Diverged => {
                Kind::Internal
            }
        };
        worker::Failed { kind: kind.into(), message: failure.message }
    }
}

/// A kind that is unknown here counts as internal: the router tries elsewhere.
impl From<worker::Failed> for Failure {
    fn from(failed: worker::Failed) -> Failure {
        use worker::failed::Kind;
        let kind = match failed.kind() {
            Kind::Invalid => FailureKind::Invalid,
            Kind::Full => FailureKind::Full,
            Kind::PrefillLost => FailureKind::PrefillLost,
            Kind::KvRejected => FailureKind::KvRejected,
            Kind::Deadline => FailureKind::Deadline,
            Kind::Draining => FailureKind::Draining,
            Kind::PrefillDraining => FailureKind::PrefillDraining,
            Kind::PrefillFull => FailureKind::PrefillFull,
            Kind::Model => FailureKind::Model,
            Kind::MigrationRefused => FailureKind::MigrationRefused,
            Kind::Internal | Kind::Unspecified => FailureKind::Internal,
        };
        Failure::new(kind, failed.message)
    }
}

/// Metadata of a refused call: the [name](FailureKind::name) of the failure's kind, which the code does not tell.
const FAILURE_KIND: &str = "baton-failure-kind";

/// A failure before the first event: the call itself is refused.
pub fn failure_to_status(failure: &Failure) -> Status {
    let code = match failure.kind {
        FailureKind::Invalid => Code::InvalidArgument,
        FailureKind::Full | FailureKind::PrefillFull => Code::ResourceExhausted,
        FailureKind::Draining
        | FailureKind::PrefillDraining
        | FailureKind::PrefillLost
        | FailureKind::Lost => Code::Unavailable,
        FailureKind::MigrationRefused => Code::FailedPrecondition,
        FailureKind::KvRejected => Code::DataLoss,
        FailureKind::Deadline | FailureKind::Stalled => Code::DeadlineExceeded,
        FailureKind::Internal | FailureKind::Model | FailureKind::Diverged => Code::Internal,
    };
    let mut status = Status::new(code, failure.message.clone());
    status.metadata_mut().insert(FAILURE_KIND, MetadataValue::from_static(failure.kind.name()));
    status
}

/// Whether a call with this status has failed on its server, by OpenTelemetry's conventions for gRPC. Others are a client's mistakes.
pub fn is_server_fault(code: Code) -> bool {
    use Code::{DataLoss, DeadlineExceeded, Internal, Unavailable, Unimplemented, Unknown};
    matches!(code, Unknown | DeadlineExceeded | Unimplemented | Internal | Unavailable | DataLoss)
}

/// Why a call was refused or broke. A status without a kind is a lost worker: most come of a broken connection.
pub fn failure_from_status(status: &Status) -> Failure {
    let named = status.metadata().get(FAILURE_KIND).and_then(|name| name.to_str().ok());
    let kind = match (named.and_then(FailureKind::from_name), status.code()) {
        (Some(kind), _) => kind,
        (None, Code::InvalidArgument) => FailureKind::Invalid,
        (None, Code::ResourceExhausted) => FailureKind::Full,
        (None, _) => FailureKind::Lost,
    };
    let message = match cause(status) {
        Some(cause) => format!("{}: {cause}", status.message()),
        None => status.message().to_owned(),
    };
    Failure::new(kind, message)
}

/// The innermost cause: "transport error" alone says little.
fn cause(status: &Status) -> Option<String> {
    let mut error = std::error::Error::source(status)?;
    while let Some(source) = error.source() {
        error = source;
    }
    Some(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_and_its_sampling_survive_the_wire() {
        let request = Request {
            id: "r".into(),
            prompt: [1, 2].into(),
            output: vec![3],
            sampling: SamplingParams {
                logit_bias: vec![(1, 0.5), (7, -1.0)],
                logprobs: Some(2),
                prompt_logprobs: Some(3),
                seed: 9,
                grammar: Some(Grammar::new(GrammarKind::Regex, "[0-9]+")),
                ..SamplingParams::default()
            },
            priority: -2,
            cache_salt: "salt".into(),
            speculation: SpeculationMode::Off,
            blend: Some(BlendMarks { passages: vec![0..1, 1..2], layer: 2, ratio: Some(0.25) }),
            retention: Retention {
                kept: vec![KeptPrefix { num_tokens: 2, ttl: Duration::from_secs(300) }],
                rest_is_low: true,
            },
        };
        let message = worker::GenerateRequest::from(&request);
        assert_eq!(
            format!("{:?}", Request::try_from(&message)),
            format!("{:?}", Ok::<_, MissingField>(request))
        );
        let older = worker::Blend { layer: 0, ..message.blend.clone().expect("it has passages") };
        assert_eq!(BlendMarks::from(&older).layer, 1);
        let message = worker::GenerateRequest { sampling: None, ..message };
        assert_eq!(Request::try_from(&message).unwrap_err().to_string(), "sampling is missing");
    }

    #[test]
    fn failures_keep_their_kind_as_messages_and_as_statuses() {
        for kind in FailureKind::ALL {
            let failure = Failure::new(kind, "why");
            assert_eq!(failure_from_status(&failure_to_status(&failure)), failure);
            let said = Failure::from(worker::Failed::from(failure.clone()));
            let expected = match kind {
                FailureKind::Lost | FailureKind::Stalled | FailureKind::Diverged => FailureKind::Internal,
                kind => kind,
            };
            assert_eq!(said, Failure::new(expected, "why"));
        }
        let broken = Status::unavailable("connection refused");
        assert_eq!(failure_from_status(&broken), Failure::new(FailureKind::Lost, "connection refused"));
    }
}
