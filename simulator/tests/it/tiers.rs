//! Tiers below the pools of workers.

use baton_cluster_record::Role;
use baton_cost::{LinkLine, PromptWork, StepWork};
use baton_simulator::{
    Change, ChangeKind, ClusterSpec, Outcome, RequestEnd, SimReport, SimTime, TierSpec, WorkerSpec, simulate,
    trace::{Arrival, Arrivals, Trace},
};

use crate::support::{GPU, cluster, worker, workers};

const PROMPT_TOKENS: usize = 10 * 512 + 1;
/// Of one prompt.
const NUM_BLOCKS: usize = PROMPT_TOKENS / 16;
/// With those of the answer.
const FEW: usize = 4;

/// Prompts of this length without common beginnings, by their numbers, one every ten seconds.
fn prompts(numbers: &[usize]) -> Trace {
    let line = |(idx, number): (usize, &usize)| {
        let ids: Vec<usize> = (0..=10).map(|block| 100 * number + block).collect();
        // Not in equal steps, within which they would be spread.
        let at = 10_000 * idx + idx % 3;
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {PROMPT_TOKENS}, \"output_length\": 4, \"hash_ids\": {ids:?}}}\n"
        )
    };
    Trace::parse("t", &numbers.iter().enumerate().map(line).collect::<String>()).expect("a trace")
}

/// A worker whose pool holds one prompt and a few blocks.
fn small(tiers: &[TierSpec]) -> WorkerSpec {
    WorkerSpec { num_blocks: NUM_BLOCKS + FEW, tiers: tiers.to_vec(), ..worker(Role::Decode, GPU) }
}

fn tier(num_prompts: usize, bytes_per_second: f64) -> TierSpec {
    let link = LinkLine { latency_seconds: 0.001, bytes_per_second };
    TierSpec { num_blocks: num_prompts * NUM_BLOCKS, link }
}

fn traced(numbers: &[usize]) -> (Trace, Vec<Arrival>) {
    let trace = prompts(numbers);
    let arrivals = Arrivals::AsTraced { speed: 1.0, num_copies: 1 }.of(&trace, 1);
    (trace, arrivals)
}

fn run(workers: Vec<WorkerSpec>, numbers: &[usize]) -> Vec<Outcome> {
    let (trace, arrivals) = traced(numbers);
    let outcomes = simulate(&cluster(workers), &trace, &arrivals, &mut |_| {}).outcomes;
    assert!(outcomes.iter().all(|outcome| outcome.end == RequestEnd::Finished), "{outcomes:?}");
    outcomes
}

/// Seconds until the first token of a prompt alone, of which so much is cached: call, steps, call.
fn seconds(num_cached: usize) -> f64 {
    let prompt = PromptWork::new(PROMPT_TOKENS, num_cached);
    0.001 + GPU.prompt_seconds(&prompt, &StepWork::default(), 2048.0)
}

/// Plans do not count the calls.
fn is_as_planned(outcome: &Outcome) -> bool {
    ((outcome.ttft - 0.001) / outcome.predicted_ttft - 1.0).abs() < 0.05
}

#[test]
fn a_prompt_that_the_pool_lost_takes_the_time_of_its_recall_and_plans_know() {
    let outcomes = run(vec![small(&[tier(4, 10e9)])], &[1, 2, 1, 2, 1]);
    let recall = 0.001 + NUM_BLOCKS as f64 * 16.0 * 4096.0 / 10e9;
    for (idx, outcome) in outcomes.iter().enumerate() {
        let num_cached = if idx < 2 { 0 } else { NUM_BLOCKS * 16 };
        let expected = if idx < 2 { seconds(0) } else { recall + seconds(num_cached) };
        assert_eq!(
            (outcome.num_cached_tokens as usize, outcome.num_fetched_tokens),
            (num_cached, 0),
            "{idx}"
        );
        let num_recalled = outcome.num_recalled_tokens as usize;
        assert!(num_recalled <= num_cached && num_recalled + 16 * FEW >= num_cached, "{idx}: {num_recalled}");
        assert!(
            (f64::from(outcome.ttft) / expected - 1.0).abs() < 0.03,
            "{idx}: {} of {expected}",
            outcome.ttft
        );
        // Before a tier was read, reading is taken to be fast.
        if idx != 2 {
            assert!(is_as_planned(outcome), "{idx}: {outcome:?}");
        }
    }
    // Without a tier all are computed; in one that is too small the other prompt takes its place.
    for tiers in [&[][..], &[tier(1, 10e9)]] {
        let outcomes = run(vec![small(tiers)], &[1, 2, 3, 1, 2, 3]);
        let is_computed = |outcome: &Outcome| outcome.num_cached_tokens as usize <= 16 * FEW;
        assert!(outcomes.iter().all(is_computed), "{outcomes:?}");
    }
}

#[test]
fn what_is_as_slow_as_computing_meets_it() {
    let as_slow = NUM_BLOCKS as f64 * 16.0 * 4096.0 / (seconds(0) - 0.001);
    // The prompt and what is read of it take blocks at the same time.
    let two = WorkerSpec { num_blocks: 2 * NUM_BLOCKS + FEW, ..small(&[tier(8, as_slow)]) };
    let outcomes = run(vec![two], &[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]);
    for (idx, outcome) in outcomes.iter().enumerate().skip(5) {
        let part = f64::from(outcome.num_recalled_tokens) / PROMPT_TOKENS as f64;
        let ratio = f64::from(outcome.ttft) / seconds(0);
        assert!((0.35..0.55).contains(&part) && ratio < 0.75, "{idx}: {part} was read, {ratio} of computing");
        assert_eq!(outcome.num_cached_tokens, outcome.num_recalled_tokens, "{idx}");
    }
}

#[test]
fn what_only_the_second_tier_holds_is_read_at_its_speed() {
    let tiers = [tier(1, 10e9), tier(8, 1e9)];
    let outcomes = run(vec![small(&tiers)], &[1, 2, 3, 1, 2, 3, 1, 2, 3]);
    for (idx, outcome) in outcomes.iter().enumerate().skip(4) {
        let expected = 0.001 + NUM_BLOCKS as f64 * 16.0 * 4096.0 / 1e9 + seconds(NUM_BLOCKS * 16);
        assert!(
            (f64::from(outcome.ttft) / expected - 1.0).abs() < 0.02,
            "{idx}: {} of {expected}",
            outcome.ttft
        );
        assert!(is_as_planned(outcome), "{idx}: {outcome:?}");
    }
}

#[test]
fn a_source_recalls_what_it_gives() {
    // The first one has all prompts in a tier. The second one is three times as fast, and joins with nothing.
    let slow = WorkerSpec { slowness: 3.0, num_blocks: 3 * NUM_BLOCKS, ..small(&[tier(8, 20e9)]) };
    let fast = WorkerSpec { num_blocks: 3 * NUM_BLOCKS, tiers: Vec::new(), ..slow.clone() };
    let fast = WorkerSpec { slowness: 1.0, ..fast };
    let numbers: Vec<usize> = (0..30).map(|idx| idx % 6).collect();
    let joins = Change { at: SimTime::from_seconds(65.0), worker_idx: 1, kind: ChangeKind::Join };
    let spec = ClusterSpec { changes: vec![joins], ..cluster(vec![slow, fast]) };
    let (trace, arrivals) = traced(&numbers);
    let outcomes = simulate(&spec, &trace, &arrivals, &mut |_| {}).outcomes;
    let fetched: Vec<u32> = outcomes.iter().skip(7).map(|outcome| outcome.num_fetched_tokens).collect();
    assert!(fetched.iter().any(|&num| num as usize > PROMPT_TOKENS * 3 / 4), "{fetched:?}");
}

fn busy(tiers: &[TierSpec], changes: Vec<Change>) -> SimReport {
    let few = |worker: WorkerSpec| WorkerSpec { num_blocks: 3 * NUM_BLOCKS, tiers: tiers.to_vec(), ..worker };
    let spec = ClusterSpec {
        num_routers: 2,
        noise: 0.1,
        changes,
        ..cluster(workers(3, 2).into_iter().map(few).collect())
    };
    let numbers: Vec<usize> = (0..600).map(|idx| idx * 7 % 23).collect();
    let arrivals =
        Arrivals::Poisson { rate: 12.0, num_requests: 600, bursts: None }.of(&prompts(&numbers), 1);
    simulate(&spec, &prompts(&numbers), &arrivals, &mut |_| {})
}

#[test]
fn under_load_with_failures_every_request_ends_and_two_runs_are_equal() {
    let change = |at: f64, worker_idx, kind| Change { at: SimTime::from_seconds(at), worker_idx, kind };
    let changes: Vec<Change> = (0..5)
        .flat_map(|worker_idx| {
            let at = 5.0 + 8.0 * worker_idx as f64;
            [change(at, worker_idx, ChangeKind::Fail), change(at + 3.0, worker_idx, ChangeKind::Join)]
        })
        .collect();
    let tiers = [tier(5, 2e9), tier(20, 0.2e9)];
    let report = busy(&tiers, changes.clone());
    assert!(report.outcomes.iter().all(|outcome| outcome.end == RequestEnd::Finished));
    assert_eq!(format!("{report:?}"), format!("{:?}", busy(&tiers, changes)));
    assert!(report.summary().recalled > 0.05, "{}", report.summary());
}

#[test]
fn a_tier_holds_what_a_larger_pool_would() {
    let [none, tiers] = [&[][..], &[tier(30, 100e9)]].map(|tiers| busy(tiers, Vec::new()).summary());
    assert!(tiers.hit_rate > 0.9 && none.hit_rate < 0.75, "{none}\n{tiers}");
    assert!(tiers.ttft[0] < 0.6 * none.ttft[0], "{none}\n{tiers}");
}
