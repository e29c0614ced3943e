//! Queues whose mean waits have formulas. One worker serves one request at a time, in the order of arrival: a prompt whose step
//! takes its service time.

use baton_cluster_record::Role;
use baton_cost::StepLine;
use baton_simulator::{
    ClusterSpec, SimReport, SimTime, WorkerSpec, simulate,
    trace::{Arrival, Trace},
};

use crate::support::{cluster, worker};

/// Tokens of the mean prompt: services are multiples of this part of it.
const MEAN_TOKENS: f64 = 2000.0;

/// One slot, and steps that take a second for the mean prompt.
fn single_server() -> ClusterSpec {
    let step = StepLine { fixed: 0.0, per_token: 1.0 / MEAN_TOKENS, per_context_token: 0.0, per_pair: 0.0 };
    let server = WorkerSpec {
        max_running: 1,
        // All prompts of the window fit: then the oldest comes first.
        token_budget: 1 << 24,
        context_length: 1 << 20,
        num_blocks: 1 << 16,
        ..worker(Role::Decode, step)
    };
    // Reports are as rare as they may be: a single worker needs none.
    ClusterSpec { call: SimTime(0), report_interval: SimTime::from_seconds(1e9), ..cluster(vec![server]) }
}

/// Numbers in (0, 1] that look random; the mirrored ones with the same seed are 1 minus those.
fn uniform(seed: u64, is_mirrored: bool) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let unit = ((mixed >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        if is_mirrored { 1.0 - unit } else { unit }
    }
}

/// Services and arrivals of a queue with this load.
fn queue(num: usize, load: f64, is_exponential: bool, is_mirrored: bool) -> (Trace, Vec<Arrival>) {
    let (mut service, mut gap) = (uniform(1, is_mirrored), uniform(2, is_mirrored));
    let tokens = |unit: f64| if is_exponential { -MEAN_TOKENS * unit.ln() } else { MEAN_TOKENS };
    let trace = Trace::of_lengths((0..num).map(|_| (tokens(service()).round() as u32, 1)));
    let mut seconds = 0.0;
    let arrival = |idx: usize| {
        // A short service goes with a long gap, and the other way round in the mirrored queue.
        seconds += -(1.0 - gap()).ln() / load;
        Arrival { at: SimTime::from_seconds(seconds), request_idx: idx as u32, copy: 0 }
    };
    let arrivals = (0..num).map(arrival).collect();
    (trace, arrivals)
}

fn waits(report: &SimReport) -> Vec<f64> {
    let wait = |outcome: &baton_simulator::Outcome| {
        f64::from(outcome.ttft) - f64::from(outcome.num_prompt_tokens) / MEAN_TOKENS
    };
    report.outcomes.iter().map(wait).collect()
}

#[test]
fn mean_waits_are_those_of_queueing_theory() {
    for (is_exponential, load, num) in
        [(false, 0.5, 100_000), (false, 0.8, 200_000), (true, 0.5, 150_000), (true, 0.8, 400_000)]
    {
        // Long waits of one queue are short ones of the other: their mean varies less (antithetic variates, Hammersley and
        // Morton 1956).
        let mean_wait = |is_mirrored: bool| {
            let (trace, arrivals) = queue(num, load, is_exponential, is_mirrored);
            let report = simulate(&single_server(), &trace, &arrivals, &mut |_| {});
            waits(&report).iter().sum::<f64>() / num as f64
        };
        let mean = (mean_wait(false) + mean_wait(true)) / 2.0;
        // Pollaczek and Khinchine: half as long where services do not vary.
        let expected = load / (1.0 - load) * if is_exponential { 1.0 } else { 0.5 };
        let error = mean / expected - 1.0;
        println!("exponential {is_exponential}, load {load}: {mean:.4}, {:.2} % off", 100.0 * error);
        assert!(error.abs() < 0.02, "exponential {is_exponential}, load {load}: {mean}, expected {expected}");
    }
}

/// Lindley (1952): a request waits as long as the one before it, and its service, minus the time between them.
#[test]
fn each_wait_follows_from_the_one_before() {
    let (trace, arrivals) = queue(20_000, 0.9, true, false);
    let report = simulate(&single_server(), &trace, &arrivals, &mut |_| {});
    let mut free_at: f64 = 0.0;
    for (outcome, arrival) in report.outcomes.iter().zip(&arrivals) {
        let at = arrival.at.seconds();
        free_at = free_at.max(at) + f64::from(outcome.num_prompt_tokens) / MEAN_TOKENS;
        let error = (f64::from(outcome.ttft) - (free_at - at)).abs();
        assert!(error < 1e-4 * (1.0 + free_at - at), "at {at}: {} and {}", outcome.ttft, free_at - at);
    }
}
