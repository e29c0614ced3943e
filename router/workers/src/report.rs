//! What a load report says, in the planner's words. Numbers that cannot be true are left out.

use std::time::Instant;

use baton_cost::{LinkLine, StepLine, StepYield};
use baton_planner::{Load, StorePace, WorkerPace};
use baton_proto::v1;
use baton_request::BlendPoint;

use super::{
    segments,
    watch::{self, Report},
};

/// What plans use of a report.
pub(super) fn load(report: &Report, now: Instant) -> Load {
    let load = &report.load;
    Load {
        age: now.saturating_duration_since(report.at),
        num_waiting: load.num_waiting as usize,
        num_running: load.num_running as usize,
        num_free_blocks: load.num_free_blocks as usize,
        num_total_blocks: load.num_total_blocks as usize,
        num_queued_tokens: load.num_queued_tokens,
        num_queued_blocks: load.num_queued_blocks as usize,
        prefill_tokens_per_second: load.prefill_tokens_per_second,
        pace: pace(load),
        blends: load.blend_ratio.is_some(),
        link_within: link(load, |transport| transport == "shm"),
        link_beyond: link(load, |transport| transport != "shm"),
        is_home_of_another: load.is_home_of_another,
        recall_token_seconds: watch::of_tiers(load, |tier| seconds(tier.recall_token_seconds)),
        store_pace: store_pace(load),
    }
}

/// How the worker blends, as it has calibrated it; `None` if it has not, or if that cannot be true. An older worker names no layer.
pub(super) fn blend_point(load: &v1::Load) -> Option<BlendPoint> {
    BlendPoint { layer: load.blend_layer.max(1), ratio: load.blend_ratio? }.checked()
}

/// `None` for an older worker, and for one whose numbers cannot be true.
fn pace(load: &v1::Load) -> Option<WorkerPace> {
    let v1::StepLine { fixed, per_token, per_context_token, per_pair, num_steps } = load.step?;
    Some(WorkerPace {
        step: StepLine { fixed, per_token, per_context_token, per_pair }.checked()?,
        is_measured: num_steps > 0,
        num_decoding: load.num_decoding as usize,
        num_context_tokens: load.num_context_tokens,
        num_queued_pairs: load.num_queued_pairs,
        recent_itl: seconds(load.recent_itl_seconds),
        step_yield: step_yield(load).unwrap_or_default(),
        max_step_tokens: load.max_step_tokens as usize,
        itl_target: seconds(load.itl_target_seconds),
    })
}

/// `None` if it cannot be true. An older worker says 0.
fn step_yield(load: &v1::Load) -> Option<StepYield> {
    match load.recent_tokens_per_step == 0.0 {
        true => Some(StepYield::default()),
        false => StepYield::checked(load.recent_tokens_per_step),
    }
}

/// `None` while it is not measured: no request waits for it.
fn store_pace(load: &v1::Load) -> Option<StorePace> {
    let tier = segments::object_tier(load)?;
    let token_seconds = seconds(tier.recall_token_seconds);
    let pace = StorePace { latency_seconds: seconds(tier.recall_latency_seconds), token_seconds };
    (token_seconds > 0.0).then_some(pace)
}

/// What of a report cannot be true, if anything. It is not planned with.
pub(super) fn absurdity(load: &v1::Load) -> Option<String> {
    if load.step.is_some() && pace(load).is_none() {
        return Some(format!("{:?}", load.step));
    }
    let times =
        [("recent_itl_seconds", load.recent_itl_seconds), ("itl_target_seconds", load.itl_target_seconds)];
    let of_tiers = load.tiers.iter().flat_map(|tier| {
        [
            ("recall_token_seconds", tier.recall_token_seconds),
            ("recall_latency_seconds", tier.recall_latency_seconds),
        ]
    });
    if let Some((name, seconds)) = times.into_iter().chain(of_tiers).find(|&(_, seconds)| !is_time(seconds)) {
        return Some(format!("{name} is {seconds}"));
    }
    if step_yield(load).is_none() {
        return Some(format!("recent_tokens_per_step is {}", load.recent_tokens_per_step));
    }
    load.links.iter().find(|rate| link_line(rate).is_none()).map(|rate| format!("{rate:?}"))
}

fn is_time(seconds: f64) -> bool {
    seconds.is_finite() && seconds >= 0.0
}

/// 0 for what is no time.
fn seconds(seconds: f64) -> f64 {
    if is_time(seconds) { seconds } else { 0.0 }
}

fn link_line(rate: &v1::LinkRate) -> Option<LinkLine> {
    let v1::LinkRate { latency_seconds, bytes_per_second, .. } = *rate;
    LinkLine { latency_seconds, bytes_per_second }.checked()
}

/// The link used last of those that carry KV that far.
fn link(load: &v1::Load, reaches: impl Fn(&str) -> bool) -> Option<LinkLine> {
    load.links.iter().find(|link| reaches(&link.transport)).and_then(link_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_per_step_that_cannot_be_true_are_told_and_count_as_one() {
        for (said, num_tokens, is_absurd) in [
            (0.0, 1.0, false),
            (1.0, 1.0, false),
            (3.5, 3.5, false),
            (0.5, 1.0, true),
            (-3.0, 1.0, true),
            (1e300, 1.0, true),
            (f64::NAN, 1.0, true),
            (f64::INFINITY, 1.0, true),
        ] {
            let step = v1::StepLine { fixed: 0.01, ..v1::StepLine::default() };
            let load = v1::Load { step: Some(step), recent_tokens_per_step: said, ..v1::Load::default() };
            let pace = pace(&load).expect("its line can be true");
            assert_eq!(pace.step_yield.num_tokens(), num_tokens, "{said}");
            let expected = is_absurd.then(|| format!("recent_tokens_per_step is {said}"));
            assert_eq!(absurdity(&load), expected);
        }
    }
}
