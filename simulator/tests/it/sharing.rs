//! Workers that share the processors of one machine, as with `baton up`.

use baton_cluster_record::{Compute, Role};
use baton_cost::StepLine;
use baton_random::Random;
use baton_simulator::{
    ClusterSpec, Outcome, PolicyName, SimReport, SimTime, SloTarget, WorkerSpec, simulate,
    trace::{Arrivals, Trace},
};

use crate::support::{cluster, worker};

/// The tiny model on two processors, about as `baton bench steps` measures it, if nothing else computes there.
const TINY: StepLine =
    StepLine { fixed: 0.0002, per_token: 25e-6, per_context_token: 80e-9, per_pair: 16e-9 };
/// A model of a billion parameters.
const LARGE: StepLine = StepLine { fixed: 0.07, per_token: 3e-3, per_context_token: 4e-6, per_pair: 0.3e-6 };

const NUM_SEEDS: u64 = 5;

fn on_one_machine(num_decode: usize, num_prefill: usize, step: StepLine) -> Vec<WorkerSpec> {
    let compute = Compute { machine: "m".into(), device: "cpu".into(), units: vec![0, 1] };
    let of = |role: Role, num: usize| {
        let worker = WorkerSpec {
            token_budget: 512,
            max_running: 64,
            compute: Some(compute.clone()),
            ..worker(role, step)
        };
        std::iter::repeat_n(worker, num)
    };
    of(Role::Decode, num_decode).chain(of(Role::Prefill, num_prefill)).collect()
}

/// So many clients, each with one request at a time.
fn run(
    workers: Vec<WorkerSpec>,
    policy: PolicyName,
    num_clients: usize,
    seed: u64,
    mut length: impl FnMut(&mut Random) -> (u32, u32),
) -> SimReport {
    let mut random = Random::new(seed);
    let num_requests = 96;
    let trace = Trace::of_lengths((0..num_requests).map(|_| length(&mut random)));
    let arrivals = Arrivals::Clients { num_clients, num_requests }.of(&trace, seed);
    let (slo_ttft, slo_tpot) = (SloTarget::Seconds(2.0), SloTarget::Seconds(0.02));
    let spec = ClusterSpec { policy, seed, noise: 0.1, slo_ttft, slo_tpot, ..cluster(workers) };
    simulate(&spec, &trace, &arrivals, &mut |_| {})
}

/// TTFT p50, p99, TPOT p50, mean time until the last token and goodput of the first by those of the second: geometric means of
/// all seeds.
fn ratios(name: &str, run: impl Fn(u64) -> [SimReport; 2]) -> [f64; 5] {
    let mut sums = [0.0; 5];
    for seed in 1..=NUM_SEEDS {
        let [ours, other] = run(seed).map(|report| {
            let summary = report.summary();
            let seconds = |outcome: &Outcome| {
                f64::from(outcome.ttft) + f64::from(outcome.tpot) * f64::from(outcome.num_output_tokens - 1)
            };
            let end_to_end: f64 = report.outcomes.iter().map(seconds).sum();
            let num_good = report.outcomes.iter().filter(|outcome| outcome.is_good()).count();
            [summary.ttft[1], summary.ttft[3], summary.tpot[1], end_to_end, num_good as f64]
        });
        let both = ours.into_iter().zip(other);
        sums.iter_mut().zip(both).for_each(|(sum, (ours, other))| *sum += (ours / other).ln());
    }
    let ratios = sums.map(|sum| (sum / NUM_SEEDS as f64).exp());
    let [ttft_p50, ttft_p99, tpot, end_to_end, goodput] = ratios;
    println!(
        "{name}: TTFT p50 {ttft_p50:.2}, p99 {ttft_p99:.2}, TPOT p50 {tpot:.2}, E2E mean {end_to_end:.2}, goodput {goodput:.2}"
    );
    ratios
}

#[test]
fn steps_on_the_same_processors_take_turns() {
    let one = |num_workers: usize, num_requests: usize| {
        let trace = Trace::of_lengths((0..num_requests).map(|_| (400, 1)));
        let arrivals = Arrivals::Clients { num_clients: num_requests, num_requests }.of(&trace, 1);
        let spec = ClusterSpec {
            call: SimTime(0),
            policy: PolicyName::Baseline(baton_simulator::policies::Baseline {
                choice: baton_simulator::policies::BaselineChoice::RoundRobin,
                is_separated: false,
            }),
            ..cluster(on_one_machine(num_workers, 0, TINY))
        };
        let report = simulate(&spec, &trace, &arrivals, &mut |_| {});
        report.outcomes.iter().map(|outcome| f64::from(outcome.ttft)).fold(0.0, f64::max)
    };
    let alone = one(1, 1);
    for num in [2, 3] {
        let ratio = one(num, num) / alone;
        assert!((ratio - num as f64).abs() < 1e-3, "{num} at a time: {ratio}");
    }
    // A worker that is alone again is as fast as before.
    assert!((one(2, 3) / alone - 3.0).abs() < 1e-3, "{}", one(2, 3) / alone);
}

#[test]
fn on_shared_processors_planning_by_time_is_not_worse_than_by_constants() {
    // Short prompts beside some of 8,000 tokens.
    let length = |random: &mut Random| {
        let num_prompt = (250f64.ln() + 1.8 * random.normal()).exp().clamp(4.0, 8000.0);
        (num_prompt as u32, 32 + random.below(65) as u32)
    };
    for num_clients in [1, 4, 8, 24, 48] {
        let [ttft_p50, ttft_p99, _, end_to_end, goodput] =
            ratios(&format!("{num_clients} clients"), |seed| {
                [PolicyName::Baton, PolicyName::Constants]
                    .map(|policy| run(on_one_machine(2, 2, TINY), policy, num_clients, seed, length))
            });
        assert!(ttft_p50 < 0.95 && ttft_p99 < 1.25, "{num_clients} clients: {ttft_p50} {ttft_p99}");
        assert!(end_to_end < 1.1 && goodput > 0.95, "{num_clients} clients: {end_to_end} {goodput}");
    }
}

#[test]
fn on_shared_processors_a_large_model_is_hardly_separated() {
    let length = |random: &mut Random| (64 + random.below(193) as u32, 24);
    for num_clients in [1, 4, 8] {
        let [_, _, _, end_to_end, _] = ratios(&format!("large, {num_clients} clients"), |seed| {
            [1, 0].map(|num_prefill| {
                run(on_one_machine(1, num_prefill, LARGE), PolicyName::Baton, num_clients, seed, length)
            })
        });
        assert!(end_to_end < 1.03, "{num_clients} clients: {end_to_end}");
    }
}
