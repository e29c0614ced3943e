//! Public workload traces: arrival times, lengths and shared prefixes of requests.

use std::{path::Path, time::Duration};

use anyhow::bail;
use baton_traces::{MOONCAKE_BLOCK_TOKENS, Trace};

/// One recorded request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TraceRequest {
    /// Since the first request of the trace.
    pub(crate) at: Duration,
    pub(crate) input_tokens: usize,
    pub(crate) output_tokens: usize,
    /// One per [`MOONCAKE_BLOCK_TOKENS`] of the input, equal where the text was equal. Empty: nothing is shared.
    pub(crate) hash_ids: Vec<u64>,
}

/// Reads an Azure trace (`*.csv`: TIMESTAMP,ContextTokens,GeneratedTokens) or a Mooncake trace (one
/// JSON object a line: timestamp in ms, input_length, output_length, hash_ids), told apart by content.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<TraceRequest>> {
    Ok(requests(&Trace::read(path)?))
}

fn requests(trace: &Trace) -> Vec<TraceRequest> {
    let request = |request: &baton_traces::TraceRequest| TraceRequest {
        at: Duration::from_secs_f64(request.seconds),
        input_tokens: request.num_prompt_tokens as usize,
        output_tokens: request.num_output_tokens as usize,
        hash_ids: trace.hash_ids(request).iter().map(|&id| id.into()).collect(),
    };
    let mut requests: Vec<_> = trace.requests.iter().map(request).collect();
    spread(&mut requests);
    requests
}

/// Recorded times are coarse: requests of one timestamp are spread evenly until the next one.
fn spread(requests: &mut [TraceRequest]) {
    let mut start = 0;
    while start < requests.len() {
        let at = requests[start].at;
        let num_same = requests[start..].iter().take_while(|request| request.at == at).count();
        if let Some(next) = requests.get(start + num_same) {
            let gap = next.at - at;
            for (idx, request) in requests[start..start + num_same].iter_mut().enumerate() {
                request.at = at + gap.mul_f64(idx as f64 / num_same as f64);
            }
        }
        start += num_same;
    }
}

/// Scales a trace to a model and a machine.
#[derive(Clone, Debug)]
pub(crate) struct Fit {
    /// 2 replays twice as fast.
    pub(crate) time_scale: f64,
    /// 0.5 halves every length, also those of shared blocks.
    pub(crate) length_scale: f64,
    pub(crate) max_input_tokens: usize,
    pub(crate) max_output_tokens: usize,
}

impl Fit {
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        for (name, value) in [("--time-scale", self.time_scale), ("--length-scale", self.length_scale)] {
            if !(value.is_finite() && value > 0.0) {
                bail!("{name} must be more than 0");
            }
        }
        Ok(())
    }

    pub(crate) fn apply(&self, request: &mut TraceRequest) {
        let scaled =
            |length: usize, max: usize| ((length as f64 * self.length_scale).round() as usize).clamp(1, max);
        request.at = request.at.div_f64(self.time_scale);
        request.input_tokens = scaled(request.input_tokens, self.max_input_tokens);
        request.output_tokens = scaled(request.output_tokens, self.max_output_tokens);
    }

    /// Tokens that one hash stands for after scaling.
    pub(crate) fn block_tokens(&self) -> usize {
        ((MOONCAKE_BLOCK_TOKENS as f64 * self.length_scale).round() as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(requests: &[TraceRequest]) -> Vec<f64> {
        requests.iter().map(|request| (request.at.as_secs_f64() * 1e3).round() / 1e3).collect()
    }

    #[test]
    fn mooncake_arrivals_are_spread() {
        let line = |ms: u32, length: u32, ids: &str| {
            format!(
                "{{\"timestamp\": {ms}, \"input_length\": {length}, \"output_length\": 5, \"hash_ids\": {ids}}}\n"
            )
        };
        let first = line(1000, 600, "[0, 1]") + &line(1000, 600, "[0, 2]");
        let text = first + &line(1000, 300, "[3]") + &line(4000, 512, "[0]");
        let requests = requests(&Trace::parse("t", &text).unwrap());
        assert_eq!(seconds(&requests), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(requests[1].hash_ids, [0, 2]);
    }

    #[test]
    fn traces_are_fitted() {
        let fit = Fit { time_scale: 2.0, length_scale: 0.1, max_input_tokens: 50, max_output_tokens: 20 };
        let mut request = TraceRequest {
            at: Duration::from_secs(4),
            input_tokens: 600,
            output_tokens: 3,
            hash_ids: vec![1],
        };
        fit.apply(&mut request);
        assert_eq!((request.at.as_secs(), request.input_tokens, request.output_tokens), (2, 50, 1));
        assert_eq!(fit.block_tokens(), 51);
        assert!(Fit { time_scale: 0.0, ..fit }.check().is_err());
    }
}
