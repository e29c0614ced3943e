//! The flags that say which requests come, and when. All commands that simulate share them.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;

use crate::trace::{Arrival, Arrivals, Bursts, MAX_SECONDS, Trace};

/// Which requests come.
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// Requests: Mooncake's JSONL or Azure's CSV. Without it all have --prompt-tokens and --output-tokens.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Requests per second, at random moments. Without it they come when the trace says.
    #[arg(long, value_name = "N")]
    pub rate: Option<f64>,
    /// So many requests come at most. Default: those of the trace, or 2,000. Fewer are faster, and less certain.
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// With --rate: for ten seconds of every minute so many times the rate, and less in between.
    #[arg(long, value_name = "FACTOR")]
    pub bursts: Option<f64>,
    /// The trace so many times as fast.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub speed: f64,
    /// Tokens of each prompt without a trace.
    #[arg(long, value_name = "TOKENS", default_value_t = 2000)]
    pub prompt_tokens: u32,
    /// Tokens of each answer without a trace.
    #[arg(long, value_name = "TOKENS", default_value_t = 200)]
    pub output_tokens: u32,
}

impl LoadArgs {
    /// The requests.
    pub(super) fn trace(&self) -> anyhow::Result<Trace> {
        match &self.trace {
            Some(path) => Ok(Trace::read(path)?),
            None => Ok(Trace::of_lengths([(self.prompt_tokens, self.output_tokens)])),
        }
    }

    /// When requests come, at a multiple of the load. Without --rate so many copies of the trace come at the same time.
    pub(super) fn arrivals(
        &self,
        load: f64,
        num_copies: u32,
        trace: &Trace,
        seed: u64,
    ) -> anyhow::Result<Vec<Arrival>> {
        let is_load = |value: f64| value.is_finite() && value > 0.0;
        ensure!(is_load(load), "--sweep holds {load}; loads are above 0");
        ensure!(is_load(self.speed), "--speed is {}; it must be above 0", self.speed);
        ensure!((1..=10_000).contains(&num_copies), "--copies is {num_copies}; 1 to 10000 are possible");
        let num_traced = match &self.trace {
            Some(_) => trace.requests.len() * num_copies as usize,
            None => 2000,
        };
        let arrivals = match self.rate {
            Some(rate) => {
                ensure!(is_load(rate), "--rate is {rate}; it must be above 0");
                let num_requests = self.requests.unwrap_or(num_traced);
                Arrivals::Poisson {
                    rate: rate * load,
                    num_requests,
                    bursts: self.bursts.map(Bursts::of_factor),
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
