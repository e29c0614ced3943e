//! The flags that say which requests come, and when. All commands that simulate share them.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;

use crate::trace::{Arrival, Arrivals, Bursts, MAX_SECONDS, Trace};

/// At least so many requests come without a trace and --requests.
const LEAST_REQUESTS: usize = 2000;
/// At most so many, so that a simulation takes seconds.
const MOST_REQUESTS: usize = 8000;
/// Requests come for at least so many seconds, ...
const LEAST_SECONDS: f64 = 120.0;
/// ... and at least so many times as long as the SLOs allow for a first token or for the rest of an answer.
const LEAST_ANSWERS: f64 = 4.0;

/// Which requests come.
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// Requests: Mooncake's JSONL or Azure's CSV. Without it all have --prompt-tokens and --output-tokens.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Requests per second, at random moments. Without it they come when the trace says.
    #[arg(long, value_name = "N")]
    pub rate: Option<f64>,
    /// So many requests come at most. Default: those of the trace, or 2,000, and up to 8,000 where they would come in less than two
    /// minutes. Fewer are faster, and less certain.
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// With --rate: for ten seconds of every minute so many times the rate, 1 to 6, and less in between.
    #[arg(long, value_name = "FACTOR")]
    pub bursts: Option<f64>,
    /// The trace so many times as fast, without --rate.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub speed: f64,
    /// Tokens of each prompt without a trace.
    #[arg(long, value_name = "TOKENS", default_value_t = 2000)]
    pub prompt_tokens: u32,
    /// Tokens of each answer without a trace.
    #[arg(long, value_name = "TOKENS", default_value_t = 200)]
    pub output_tokens: u32,
}

/// Seconds for which requests must come so that a queue that grows breaks the SLOs, which are in seconds. An SLO of 0 s counts as
/// none.
pub(super) fn least_seconds(trace: &Trace, slo_ttft: f64, slo_tpot: f64) -> f64 {
    let num_tokens: f64 = trace.requests.iter().map(|request| f64::from(request.num_output_tokens)).sum();
    let answer = slo_tpot * num_tokens / trace.requests.len().max(1) as f64;
    LEAST_SECONDS.max(LEAST_ANSWERS * slo_ttft.max(answer))
}

impl LoadArgs {
    /// The requests.
    pub(super) fn trace(&self) -> anyhow::Result<Trace> {
        match &self.trace {
            Some(path) => Ok(Trace::read(path)?),
            None => Ok(Trace::of_lengths([(self.prompt_tokens, self.output_tokens)])),
        }
    }

    /// When requests come, at a multiple of the load. Without --rate so many copies of the trace come at the same time. Without a
    /// trace and --requests they come for `least_seconds` if that is possible.
    pub(super) fn arrivals(
        &self,
        load: f64,
        num_copies: u32,
        trace: &Trace,
        seed: u64,
        least_seconds: f64,
    ) -> anyhow::Result<Vec<Arrival>> {
        let is_load = |value: f64| value.is_finite() && value > 0.0;
        ensure!(is_load(load), "--sweep holds {load}; loads are above 0");
        ensure!(is_load(self.speed), "--speed is {}; it must be above 0", self.speed);
        ensure!((1..=10_000).contains(&num_copies), "--copies is {num_copies}; 1 to 10000 are possible");
        let arrivals = match self.rate {
            Some(rate) => {
                ensure!(is_load(rate), "--rate is {rate}; it must be above 0");
                ensure!(self.speed == 1.0, "--rate replaces the times of a trace: leave out --speed");
                ensure!(num_copies == 1 || self.trace.is_some(), "--copies goes with --trace");
                let bursts = |factor: f64| {
                    let why = || format!("--bursts is {factor}; 1 to 6 are possible");
                    Bursts::of_factor(factor).with_context(why)
                };
                let rate = rate * load;
                let num_requests = match &self.trace {
                    Some(_) => trace.requests.len() * num_copies as usize,
                    None => ((rate * least_seconds).ceil() as usize).clamp(LEAST_REQUESTS, MOST_REQUESTS),
                };
                Arrivals::Poisson {
                    rate,
                    num_requests: self.requests.unwrap_or(num_requests),
                    bursts: self.bursts.map(bursts).transpose()?,
                }
            }
            None => {
                ensure!(self.trace.is_some(), "give --rate or --trace: when do requests come?");
                ensure!(self.bursts.is_none(), "--bursts goes with --rate");
                Arrivals::AsTraced { speed: self.speed * load, num_copies }
            }
        };
        let mut arrivals = arrivals.of(trace, seed);
        arrivals.truncate(self.requests.unwrap_or(usize::MAX));
        let last = arrivals.last().map_or(0.0, |arrival| arrival.at.seconds());
        ensure!(last < MAX_SECONDS, "the last request comes after {last:.0} s; raise --rate or --speed");
        Ok(arrivals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_requests_come_at_a_high_rate_and_not_without_end() {
        let num = |rate: f64, load: f64, requests: Option<usize>, slos: [f64; 2]| {
            let args = LoadArgs {
                trace: None,
                rate: Some(rate),
                requests,
                bursts: None,
                speed: 1.0,
                prompt_tokens: 2000,
                output_tokens: 500,
            };
            let trace = args.trace().expect("it needs no file");
            let least_seconds = least_seconds(&trace, slos[0], slos[1]);
            args.arrivals(load, 1, &trace, 1, least_seconds).expect("arrivals").len()
        };
        assert_eq!(num(1.0, 1.0, None, [2.0, 0.1]), 2000);
        assert_eq!(num(10.0, 3.0, None, [2.0, 0.02]), 3600, "two minutes");
        assert_eq!(num(10.0, 3.0, None, [2.0, 0.1]), 6000, "four answers of 50 s");
        assert_eq!(num(10.0, 3.0, None, [40.0, 0.02]), 4800, "four times as long as a request may wait");
        assert_eq!(num(800.0, 4.0, None, [2.0, 0.1]), 8000, "no more");
        assert_eq!(num(800.0, 4.0, Some(150), [2.0, 0.1]), 150, "as the flag says");
    }
}
