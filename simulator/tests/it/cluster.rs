//! Whole clusters: what must hold whatever happens.

use baton_cluster_record::Role;
use baton_cost::{LinkLine, StepLine};
use baton_simulator::{
    Change, ChangeKind, ClusterSpec, PolicyName, RequestEnd, SimReport, SimTime, WorkerSpec, policies,
    simulate,
    trace::{Arrivals, Trace},
};
use policies::{Baseline, BaselineChoice};

use crate::support::{GPU, cluster, worker, workers};

/// Conversations: each prompt begins with that of an earlier one.
fn conversations(num: usize) -> Trace {
    let line = |idx: usize| {
        let (conversation, turn) = (idx % 40, idx / 40 % 6);
        let ids: Vec<usize> = (0..=turn).map(|block| 1000 * conversation + block).collect();
        format!(
            "{{\"timestamp\": {idx}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": {ids:?}}}\n",
            512 * ids.len() - 100,
            20 + idx % 100
        )
    };
    Trace::parse("t", &(0..num).map(line).collect::<String>()).expect("a trace")
}

fn run(spec: &ClusterSpec, num: usize, rate: f64) -> SimReport {
    let trace = conversations(num);
    let arrivals = Arrivals::Poisson { rate, num_requests: num, bursts: None }.of(&trace, spec.seed);
    simulate(spec, &trace, &arrivals, &mut |_| {})
}

fn assert_all_finished(report: &SimReport) {
    for (idx, outcome) in report.outcomes.iter().enumerate() {
        assert_eq!(outcome.end, RequestEnd::Finished, "{idx}: {outcome:?}");
        assert!(outcome.ttft > 0.0 && outcome.tpot > 0.0, "{idx}: {outcome:?}");
    }
}

#[test]
fn two_runs_are_equal_and_another_seed_is_another_run() {
    let spec = ClusterSpec { num_routers: 3, noise: 0.1, ..cluster(workers(3, 2)) };
    let (first, second) = (run(&spec, 1500, 30.0), run(&spec, 1500, 30.0));
    assert_eq!(format!("{first:?}"), format!("{second:?}"));
    let other = run(&ClusterSpec { seed: 2, ..spec }, 1500, 30.0);
    assert_ne!(format!("{first:?}"), format!("{other:?}"));
}

#[test]
fn every_policy_finishes_every_request_and_finds_prefixes() {
    let choices = [
        BaselineChoice::RoundRobin,
        BaselineChoice::LeastLoaded,
        BaselineChoice::PrefixOnly { most_imbalance: 2.0 },
        BaselineChoice::NewTokensTimesBatch,
    ];
    let baselines = choices.into_iter().flat_map(|choice| {
        [false, true].map(|is_separated| PolicyName::Baseline(Baseline { choice, is_separated }))
    });
    for policy in baselines.chain([PolicyName::Baton, PolicyName::Constants]) {
        let report = run(&ClusterSpec { policy, ..cluster(workers(3, 2)) }, 1500, 30.0);
        assert_all_finished(&report);
        let summary = report.summary();
        assert!(summary.hit_rate > 0.1 && summary.hit_rate < 0.99, "{policy:?}: {summary}");
        if let PolicyName::Baseline(Baseline { is_separated, .. }) = policy {
            assert_eq!(summary.remote, if is_separated { 1.0 } else { 0.0 }, "{policy:?}");
        }
    }
}

#[test]
fn a_small_pool_is_full_and_all_finish_all_the_same() {
    let mut all = workers(2, 1);
    all.iter_mut().for_each(|worker| worker.num_blocks = 400);
    let report = run(&cluster(all), 1000, 40.0);
    assert_all_finished(&report);
    assert!(report.summary().ttft[3] > 0.5, "requests waited: {}", report.summary());
}

#[test]
fn requests_of_workers_that_fail_go_on_elsewhere() {
    let at = |seconds: f64, worker_idx: usize, kind: ChangeKind| Change {
        at: SimTime::from_seconds(seconds),
        worker_idx,
        kind,
    };
    let changes = vec![
        at(4.0, 0, ChangeKind::Fail),
        at(6.0, 3, ChangeKind::Fail),
        at(8.0, 0, ChangeKind::Join),
        at(9.0, 1, ChangeKind::Slow(3.0)),
        at(10.0, 2, ChangeKind::Join),
        at(12.0, 3, ChangeKind::Join),
        at(14.0, 4, ChangeKind::Fail),
    ];
    for policy in [PolicyName::Baton, PolicyName::Constants] {
        let spec = ClusterSpec { policy, changes: changes.clone(), num_routers: 2, ..cluster(workers(3, 2)) };
        let report = run(&spec, 1500, 60.0);
        assert_all_finished(&report);
        let summary = report.summary();
        assert!(summary.num_retried > 0, "{summary}");
        assert!(report.workers[2].num_tokens > 0, "the worker that joined got requests: {summary}");
    }
}

#[test]
fn prompts_in_a_prefill_queue_do_not_wait_for_a_decode_worker_that_died() {
    // Each prefill worker has thirty prompts, of which it computes seven in the first second.
    let trace = Trace::of_lengths([(4000, 20); 60]);
    let arrivals = Arrivals::AsTraced { speed: 1.0, num_copies: 1 }.of(&trace, 1);
    let separated = Baseline { choice: BaselineChoice::LeastLoaded, is_separated: true };
    let fail = Change { at: SimTime::from_seconds(1.0), worker_idx: 0, kind: ChangeKind::Fail };
    let spec = ClusterSpec {
        policy: PolicyName::Baseline(separated),
        changes: vec![fail],
        ..cluster(workers(2, 2))
    };
    let report = simulate(&spec, &trace, &arrivals, &mut |_| {});
    assert_all_finished(&report);
    let summary = report.summary();
    assert!(summary.num_retried > 10, "half of those in the queues were to decode there: {summary}");
}

#[test]
fn without_a_worker_for_longer_than_patience_requests_fail() {
    let fail = Change { at: SimTime::from_seconds(1.0), worker_idx: 0, kind: ChangeKind::Fail };
    let report = run(&ClusterSpec { changes: vec![fail], ..cluster(workers(1, 0)) }, 200, 20.0);
    let summary = report.summary();
    assert!(summary.num_failed > 100 && summary.num_finished > 0, "{summary}");
    assert_eq!(summary.num_failed + summary.num_finished, 200);
}

#[test]
fn the_first_token_of_a_remote_prefill_does_not_begin_the_count_of_failures_anew() {
    let slower = |factor: f64| StepLine {
        fixed: factor * GPU.fixed,
        per_token: factor * GPU.per_token,
        per_context_token: factor * GPU.per_context_token,
        per_pair: factor * GPU.per_pair,
    };
    let workers = vec![
        worker(Role::Decode, slower(100.0)),
        worker(Role::Prefill, GPU),
        worker(Role::Prefill, slower(3.0)),
    ];
    // The first prefill worker fails while it computes, the second one while its KV travels for seconds.
    let fail = |seconds: f64, worker_idx: usize| Change {
        at: SimTime::from_seconds(seconds),
        worker_idx,
        kind: ChangeKind::Fail,
    };
    let spec = ClusterSpec {
        link: LinkLine { latency_seconds: 0.001, bytes_per_second: 10e6 },
        changes: vec![fail(0.1, 1), fail(2.0, 2)],
        max_attempts: 2,
        ..cluster(workers)
    };
    let trace = Trace::of_lengths([(8000, 10)]);
    let arrivals = Arrivals::AsTraced { speed: 1.0, num_copies: 1 }.of(&trace, 1);
    let outcome = &simulate(&spec, &trace, &arrivals, &mut |_| {}).outcomes[0];
    assert!(outcome.is_remote && outcome.ttft < 2.0, "{outcome:?}");
    assert_eq!((outcome.num_attempts, outcome.end), (2, RequestEnd::Failed), "{outcome:?}");
}

#[test]
fn a_request_that_no_worker_can_hold_is_refused_and_others_are_served() {
    let trace = Trace::of_lengths([(1000, 10), (1_000_000, 10), (1000, 1_000_000), (1000, 1)]);
    let arrivals = Arrivals::AsTraced { speed: 1.0, num_copies: 1 }.of(&trace, 1);
    let report = simulate(&cluster(workers(1, 1)), &trace, &arrivals, &mut |_| {});
    let ends: Vec<RequestEnd> = report.outcomes.iter().map(|outcome| outcome.end).collect();
    use RequestEnd::{Finished, TooLong};
    assert_eq!(ends, [Finished, TooLong, TooLong, Finished]);
}

#[test]
fn one_request_takes_what_the_step_line_says() {
    let trace = Trace::of_lengths([(4000, 11)]);
    let arrivals = Arrivals::AsTraced { speed: 1.0, num_copies: 1 }.of(&trace, 1);
    let report = simulate(&cluster(vec![worker(Role::Decode, GPU)]), &trace, &arrivals, &mut |_| {});
    let outcome = &report.outcomes[0];
    // Two chunks, of 2048 and 1952 tokens, and two calls.
    let context = 2048.0 + 4000.0;
    let ttft = 0.001
        + 2.0 * GPU.fixed
        + 4000.0 * GPU.per_token
        + context * GPU.per_context_token
        + 4000.0 * 4001.0 / 2.0 * GPU.per_pair;
    assert!((f64::from(outcome.ttft) / ttft - 1.0).abs() < 1e-5, "{} {ttft}", outcome.ttft);
    let tpot = GPU.fixed + GPU.per_token + 4005.5 * (GPU.per_context_token + GPU.per_pair);
    assert!((f64::from(outcome.tpot) / tpot - 1.0).abs() < 1e-5, "{} {tpot}", outcome.tpot);
}

#[test]
fn an_overloaded_decode_worker_is_relieved_by_a_prefill_worker() {
    let goodput = |policy: PolicyName| {
        let report = run(&ClusterSpec { policy, ..cluster(workers(2, 2)) }, 3000, 60.0);
        report.summary().goodput
    };
    let local = Baseline { choice: BaselineChoice::LeastLoaded, is_separated: false };
    let (ours, colocated) = (goodput(PolicyName::Baton), goodput(PolicyName::Baseline(local)));
    assert!(ours > colocated, "{ours} {colocated}");
}

/// Four routers whose reports are 100 ms old, and few long requests on small pools: a request is much of its worker.
fn run_with_balance(seed: u64, trace: &Trace) -> SimReport {
    let mut all = workers(4, 0);
    all.iter_mut().for_each(|worker| worker.num_blocks = 500);
    let spec = ClusterSpec {
        num_routers: 4,
        report_interval: SimTime::from_seconds(0.1),
        balances: true,
        seed,
        ..cluster(all)
    };
    let arrivals = Arrivals::Poisson { rate: 0.8, num_requests: 200, bursts: None }.of(trace, seed);
    simulate(&spec, trace, &arrivals, &mut |_| {})
}

/// Prompt and answer of a request of them.
fn long_request(idx: u32) -> (u32, u32) {
    (500 + idx % 7 * 100, 100 + idx * 37 % 3000)
}

#[test]
fn no_migration_for_balance_is_undone_within_ten_seconds() {
    let trace = Trace::of_lengths((0..200).map(long_request));
    let mut num_refused = 0;
    for seed in 1..4 {
        let report = run_with_balance(seed, &trace);
        assert_all_finished(&report);
        num_refused += report.num_refused_migrations;
        let moved = &report.migrations;
        println!("{} migrations, {} refused", moved.len(), report.num_refused_migrations);
        assert!(moved.len() > 10, "there is something to balance: {moved:?}");
        for (idx, first) in moved.iter().enumerate() {
            let mut soon = moved[idx..].iter().take_while(|next| (next.at - first.at).seconds() < 10.0);
            let undone = soon.find(|next| next.to == first.from || next.from == first.to);
            assert_eq!(undone, None, "seed {seed}: {first:?}");
        }
    }
    assert!(num_refused > 0, "routers do propose it");
}

#[test]
fn a_prompt_that_migrates_counts_as_neither_cached_nor_fetched() {
    // No two prompts have a common beginning.
    let line = |idx: u32| {
        let (prompt, answer) = long_request(idx);
        let ids: Vec<u32> = (0..prompt.div_ceil(512)).map(|block| 10 * idx + block).collect();
        format!(
            "{{\"timestamp\": {idx}, \"input_length\": {prompt}, \"output_length\": {answer}, \"hash_ids\": {ids:?}}}\n"
        )
    };
    let trace = Trace::parse("t", &(0..200).map(line).collect::<String>()).expect("a trace");
    let report = run_with_balance(1, &trace);
    assert_all_finished(&report);
    assert!(!report.migrations.is_empty(), "requests migrate with their KV");
    for (idx, outcome) in report.outcomes.iter().enumerate() {
        assert_eq!((outcome.num_cached_tokens, outcome.num_fetched_tokens), (0, 0), "{idx}: {outcome:?}");
    }
}

#[test]
fn a_slow_worker_gets_less() {
    let mut all = workers(2, 0);
    all[1] = WorkerSpec { slowness: 3.0, ..all[1].clone() };
    let report = run(&cluster(all), 2000, 20.0);
    let [fast, slow] = &report.workers[..] else { panic!("two workers") };
    assert!(slow.num_tokens * 3 < fast.num_tokens * 2, "{} {}", slow.num_tokens, fast.num_tokens);
}

/// Prefixes that take about as long to fetch as to compute come in part, while the rest is computed.
#[test]
fn a_slow_link_brings_the_end_of_a_prefix_while_its_beginning_is_computed() {
    // 20 texts of 16,000 tokens, each asked about at one moment by six clients, twice.
    let line = |idx: usize| {
        let ids: Vec<usize> = (0..31).map(|block| 1000 * (idx / 6) + block).chain([100_000 + idx]).collect();
        let time = 4000 * (idx / 6);
        format!(
            "{{\"timestamp\": {time}, \"input_length\": 16000, \"output_length\": 200, \"hash_ids\": {ids:?}}}\n"
        )
    };
    let trace = Trace::parse("t", &(0..240).map(line).collect::<String>()).expect("a trace");
    let of = |bytes_per_second: f64| {
        let link = LinkLine { latency_seconds: 0.001, bytes_per_second };
        let spec = ClusterSpec { link, ..cluster(workers(6, 0)) };
        let arrivals = Arrivals::AsTraced { speed: 1.0, num_copies: 1 }.of(&trace, spec.seed);
        let report = simulate(&spec, &trace, &arrivals, &mut |_| {});
        assert_all_finished(&report);
        let summary = report.summary();
        (summary.fetched, summary.ttft[0])
    };
    // A token has 4 kB of KV, and takes 30 us to compute.
    let [(some, mean), (most, least)] = [130e6, 10e9].map(of);
    assert!(some > 0.05 && most > 2.0 * some, "{some} {most}");
    // It would be 0.33 s if all that is fetched was waited for.
    assert!((least..0.31).contains(&mean), "{least} {mean}");
}
