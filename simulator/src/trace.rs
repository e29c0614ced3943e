//! Which requests come, and when: [`Arrivals`] are the moments at which the requests of a [`Trace`] come.

use baton_random::Random;

use crate::time::SimTime;

pub(crate) use baton_traces::MAX_SECONDS;
pub use baton_traces::{Trace, TraceRequest};

/// Told from the seeds of other chance.
const SEED: u64 = 0x5851_F42D_4C95_7F2D;

/// One request that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When.
    pub at: SimTime,
    /// Which of the trace.
    pub request_idx: u32,
    /// Requests of different copies share no prefix.
    pub copy: u32,
}

impl Arrival {
    /// When an earlier request has ended.
    pub const AFTER_ANOTHER: SimTime = SimTime(u64::MAX);
}

/// The moments at which the requests of a trace come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// When the trace says, times that factor in speed. Several copies of the trace come at the same time, each with
    /// prefixes of its own.
    AsTraced {
        /// How many times as fast.
        speed: f64,
        /// How many copies.
        num_copies: u32,
    },
    /// Independently of each other, so many in a second on average; the trace in its order, again and again.
    Poisson {
        /// Requests per second.
        rate: f64,
        /// How many come.
        num_requests: usize,
        /// Whether the rate changes.
        bursts: Option<Bursts>,
    },
    /// Each client sends its next request when its last one has ended; the trace in its order, again and again.
    Clients {
        /// How many send at a time.
        num_clients: usize,
        /// How many requests come.
        num_requests: usize,
    },
}

/// A rate that is `factor` times the mean for `burst_seconds` of every `period_seconds`, and less in between, so that the mean
/// stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bursts {
    /// Of the mean; at most `period_seconds / burst_seconds`.
    pub factor: f64,
    /// How long a burst takes.
    pub burst_seconds: f64,
    /// From one burst to the next.
    pub period_seconds: f64,
}

impl Bursts {
    /// Ten seconds of every minute. `None`, if the factor is not 1 to 6: with 6 no request comes in between.
    pub fn of_factor(factor: f64) -> Option<Bursts> {
        let bursts = Bursts { factor, burst_seconds: 10.0, period_seconds: 60.0 };
        (1.0..=6.0).contains(&factor).then_some(bursts)
    }

    /// When so many mean arrivals have passed, in units of the mean.
    fn warp(&self, seconds: f64) -> f64 {
        let Bursts { factor, burst_seconds, period_seconds } = *self;
        let in_burst = factor * burst_seconds;
        let (periods, rest) = ((seconds / period_seconds).floor(), seconds.rem_euclid(period_seconds));
        let calm = (period_seconds - in_burst) / (period_seconds - burst_seconds);
        let within = if rest < in_burst {
            rest / factor
        } else {
            burst_seconds + (rest - in_burst) / calm.max(f64::MIN_POSITIVE)
        };
        periods * period_seconds + within.min(period_seconds)
    }
}

impl Arrivals {
    /// The arrivals of a trace, in order. Times that a trace has only in steps are spread within them.
    pub fn of(&self, trace: &Trace, seed: u64) -> Vec<Arrival> {
        let mut random = Random::new(seed ^ SEED);
        match *self {
            Arrivals::AsTraced { speed, num_copies } => {
                let mut arrivals = Vec::with_capacity(trace.requests.len() * num_copies as usize);
                for copy in 0..num_copies {
                    for (idx, request) in trace.requests.iter().enumerate() {
                        let seconds = request.seconds + trace.quantum_seconds * random.unit();
                        let at = SimTime::from_seconds(seconds / speed);
                        arrivals.push(Arrival { at, request_idx: idx as u32, copy });
                    }
                }
                // Of one moment, the first copy first.
                arrivals.sort_by_key(|arrival| (arrival.at, arrival.copy, arrival.request_idx));
                arrivals
            }
            Arrivals::Poisson { rate, num_requests, bursts } => {
                let mut seconds = 0.0;
                let len = trace.requests.len().max(1);
                let arrival = |idx: usize| {
                    seconds += random.exponential() * (1.0 / rate);
                    let at = SimTime::from_seconds(bursts.map_or(seconds, |bursts| bursts.warp(seconds)));
                    Arrival { at, request_idx: (idx % len) as u32, copy: (idx / len) as u32 }
                };
                (0..num_requests).map(arrival).collect()
            }
            Arrivals::Clients { num_clients, num_requests } => {
                let len = trace.requests.len().max(1);
                let arrival = |idx: usize| {
                    let at = if idx < num_clients { SimTime(0) } else { Arrival::AFTER_ANOTHER };
                    Arrival { at, request_idx: (idx % len) as u32, copy: (idx / len) as u32 }
                };
                (0..num_requests).map(arrival).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace() -> Trace {
        let mut trace = Trace::of_lengths([(10, 1), (20, 2)]);
        trace.requests[1].seconds = 3.0;
        trace.quantum_seconds = 3.0;
        trace
    }

    #[test]
    fn copies_come_at_their_own_moments_within_the_quantum() {
        let arrivals = Arrivals::AsTraced { speed: 2.0, num_copies: 50 }.of(&trace(), 7);
        assert_eq!(arrivals.len(), 100);
        assert!(arrivals.is_sorted_by_key(|arrival| arrival.at));
        for arrival in &arrivals {
            let start = 1.5 * f64::from(arrival.request_idx);
            assert!((start..start + 1.5).contains(&arrival.at.seconds()), "{arrival:?}");
        }
        let mut copies: Vec<u32> = arrivals.iter().map(|arrival| arrival.copy).collect();
        copies.sort_unstable();
        copies.dedup();
        assert_eq!(copies.len(), 50);
    }

    #[test]
    fn bursts_keep_the_mean_rate() {
        let count = |bursts: Option<Bursts>| {
            let arrivals = Arrivals::Poisson { rate: 100.0, num_requests: 60_000, bursts }.of(&trace(), 3);
            let in_burst = arrivals.iter().filter(|arrival| arrival.at.seconds() % 60.0 < 10.0).count();
            (arrivals.last().expect("some").at.seconds(), in_burst as f64 / 60_000.0)
        };
        let (even_end, even_share) = count(None);
        let (end, share) = count(Bursts::of_factor(4.0));
        assert!((even_end - 600.0).abs() < 15.0 && (end - 600.0).abs() < 60.0, "{even_end} {end}");
        assert!(
            (even_share - 1.0 / 6.0).abs() < 0.02 && (share - 4.0 / 6.0).abs() < 0.05,
            "{even_share} {share}"
        );
    }

    #[test]
    fn the_same_seed_gives_the_same_arrivals() {
        let arrivals = Arrivals::Poisson { rate: 1.0, num_requests: 50, bursts: None };
        assert_eq!(arrivals.of(&trace(), 1), arrivals.of(&trace(), 1));
        assert_ne!(arrivals.of(&trace(), 1), arrivals.of(&trace(), 2));
    }
}
