//! What became of one request, and what one worker did.

use baton_cluster_record::Role;

use crate::{time::SimTime, trace::TraceRequest};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEnd {
    /// The simulation ended first.
    Unfinished,
    /// With its last token.
    Finished,
    /// No worker can hold it.
    TooLong,
    /// After too many failures, or without a worker for too long.
    Failed,
}

/// What became of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// When it came.
    pub arrived: SimTime,
    /// Tokens of its prompt.
    pub num_prompt_tokens: u32,
    /// Of its answer.
    pub num_output_tokens: u32,
    /// Prompt tokens that were cached where the prompt was computed, fetched ones included.
    pub num_cached_tokens: u32,
    /// Prompt tokens that were fetched from another worker.
    pub num_fetched_tokens: u32,
    /// Prompt tokens that were read from the tiers of the worker that computed the prompt.
    pub num_recalled_tokens: u32,
    /// Seconds until the first token; NaN without one.
    pub ttft: f32,
    /// Mean seconds between tokens; NaN if it did not finish.
    pub tpot: f32,
    /// What it should meet, in seconds.
    pub slo_ttft: f32,
    /// As above, between tokens.
    pub slo_tpot: f32,
    /// What its first plan predicted; NaN without a prediction.
    pub predicted_ttft: f32,
    /// Plans that were tried.
    pub num_attempts: u32,
    /// Whether a prefill worker computed its prompt.
    pub is_remote: bool,
    /// How it ended.
    pub end: RequestEnd,
}

/// What one worker did.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerUse {
    /// Its name.
    pub name: String,
    /// What it serves.
    pub role: Role,
    /// Its devices.
    pub num_devices: usize,
    /// Seconds in steps, in each second of the simulation.
    pub busy: Vec<f32>,
    /// Steps.
    pub num_steps: u64,
    /// Tokens that were computed.
    pub num_tokens: u64,
    /// Seconds of arithmetic alone, without reading weights and KV.
    pub own_seconds: f64,
    /// Sequences that lost their blocks.
    pub num_preempted: u64,
}

impl Outcome {
    pub(crate) fn new(arrived: SimTime, request: &TraceRequest) -> Outcome {
        Outcome {
            arrived,
            num_prompt_tokens: request.num_prompt_tokens,
            num_output_tokens: request.num_output_tokens,
            num_cached_tokens: 0,
            num_fetched_tokens: 0,
            num_recalled_tokens: 0,
            ttft: f32::NAN,
            tpot: f32::NAN,
            slo_ttft: 0.0,
            slo_tpot: 0.0,
            predicted_ttft: f32::NAN,
            num_attempts: 0,
            is_remote: false,
            end: RequestEnd::Unfinished,
        }
    }

    /// Whether it met both SLOs.
    pub fn is_good(&self) -> bool {
        self.end == RequestEnd::Finished && self.ttft <= self.slo_ttft && self.tpot <= self.slo_tpot
    }
}
