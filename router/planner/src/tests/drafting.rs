//! Plans among workers that draft: their steps yield several tokens for each sequence.

use super::*;

fn plan(request: &PlanRequest, view: &ClusterView) -> Plan {
    PlanByTime::default().plan(&PlanRequest { explain: true, ..request.clone() }, view).expect("a plan")
}

/// What serving the request at `d0` is expected to take.
fn estimate(request: &PlanRequest, view: &ClusterView) -> Estimate {
    let plan = plan(request, view);
    let option = plan.options.iter().find(|option| option.decode.id.as_str() == "d0");
    option.expect("it is an option").estimate
}

fn assert_near(seconds: f64, expected: f64, what: &str) {
    assert!((seconds - expected).abs() < 1e-9, "{what}: {seconds}, not {expected}");
}

/// Steps of 13.3 ms, and 13.7 ms with drafts. Another router's worker is not taken for the time that it saves alone.
#[test]
fn a_worker_that_drafts_well_meets_an_slo_that_its_steps_are_longer_than() {
    let chosen = |step_yield: u32, tpot: Option<f64>, seed: u64| {
        let workers = view(&format!(
            "d0 decode rate=20000 decoding=3\n d1 decode rate=20000 yield={step_yield} decoding=3 of-another-router"
        ));
        let slo = Slo { ttft: None, tpot };
        let request = PlanRequest { slo, num_expected_tokens: 150, seed, ..request("tokens=100") };
        let plan = plan(&request, &workers);
        (plan.decode.id.to_string(), plan.estimate.expect("by time").num_broken)
    };
    for seed in 0..8 {
        assert_eq!(chosen(3, None, seed), ("d0".to_owned(), 0));
        assert_eq!(chosen(3, Some(0.02), seed), ("d0".to_owned(), 0), "both meet it");
        assert_eq!(chosen(3, Some(0.012), seed), ("d1".to_owned(), 0));
        assert_eq!(chosen(1, Some(0.012), seed), ("d0".to_owned(), 1), "neither does");
    }
}

#[test]
fn tokens_of_a_sequence_take_as_many_steps_as_yield_them() {
    let request = request("tokens=500 local");
    for step_yield in [1.0, 4.0] {
        let workers =
            view(&format!("d0 decode rate=20000 yield={step_yield} decoding=8 queued=200000 max-running=64"));
        let estimate = estimate(&request, &workers);
        let num_steps = 128.0 / step_yield;
        let step = |num_sequences: f64, num_context_tokens: f64| {
            0.01 + step_yield * num_sequences * 5e-5 + num_context_tokens * (1e-6 + step_yield * 1e-9)
        };
        // It waits for the 99 chunks of the queue: steps with one have no drafts.
        assert_near(estimate.decode, num_steps * step(9.0, 8500.0) + 10.0, "decode");
        assert_near(estimate.tpot, estimate.decode / 128.0, "tpot");
        // The prompt is one chunk. Others are in the middle of their output.
        let prompt = 500.0 * 5e-5 + 125_250.0 * 1e-9;
        let growth = step(9.0, 8500.0) - step(8.0, 8000.0);
        assert_near(estimate.harm, 8.0 * (prompt + num_steps / 2.0 * growth), "harm");
    }
}

/// Computing takes longer than they have left to decode.
#[test]
fn what_sequences_on_the_same_processors_have_left_is_shorter_with_drafts() {
    for step_yield in [1.0, 4.0] {
        let workers = view(&format!(
            "d0 decode rate=2000 on=m:0\n d1 decode rate=2000 yield={step_yield} decoding=1 on=m:0"
        ));
        let step = 0.01 + step_yield * 5e-4 + 1000.0 * (1e-6 + step_yield * 1e-9);
        assert_near(estimate(&request("tokens=900 local"), &workers).harm, 64.0 / step_yield * step, "harm");
    }
}
