//! Two targets under one load: how their times differ, and how sure that is.

use std::{collections::BTreeMap, fmt, time::Duration};

use baton_random::Random;
use serde::Serialize;

use super::{
    drive::{Outcome, Outcomes},
    report::{Report, Times},
    stats::{Difference, MIN_CLUSTERS, Summary},
};

/// Windows of an open loop, at most. Long windows depend less on each other, many windows say more.
const MAX_WINDOWS: u32 = 32;

/// Two targets that took turns under one load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Comparison {
    pub(crate) a: Report,
    pub(crate) b: Report,
    /// Which requests are resampled together for the intervals.
    pub(crate) clusters: Clusters,
    /// Medians over requests, in milliseconds.
    pub(crate) ttft_ms: Option<Difference>,
    /// Medians over gaps.
    pub(crate) itl_ms: Option<Difference>,
    pub(crate) tpot_ms: Option<Difference>,
    pub(crate) e2e_ms: Option<Difference>,
}

/// Requests that share their conditions: the answered ones of one turn, or in an open loop, where requests overlap, of one
/// window of time. Clusters are taken for independent of each other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Clusters {
    /// `None`: turns. With one client a turn is one request.
    pub(crate) window_s: Option<f64>,
    pub(crate) num_a: usize,
    pub(crate) num_b: usize,
}

impl Comparison {
    pub(crate) fn of(outcomes: &Outcomes, reports: [Report; 2], seed: u64) -> Self {
        let mut random = Random::new(seed);
        let window = window(&outcomes.requests);
        let clusters = [0, 1].map(|target_idx| cluster(&outcomes.requests, target_idx, window));
        let mut difference = |value: &dyn Fn(&Times) -> Vec<f64>| {
            let values = |cluster: &Vec<Times>| cluster.iter().flat_map(value).collect::<Vec<f64>>();
            let [a, b] = [0, 1].map(|idx: usize| {
                clusters[idx].iter().map(values).filter(|values| !values.is_empty()).collect::<Vec<_>>()
            });
            Difference::of(&a, &b, &mut random)
        };
        let [a, b] = reports;
        Self {
            a,
            b,
            ttft_ms: difference(&|times| vec![times.ttft]),
            itl_ms: difference(&|times| times.gaps.clone()),
            tpot_ms: difference(&|times| times.tpot.into_iter().collect()),
            e2e_ms: difference(&|times| vec![times.e2e]),
            clusters: Clusters {
                window_s: window.map(|window| window.as_secs_f64()),
                num_a: clusters[0].len(),
                num_b: clusters[1].len(),
            },
        }
    }
}

/// The length of windows: twice the time of a median answer, so that most requests that overlap are in one, or more if there
/// would be too many. `None`: requests came in turns, or none was answered.
fn window(outcomes: &[Outcome]) -> Option<Duration> {
    if outcomes.iter().any(|outcome| outcome.turn.is_some()) {
        return None;
    }
    let times = outcomes.iter().filter_map(|outcome| Some(Times::of(outcome)?.e2e)).collect();
    let answer = Duration::from_secs_f64(Summary::of(times)?.p50 / 1e3);
    let dues = || outcomes.iter().map(|outcome| outcome.due);
    let span = dues().max()? - dues().min()?;
    // A nanosecond more, so that the last request is in the last of them.
    Some((2 * answer).max(span / MAX_WINDOWS) + Duration::from_nanos(1))
}

/// The times of the answered requests to a target, by cluster.
fn cluster(outcomes: &[Outcome], target_idx: usize, window: Option<Duration>) -> Vec<Vec<Times>> {
    let start = outcomes.iter().map(|outcome| outcome.due).min();
    let mut clusters = BTreeMap::<usize, Vec<Times>>::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.target_idx == target_idx) {
        let window_idx = || {
            let since_start = start.map_or(Duration::ZERO, |start| outcome.due - start);
            window.map_or(0, |window| (since_start.as_nanos() / window.as_nanos()) as usize)
        };
        if let Some(times) = Times::of(outcome) {
            clusters.entry(outcome.turn.unwrap_or_else(window_idx)).or_default().push(times);
        }
    }
    clusters.into_values().collect()
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "A: {}\nB: {}", self.a, self.b)?;
        writeln!(f, "Medians, in turns within one run (throughput above is shared by both):\n")?;
        writeln!(f, "{:<8}{:>11}{:>11}{:>9}{:>11}   95 % of A - B", "ms", "A", "B", "A / B", "A - B")?;
        for (name, difference) in
            [("TTFT", self.ttft_ms), ("ITL", self.itl_ms), ("TPOT", self.tpot_ms), ("E2E", self.e2e_ms)]
        {
            let Some(d) = difference else { continue };
            let ratio = d.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
            let interval = d
                .interval
                .map_or("-".to_owned(), |interval| format!("{:+.3} to {:+.3}", interval.low, interval.high));
            writeln!(
                f,
                "{name:<8}{:>11.3}{:>11.3}{ratio:>9}{:>+11.3}   {interval}",
                d.median_a, d.median_b, d.difference
            )?;
        }
        let Clusters { window_s, num_a, num_b } = self.clusters;
        let clusters = window_s.map_or("turns".to_owned(), |seconds| format!("windows of {seconds:.1} s"));
        if num_a.min(num_b) < MIN_CLUSTERS {
            return writeln!(
                f,
                "\nNo intervals: they need {MIN_CLUSTERS} {clusters} of each target, and A has {num_a}, B {num_b}."
            );
        }
        writeln!(f, "\nThe intervals are by resampling {num_a} {clusters} of A and {num_b} of B.")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::{config::Config, report::Slo, target::Answer};

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// An answer of two tokens after `ttft` and 200 ms.
    fn outcome(due: Instant, target_idx: usize, turn: Option<usize>, ttft: u64) -> Outcome {
        let answer = Answer {
            arrivals: vec![due + ms(ttft), due + ms(200)],
            finished: Some(due + ms(200)),
            output_tokens: Some(2),
            ..Answer::default()
        };
        Outcome { target_idx, turn, due, sent: due, result: Ok(answer) }
    }

    fn compare(requests: Vec<Outcome>) -> Comparison {
        let outcomes = Outcomes { requests, elapsed: ms(100) };
        let report = |idx| Report::of(&outcomes, idx, format!("t{idx}"), &Config::default(), Slo::default());
        Comparison::of(&outcomes, [report(0), report(1)], 1)
    }

    #[test]
    fn comparison_shows_the_difference_of_medians() {
        let start = Instant::now();
        let ttft = |idx: usize| 100 + (idx as u64 % 2) * 5 + idx as u64 / 8;
        let outcomes = (0..40).map(|idx| outcome(start, idx % 2, Some(idx), ttft(idx))).collect();
        let comparison = compare(outcomes);
        let ttft = comparison.ttft_ms.unwrap();
        assert!((ttft.difference + 5.0).abs() < 1e-6, "{ttft:?}");
        let interval = ttft.interval.unwrap();
        assert!(interval.low <= -3.0 && interval.high >= -7.0, "{ttft:?}");
        let table = comparison.to_string();
        assert!(table.contains("A / B") && table.contains("resampling 20 turns of A and 20 of B"), "{table}");
    }

    #[test]
    fn requests_of_one_turn_are_one_cluster() {
        let start = Instant::now();
        // 14 turns of 8 requests each: A B B A.
        let request = |idx: usize| {
            let turn = idx / 8;
            outcome(start, (turn + turn / 2) % 2, Some(turn), 100)
        };
        let comparison = compare((0..112).map(request).collect());
        assert_eq!(comparison.clusters, Clusters { window_s: None, num_a: 7, num_b: 7 });
        assert_eq!(comparison.ttft_ms.unwrap().interval, None);
        let table = comparison.to_string();
        assert!(table.contains("need 8 turns of each target, and A has 7, B 7"), "{table}");
    }

    #[test]
    fn overlapping_requests_of_an_open_loop_are_one_cluster() {
        let start = Instant::now();
        // A request every 10 ms for 8 s. Answers take 200 ms, so windows take 400 ms.
        let request = |idx: usize| outcome(start + ms(10) * idx as u32, idx % 2, None, 100);
        // For 80 s windows are longer: there are 32 at most.
        for (num_requests, window_s, num_windows) in [(800, 0.4, 20), (8001, 2.5, 32)] {
            let clusters = compare((0..num_requests).map(request).collect()).clusters;
            assert!((clusters.window_s.unwrap() - window_s).abs() < 1e-6, "{clusters:?}");
            assert_eq!((clusters.num_a, clusters.num_b), (num_windows, num_windows));
        }
    }
}
