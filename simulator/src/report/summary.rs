//! The numbers of a simulation, and their text.

use std::fmt;

use baton_cluster_record::Role;

use super::{
    outcome::{Outcome, RequestEnd},
    sim_report::SimReport,
};
use crate::{time::SimTime, worker::BUCKET};

/// The numbers of a simulation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimSummary {
    /// Requests that came.
    pub num_requests: usize,
    /// That finished.
    pub num_finished: usize,
    /// That no worker can hold.
    pub num_too_long: usize,
    /// That failed.
    pub num_failed: usize,
    /// That needed more than one plan.
    pub num_retried: usize,
    /// Seconds in which requests came.
    pub seconds: f64,
    /// Requests per second.
    pub offered: f64,
    /// Requests per second that met both SLOs.
    pub goodput: f64,
    /// Seconds: mean, p50, p90, p99.
    pub ttft: [f64; 4],
    /// As above.
    pub tpot: [f64; 4],
    /// Mean TTFT in seconds of the requests that came in the first half of the time, and in the second. If the queue grows, the
    /// second is longer.
    pub ttft_halves: [f64; 2],
    /// The part of all prompt tokens that was not computed again.
    pub hit_rate: f64,
    /// The part of those that was fetched from another worker.
    pub fetched: f64,
    /// The part of those that was read from tiers.
    pub recalled: f64,
    /// The part of prompts that prefill workers computed.
    pub remote: f64,
    /// Measured by predicted TTFT: p10, p50, p90; NaN without predictions.
    pub predicted: [f64; 3],
    /// The part of the time, while requests came, in which devices computed: all, of prefill and of decode workers.
    pub busy: [f64; 3],
    /// The same, arithmetic alone: without waiting for memory.
    pub arithmetic: f64,
    /// Tokens computed per second and device.
    pub tokens_per_device_second: f64,
    /// Devices.
    pub num_devices: usize,
    /// Sequences that lost their blocks.
    pub num_preempted: u64,
    /// Steps of all workers.
    pub num_steps: u64,
    /// Events.
    pub num_events: u64,
}

/// The value below which a part of the sorted values is; NaN of none.
pub fn percentile(sorted: &[f32], part: f64) -> f64 {
    if sorted.is_empty() {
        return f64::NAN;
    }
    let place = (part * (sorted.len() - 1) as f64).round() as usize;
    f64::from(sorted[place.min(sorted.len() - 1)])
}

fn sorted(outcomes: &[Outcome], value: impl Fn(&Outcome) -> f32) -> Vec<f32> {
    let mut values: Vec<f32> = outcomes.iter().map(value).filter(|value| value.is_finite()).collect();
    values.sort_by(f32::total_cmp);
    values
}

fn mean_and_percentiles(sorted: &[f32]) -> [f64; 4] {
    let mean = sorted.iter().map(|&value| f64::from(value)).sum::<f64>() / sorted.len() as f64;
    [mean, percentile(sorted, 0.5), percentile(sorted, 0.9), percentile(sorted, 0.99)]
}

impl SimReport {
    /// Its numbers.
    pub fn summary(&self) -> SimSummary {
        SimSummary::of(self)
    }
}

impl SimSummary {
    fn of(report: &SimReport) -> SimSummary {
        let outcomes = &report.outcomes;
        let count =
            |wanted: &dyn Fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| wanted(outcome)).count();
        let sum = |value: &dyn Fn(&Outcome) -> u32| {
            outcomes.iter().map(|outcome| f64::from(value(outcome))).sum::<f64>()
        };
        let first = outcomes.first().map_or(0.0, |outcome| outcome.arrived.seconds());
        let last = outcomes.last().map_or(0.0, |outcome| outcome.arrived.seconds());
        let seconds = (last - first).max(1e-9);
        let num_good = count(&Outcome::is_good);
        let num_finished = count(&|outcome| outcome.end == RequestEnd::Finished);
        let ttft = sorted(outcomes, |outcome| outcome.ttft);
        let ttft_of_half = |is_second: bool| {
            let is_in_it = |at: SimTime| (at.seconds() >= first + seconds / 2.0) == is_second;
            let ttft = |outcome: &Outcome| if is_in_it(outcome.arrived) { outcome.ttft } else { f32::NAN };
            mean_and_percentiles(&sorted(outcomes, ttft))[0]
        };
        let tpot =
            sorted(outcomes, |outcome| if outcome.num_output_tokens > 1 { outcome.tpot } else { f32::NAN });
        let ratios = sorted(outcomes, |outcome| outcome.ttft / outcome.predicted_ttft);
        let window = (first / BUCKET) as usize..(last / BUCKET).ceil().max(1.0) as usize;
        let busy = |role: Option<Role>| {
            let workers =
                || report.workers.iter().filter(|worker| role.is_none_or(|role| worker.role == role));
            let used: f64 = workers()
                .map(|worker| {
                    let end = window.end.min(worker.busy.len());
                    let part = &worker.busy[window.start.min(end)..end];
                    part.iter().map(|&busy| f64::from(busy)).sum::<f64>() * worker.num_devices as f64
                })
                .sum();
            let all: usize = workers().map(|worker| worker.num_devices).sum();
            used / (all as f64 * window.len() as f64 * BUCKET)
        };
        let num_devices: usize = report.workers.iter().map(|worker| worker.num_devices).sum();
        let whole = report.ended.seconds().max(1e-9) * num_devices as f64;
        let prompt_tokens = sum(&|outcome| outcome.num_prompt_tokens);
        let own = report.workers.iter().map(|worker| worker.own_seconds * worker.num_devices as f64);
        let num_tokens: u64 = report.workers.iter().map(|worker| worker.num_tokens).sum();
        SimSummary {
            num_requests: outcomes.len(),
            num_finished,
            num_too_long: count(&|outcome| outcome.end == RequestEnd::TooLong),
            num_failed: count(&|outcome| matches!(outcome.end, RequestEnd::Failed | RequestEnd::Unfinished)),
            num_retried: count(&|outcome| outcome.num_attempts > 1),
            seconds,
            offered: outcomes.len() as f64 / seconds,
            goodput: num_good as f64 / seconds,
            ttft: mean_and_percentiles(&ttft),
            tpot: mean_and_percentiles(&tpot),
            ttft_halves: [false, true].map(ttft_of_half),
            hit_rate: sum(&|outcome| outcome.num_cached_tokens) / prompt_tokens,
            fetched: sum(&|outcome| outcome.num_fetched_tokens) / prompt_tokens,
            recalled: sum(&|outcome| outcome.num_recalled_tokens) / prompt_tokens,
            remote: count(&|outcome| outcome.is_remote) as f64 / outcomes.len().max(1) as f64,
            predicted: [0.1, 0.5, 0.9].map(|part| percentile(&ratios, part)),
            busy: [busy(None), busy(Some(Role::Prefill)), busy(Some(Role::Decode))],
            arithmetic: own.sum::<f64>() / whole,
            tokens_per_device_second: num_tokens as f64 / whole,
            num_devices,
            num_preempted: report.workers.iter().map(|worker| worker.num_preempted).sum(),
            num_steps: report.workers.iter().map(|worker| worker.num_steps).sum(),
            num_events: report.num_events,
        }
    }

    /// The mean of the numbers of several runs; counts are those of all runs together. Of none: nothing.
    pub fn mean(all: &[SimSummary]) -> SimSummary {
        let num = all.len().max(1) as f64;
        let mean = |value: &dyn Fn(&SimSummary) -> f64| all.iter().map(value).sum::<f64>() / num;
        let count = |value: &dyn Fn(&SimSummary) -> usize| all.iter().map(value).sum::<usize>();
        let sum = |value: &dyn Fn(&SimSummary) -> u64| all.iter().map(value).sum::<u64>();
        SimSummary {
            num_requests: count(&|one| one.num_requests),
            num_finished: count(&|one| one.num_finished),
            num_too_long: count(&|one| one.num_too_long),
            num_failed: count(&|one| one.num_failed),
            num_retried: count(&|one| one.num_retried),
            seconds: mean(&|one| one.seconds),
            offered: mean(&|one| one.offered),
            goodput: mean(&|one| one.goodput),
            ttft: std::array::from_fn(|idx| mean(&|one| one.ttft[idx])),
            tpot: std::array::from_fn(|idx| mean(&|one| one.tpot[idx])),
            ttft_halves: std::array::from_fn(|idx| mean(&|one| one.ttft_halves[idx])),
            hit_rate: mean(&|one| one.hit_rate),
            fetched: mean(&|one| one.fetched),
            recalled: mean(&|one| one.recalled),
            remote: mean(&|one| one.remote),
            predicted: std::array::from_fn(|idx| mean(&|one| one.predicted[idx])),
            busy: std::array::from_fn(|idx| mean(&|one| one.busy[idx])),
            arithmetic: mean(&|one| one.arithmetic),
            tokens_per_device_second: mean(&|one| one.tokens_per_device_second),
            num_devices: all.first().map_or(0, |one| one.num_devices),
            num_preempted: sum(&|one| one.num_preempted),
            num_steps: sum(&|one| one.num_steps),
            num_events: sum(&|one| one.num_events),
        }
    }

    /// The part of the requests that met both SLOs.
    pub fn good_share(&self) -> f64 {
        self.goodput / self.offered
    }
}

/// A number in percent; a dash for none.
fn percent(part: f64) -> String {
    if part.is_finite() { format!("{:.1} %", 100.0 * part) } else { "-".to_owned() }
}

impl fmt::Display for SimSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |seconds: f64| format!("{:.1}", 1e3 * seconds);
        let line = |name: &str, of: &[f64; 4]| {
            let [mean, p50, p90, p99] = of.map(ms);
            format!("{name:<12}{mean:>12}{p50:>12}{p90:>12}{p99:>12}   ms")
        };
        writeln!(
            f,
            "requests    {} in {:.0} s, {:.2} a second; {} finished, {} too long, {} failed, {} retried",
            self.num_requests,
            self.seconds,
            self.offered,
            self.num_finished,
            self.num_too_long,
            self.num_failed,
            self.num_retried
        )?;
        writeln!(
            f,
            "goodput     {:.2} a second met both SLOs: {} of the requests",
            self.goodput,
            percent(self.good_share())
        )?;
        writeln!(f, "{:<12}{:>12}{:>12}{:>12}{:>12}", "", "mean", "p50", "p90", "p99")?;
        writeln!(f, "{}", line("ttft", &self.ttft))?;
        writeln!(f, "{}", line("tpot", &self.tpot))?;
        writeln!(
            f,
            "prefixes    {} of prompt tokens were cached, {} fetched from another worker, {} read from tiers",
            percent(self.hit_rate),
            percent(self.fetched),
            percent(self.recalled)
        )?;
        writeln!(f, "prompts     {} computed by prefill workers", percent(self.remote))?;
        if self.predicted[1].is_finite() {
            let [p10, p50, p90] = self.predicted;
            writeln!(f, "prediction  measured by predicted ttft: p10 {p10:.2}, p50 {p50:.2}, p90 {p90:.2}")?;
        }
        let [all, prefill, decode] = self.busy.map(percent);
        writeln!(
            f,
            "devices     {}: busy {all} (prefill {prefill}, decode {decode}); arithmetic alone {}; {:.0} tokens a second each",
            self.num_devices,
            percent(self.arithmetic),
            self.tokens_per_device_second
        )?;
        writeln!(
            f,
            "simulated   {} events, {} steps, {} preemptions",
            self.num_events, self.num_steps, self.num_preempted
        )
    }
}
