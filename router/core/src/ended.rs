//! What became of a request: one log line, and one event for those who watch.

use std::time::Duration;

use serde::Serialize;

use super::{Timing, Usage, explain::rounded_millis, timing::millis};

/// A request that has ended. As JSON, durations are in milliseconds, and what is not known is null.
#[derive(Clone, Debug, Serialize)]
pub struct EndedRequest {
    /// Of its answer.
    pub id: String,
    /// Of its call: the client chose it, or got it with the answer.
    pub x_request_id: String,
    /// Whose it was; empty without keys.
    pub tenant: String,
    /// The name of the key that it came with.
    pub key: Option<String>,
    /// Of its trace, in hexadecimal; `None` when no spans are recorded.
    pub trace_id: Option<String>,
    /// Which model answered.
    pub model: String,
    /// The path or method that took it.
    pub endpoint: &'static str,
    /// "ok", "error", "aborted", or "cancelled" (the client left), "parked" (likewise, but it can resume), "resumed" (it has, while
    /// this connection stood).
    pub outcome: &'static str,
    /// Prompts times `n`.
    pub num_choices: u32,
    /// Of all choices that finished.
    #[serde(flatten)]
    pub usage: Usage,
    /// Of the first choice that finished; its parts are null if none did.
    #[serde(flatten)]
    pub timing: Timing,
    /// From its arrival to its end.
    #[serde(rename = "e2e_ms", serialize_with = "millis")]
    pub e2e: Option<Duration>,
}

impl EndedRequest {
    /// Writes the line. It has neither text nor tokens of the request.
    pub(crate) fn log(&self) {
        let millis =
            |duration: Option<Duration>| duration.map(|duration| rounded_millis(duration.as_secs_f64()));
        let Timing {
            tokenise,
            plan,
            queue,
            prefill,
            exposed,
            ttft,
            tpot,
            transport,
            plan_kind,
            prefill_worker,
            decode_worker,
            ..
        } = &self.timing;
        tracing::info!(
            // All that a span says of the request is here.
            parent: None,
            request = self.id,
            x_request_id = self.x_request_id,
            tenant = Some(&*self.tenant).filter(|tenant| !tenant.is_empty()),
            key = self.key,
            trace = self.trace_id,
            model = self.model,
            endpoint = self.endpoint,
            outcome = self.outcome,
            choices = self.num_choices,
            prompt_tokens = self.usage.prompt_tokens,
            cached_tokens = self.usage.cached_tokens,
            blended_tokens = self.usage.blended_tokens,
            completion_tokens = self.usage.completion_tokens,
            drafted_tokens = self.usage.drafted_tokens,
            accepted_tokens = self.usage.accepted_tokens,
            plan = plan_kind,
            prefill_worker,
            decode_worker,
            transport,
            tokenise_ms = millis(*tokenise),
            plan_ms = millis(*plan),
            queue_ms = millis(*queue),
            prefill_ms = millis(*prefill),
            exposed_ms = millis(*exposed),
            ttft_ms = millis(*ttft),
            tpot_ms = millis(*tpot),
            e2e_ms = millis(self.e2e),
            "request ended"
        );
    }
}
