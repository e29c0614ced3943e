//! How long a request took and where, for clients that ask for it.

use std::time::{Duration, Instant};

use baton_planner::Prefill;
use baton_proto::worker::Token;
use serde::{Serialize, Serializer};

use super::{ExplainedPlan, PreparedRequest, attempt::Attempt, explain::rounded_millis};

/// What an answer tells beside itself, if its request asks for it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Extras {
    /// The plans of all choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plans: Option<Vec<ExplainedPlan>>,
    /// Of each choice that has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing: Option<Vec<Timing>>,
}

/// How long a choice took. As JSON in milliseconds; what is not known is null.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Timing {
    /// Which choice.
    pub index: u32,
    /// From the request's arrival here until its tokens were known.
    #[serde(rename = "tokenise_ms", serialize_with = "millis")]
    pub tokenise: Option<Duration>,
    /// From then until it was sent to the worker that answered, failed attempts included.
    #[serde(rename = "plan_ms", serialize_with = "millis")]
    pub plan: Option<Duration>,
    /// From its arrival at the worker that computed the prompt until that worker's engine began with it.
    #[serde(rename = "queue_ms", serialize_with = "millis")]
    pub queue: Option<Duration>,
    /// From then to the first token.
    #[serde(rename = "prefill_ms", serialize_with = "millis")]
    pub prefill: Option<Duration>,
    /// From the first token, or later from when the decode worker had blocks, until it had the KV; absent without a handoff.
    #[serde(rename = "exposed_ms", serialize_with = "millis")]
    pub exposed: Option<Duration>,
    /// From the request's arrival here to its first token.
    #[serde(rename = "ttft_ms", serialize_with = "millis")]
    pub ttft: Option<Duration>,
    /// Mean time between tokens.
    #[serde(rename = "tpot_ms", serialize_with = "millis")]
    pub tpot: Option<Duration>,
    /// What carried the KV; absent without a handoff. For the log.
    #[serde(skip)]
    pub transport: Option<String>,
    /// Where the plan computed the prompt: "local", "remote". For the log.
    #[serde(skip)]
    pub plan_kind: Option<&'static str>,
    /// Who computed the prompt.
    pub prefill_worker: Option<String>,
    /// Who decoded, in the end.
    pub decode_worker: Option<String>,
}

/// Measures one choice.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    arrived: Instant,
    tokenised: Instant,
    /// The first token and the newest.
    tokens: Option<(Instant, Instant)>,
    num_tokens: u32,
    timing: Timing,
}

impl Extras {
    /// Nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.plans.is_none() && self.timing.is_none()
    }
}

impl Stopwatch {
    pub(crate) fn new(index: u32, request: &PreparedRequest) -> Stopwatch {
        let (arrived, tokenised) = (request.arrival.at, request.tokenised);
        let timing = Timing { index, tokenise: Some(tokenised - arrived), ..Timing::default() };
        Stopwatch { arrived, tokenised, tokens: None, num_tokens: 0, timing }
    }

    /// A token that was not delivered before.
    pub(crate) fn on_token(&mut self, token: &Token, attempt: Option<&Attempt>, now: Instant) {
        let seconds =
            |seconds: Option<f64>| seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let timing = &mut self.timing;
        if self.tokens.is_none() {
            timing.plan = attempt.map(|attempt| attempt.started - self.tokenised);
            timing.queue = seconds(token.queue_seconds);
            timing.prefill = seconds(token.prefill_seconds);
            timing.prefill_worker = attempt.map(|attempt| match &attempt.plan.prefill {
                Prefill::Local => attempt.decode.id.0.clone(),
                Prefill::Remote(worker) => worker.id.0.clone(),
            });
            timing.plan_kind = attempt.map(|attempt| attempt.plan.prefill.name());
            timing.ttft = Some(now - self.arrived);
        }
        // Of several handoffs (retries, migrations) the first: later ones hide behind decoding.
        timing.exposed = timing.exposed.or(seconds(token.exposed_seconds));
        if timing.transport.is_none() {
            timing.transport.clone_from(&token.transport);
        }
        if let Some(attempt) = attempt
            && timing.decode_worker.as_ref() != Some(&attempt.decode.id.0)
        {
            timing.decode_worker = Some(attempt.decode.id.0.clone());
        }
        self.tokens = Some((self.tokens.map_or(now, |(first, _)| first), now));
        self.num_tokens += 1;
    }

    /// What was measured.
    pub(crate) fn read(&self) -> Timing {
        let between = self.tokens.filter(|_| self.num_tokens > 1).map(|(first, last)| last - first);
        Timing { tpot: between.map(|between| between / (self.num_tokens - 1)), ..self.timing.clone() }
    }
}

pub(crate) fn millis<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    duration.map(|duration| rounded_millis(duration.as_secs_f64())).serialize(serializer)
}
