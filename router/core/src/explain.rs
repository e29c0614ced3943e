//! The plans of a request in the words of its client, for requests that ask for them, and in the spans of its attempts.

use baton_planner::{Estimate, Plan, PlanOption};
use serde::{Serialize, Serializer};
use tracing::Span;

/// One plan of one choice, and what it was chosen from.
#[derive(Clone, Debug, Serialize)]
pub struct ExplainedPlan {
    /// Which choice.
    pub index: u32,
    /// How often it was planned before.
    pub attempt: u32,
    /// What was chosen.
    pub chosen: ExplainedOption,
    /// Best first; empty when the plan was made without times.
    pub options: Vec<ExplainedOption>,
}

/// One way to serve a request: workers by their ids.
#[derive(Clone, Debug, Serialize)]
pub struct ExplainedOption {
    /// Who decodes.
    pub decode: String,
    /// Who computes the prompt; `None`: the decode worker.
    pub prefill: Option<String>,
    /// Whose cached prefix is fetched.
    pub prefix_source: Option<String>,
    /// `None`: a worker does not say what its steps take. As JSON in milliseconds.
    #[serde(flatten, serialize_with = "times")]
    pub estimate: Option<Estimate>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Times {
    recall_ms: f64,
    fetch_ms: f64,
    queue_ms: f64,
    compute_ms: f64,
    kept_passage_tokens: usize,
    ttft_ms: f64,
    exposed_ms: f64,
    tpot_ms: f64,
    decode_ms: f64,
    harm_ms: f64,
    total_ms: f64,
    broken_slos: u32,
    has_room: bool,
}

impl ExplainedPlan {
    pub(super) fn new(index: u32, attempt: u32, plan: &Plan) -> ExplainedPlan {
        ExplainedPlan {
            index,
            attempt,
            chosen: ExplainedOption {
                decode: plan.decode.id.0.clone(),
                prefill: plan.prefill.worker_id().map(str::to_owned),
                prefix_source: plan.prefix_source_id().map(str::to_owned),
                estimate: plan.estimate,
            },
            options: plan.options.iter().map(ExplainedOption::of).collect(),
        }
    }

    /// As attributes of the attempt's span. Of the request's, each plan would overwrite the one before.
    pub(super) fn record(span: &Span, plan: &Plan) {
        if let Some(estimate) = &plan.estimate {
            span.record("plan.ttft_ms", rounded_millis(estimate.ttft));
            span.record("plan.tpot_ms", rounded_millis(estimate.tpot));
            span.record("plan.harm_ms", rounded_millis(estimate.harm));
        }
        // They are there only for a client that asked for them.
        if !plan.options.is_empty() {
            let options: Vec<_> = plan.options.iter().map(ExplainedOption::of).collect();
            span.record("plan.options", serde_json::to_string(&options).expect("plain data is JSON"));
        }
    }
}

impl ExplainedOption {
    fn of(option: &PlanOption) -> ExplainedOption {
        ExplainedOption {
            decode: option.decode.id.0.clone(),
            prefill: option.prefill.worker_id().map(str::to_owned),
            prefix_source: option.prefix_source.as_ref().map(|worker| worker.id.0.clone()),
            estimate: Some(option.estimate),
        }
    }
}

impl Times {
    fn of(estimate: &Estimate) -> Times {
        Times {
            recall_ms: rounded_millis(estimate.recall),
            fetch_ms: rounded_millis(estimate.fetch),
            queue_ms: rounded_millis(estimate.queue),
            compute_ms: rounded_millis(estimate.compute),
            kept_passage_tokens: estimate.num_kept,
            ttft_ms: rounded_millis(estimate.ttft),
            exposed_ms: rounded_millis(estimate.exposed),
            tpot_ms: rounded_millis(estimate.tpot),
            decode_ms: rounded_millis(estimate.decode),
            harm_ms: rounded_millis(estimate.harm),
            total_ms: rounded_millis(estimate.total()),
            broken_slos: estimate.num_broken,
            has_room: estimate.has_room,
        }
    }
}

fn times<S: Serializer>(estimate: &Option<Estimate>, serializer: S) -> Result<S::Ok, S::Error> {
    estimate.as_ref().map(Times::of).serialize(serializer)
}

/// To microseconds.
pub(crate) fn rounded_millis(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e3
}
