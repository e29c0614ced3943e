//! What a load was, for the first line of its report and for JSON. It does not say where requests went.

use std::fmt;

use serde::Serialize;

/// The settings of a load.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    pub(crate) temperature: f64,
    /// Requests to each target before the load.
    pub(crate) warmup: usize,
    pub(crate) timeout_s: f64,
    /// To each target; `None`: as many as time or the trace allow.
    pub(crate) requests: Option<usize>,
    pub(crate) duration_s: Option<f64>,
    /// Two targets got this load.
    pub(crate) compare: bool,
    /// Clients of a closed loop.
    pub(crate) concurrency: Option<usize>,
    /// Requests per second of an open loop, to each target.
    pub(crate) rate: Option<f64>,
    pub(crate) trace: Option<Replay>,
    /// `None`: those of the trace.
    pub(crate) input_tokens: Option<String>,
    pub(crate) output_tokens: Option<String>,
    pub(crate) max_input_tokens: Option<usize>,
    pub(crate) max_output_tokens: Option<usize>,
    /// Tokens at the beginning that all prompts have in common.
    pub(crate) shared_prefix: usize,
}

/// A trace and how it was changed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Replay {
    pub(crate) file: String,
    pub(crate) time_scale: f64,
    pub(crate) length_scale: f64,
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to_each = if self.compare { " to each target" } else { "" };
        match (&self.trace, self.rate, self.concurrency) {
            (Some(trace), _, _) => write!(f, "trace {} at speed {}{to_each}", trace.file, trace.time_scale)?,
            (None, Some(rate), _) => write!(f, "{rate} requests/s{to_each}, Poisson")?,
            (None, None, clients) => write!(f, "{} clients, closed loop", clients.unwrap_or(0))?,
        }
        if let (Some(input), Some(output)) = (&self.input_tokens, &self.output_tokens) {
            write!(f, ", {input} tokens in, {output} out")?;
        }
        if self.shared_prefix > 0 {
            write!(f, ", the first {} of every prompt shared", self.shared_prefix)?;
        }
        Ok(())
    }
}
