//! Whether this worker blends a prompt: the [`Gate`] decides, and what it needs to know is measured here.
//!
//! The gate opens by calibration: prompts are made of passages that the worker has met, and computed in full and with each
//! ratio of a table, selected by the keys of one layer. The smallest ratio whose answers begin with nearly the distributions of
//! those of the full prefills is the worker's; where none is, the next layer is tried. Made-up tokens would say little: how much
//! one passage depends on another is a property of the text. After that a part of the traffic is audited: computed once more in
//! full, and compared. All of this is ordinary work of the engine that every request passes.
//!
//! It does not know how prompts are blended.

mod gate;
pub(crate) mod state;

use std::{sync::Arc, time::Duration};

use baton_engine::{SampledToken, TokenEvent};
use baton_request::{BlendMarks, BlendPoint, MAX_LOGPROBS, Request, SamplingParams, SpeculationMode};
use tokio::time::timeout;

use crate::worker::Worker;
use gate::{AuditedPoint, Decision, Measure, RATIOS};

/// A calibration prompt has at most so many passages, each of at most so many tokens, and so many tokens after them. So it takes
/// seconds even where a step takes a second.
const MAX_PASSAGES: usize = 4;
const MAX_PASSAGE_TOKENS: usize = 64;
const MAX_QUESTION_TOKENS: usize = 32;
/// Tokens of an answer that are compared. The first alone says little: an answer often begins as its question asks, and what
/// the passages say comes after that.
const NUM_COMPARED: usize = 8;
/// Prompts that are made of one that was met.
const MAX_PROMPTS_OF_ONE: usize = 4;
/// For one computation beside the traffic. An engine that has no time for it that long has more to do than to be measured.
const PATIENCE: Duration = Duration::from_mins(2);

/// Decides whether this worker, which computes the prompt, blends it: if not, the request loses its marks. Then it is computed in
/// full, and shares blocks with all that are.
pub fn decide(worker: &Arc<Worker>, request: &mut Request) {
    let Some(marks) = request.blend.as_ref().filter(|marks| !marks.passages.is_empty()) else {
        request.blend = None;
        return;
    };
    let fits = worker.engine.can_blend(marks);
    let Decision { refused, measure } = worker.blending.decide(marks.point(), fits);
    let own = worker.clone();
    match measure {
        Some(Measure::Calibrate(layer)) => {
            let prompts = calibration_prompts(request);
            worker.lifecycle.spawn(async move { calibrate(&own, prompts, layer).await });
        }
        Some(Measure::Audit(point)) => {
            let request = request.clone();
            worker.lifecycle.spawn(async move { audit(&own, request, point).await });
        }
        None => {}
    }
    if let Some(reason) = refused {
        worker.metrics.blend_refused(reason);
        request.blend = None;
    }
}

/// Measures what each ratio costs on prompts where the keys of `layer` decide, and tells the gate.
async fn calibrate(worker: &Arc<Worker>, prompts: Vec<Request>, layer: u32) {
    let mut samples = Vec::new();
    for prompt in prompts {
        match sample(worker, &prompt, layer).await {
            Some(sample) => samples.push(sample),
            None => break,
        }
    }
    let num = samples.len();
    let Some(mut gate) = worker.blending.gate() else { return };
    gate.calibrated(samples);
    match (gate.point(), gate.closed()) {
        (Some(BlendPoint { layer, ratio }), _) => {
            tracing::info!(layer, %ratio, "prompts with passages are blended from now on");
        }
        (None, Some(reason)) => tracing::warn!(reason, "prompts with passages are computed in full"),
        (None, None) => tracing::debug!(layer, num, "blending is not calibrated yet"),
    }
}

/// The divergence of a prompt's answer at each ratio. `None`: the engine has no time or no room for it, or ends.
async fn sample(worker: &Worker, prompt: &Request, layer: u32) -> Option<[f64; RATIOS.len()]> {
    // What is not blended here differs in nothing, whatever the ratio.
    prompt.blend.as_ref().filter(|marks| worker.engine.can_blend(marks))?;
    let full = answer(worker, Request { blend: None, ..prompt.clone() }).await?;
    let mut sample = [0.0; RATIOS.len()];
    for (kl, ratio) in sample.iter_mut().zip(RATIOS) {
        let blended = with_point(prompt, BlendPoint { layer, ratio });
        *kl = divergence(&full, &answer(worker, blended).await?);
    }
    Some(sample)
}

/// Computes a blended prompt in full, and compares.
async fn audit(worker: &Arc<Worker>, request: Request, point: AuditedPoint) {
    let full = answer(worker, Request { blend: None, ..request.clone() }).await;
    let blended = answer(worker, request).await;
    let kl = full.zip(blended).map(|(full, blended)| divergence(&full, &blended));
    if let Some(kl) = kl {
        worker.metrics.blend_audited(point.label(), kl);
    }
    let Some(mut gate) = worker.blending.gate() else { return };
    let was_open = gate.closed().is_none();
    gate.audited(point, kl);
    if let Some(reason) = gate.closed().filter(|_| was_open) {
        tracing::error!(
            reason,
            "blended prompts differ too much from full prefills: prompts with passages are computed in full from now on"
        );
    }
}

/// The mean divergence of a blended answer's tokens from those of a full prefill, in nats: up to the first token that differs, as
/// the tokens behind it follow another text.
fn divergence(full: &[SampledToken], blended: &[SampledToken]) -> f64 {
    let both = || full.iter().zip(blended);
    let num_equal = both().take_while(|(full, blended)| full.id == blended.id).count();
    let compared = both().take(num_equal + 1);
    let kls = compared
        .filter_map(|(full, blended)| Some(full.logprobs.as_ref()?.divergence(blended.logprobs.as_ref()?)));
    let (sum, num) = kls.fold((0.0, 0.0), |(sum, num), kl| (sum + kl, num + 1.0));
    sum / num
}

/// The first tokens of a request's greedy answer, at least one.
async fn answer(worker: &Worker, request: Request) -> Option<Vec<SampledToken>> {
    let max_tokens = (request.output.len() + NUM_COMPARED) as u32;
    let request = Request {
        id: format!("{}-measured", request.id),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens,
            stop_token_ids: request.sampling.stop_token_ids.clone(),
            logprobs: Some(MAX_LOGPROBS),
            ..SamplingParams::default()
        },
        // Everything else is more urgent.
        priority: i32::MAX,
        speculation: SpeculationMode::Off,
        ..request
    };
    let mut tokens = worker.engine.generate(request).ok()?;
    let all = async {
        let mut answer = Vec::new();
        loop {
            match tokens.next().await? {
                TokenEvent::Token(token) => answer.push(token),
                TokenEvent::Finished(_) => return Some(answer),
                TokenEvent::Failed(_) => return None,
                TokenEvent::Started { .. }
                | TokenEvent::Adopted { .. }
                | TokenEvent::Blended { .. }
                | TokenEvent::Scored { .. }
                | TokenEvent::Verified(_) => {}
            }
        }
    };
    // A worker that leaves does not wait for it.
    let drain = worker.lifecycle.drain_signal();
    let answer = drain.run_until_cancelled(timeout(PATIENCE, all)).await?.ok().flatten()?;
    (!answer.is_empty()).then_some(answer)
}

fn with_point(prompt: &Request, BlendPoint { layer, ratio }: BlendPoint) -> Request {
    let passages = prompt.blend.as_ref().map(|marks| marks.passages.clone()).unwrap_or_default();
    Request { blend: Some(BlendMarks { passages, layer, ratio: Some(ratio) }), ..prompt.clone() }
}

/// Short prompts of a request's passages, in several orders, before the end of its prompt.
fn calibration_prompts(request: &Request) -> Vec<Request> {
    let Some(marks) = &request.blend else { return Vec::new() };
    let question = &request.prompt[marks.end_idx()..];
    let question = &question[question.len().saturating_sub(MAX_QUESTION_TOKENS)..];
    let num = marks.passages.len();
    let of_order = |first: usize| {
        let mut tokens = Vec::new();
        let mut passages = Vec::new();
        for idx in (0..num.min(MAX_PASSAGES)).map(|idx| (first + idx) % num) {
            let passage = &request.prompt[marks.passages[idx].clone()];
            let start = tokens.len();
            tokens.extend_from_slice(&passage[..passage.len().min(MAX_PASSAGE_TOKENS)]);
            passages.push(start..tokens.len());
        }
        tokens.extend_from_slice(question);
        Request {
            prompt: tokens.into(),
            output: Vec::new(),
            blend: Some(BlendMarks { passages, ..BlendMarks::default() }),
            ..request.clone()
        }
    };
    (0..num.min(MAX_PROMPTS_OF_ONE)).map(of_order).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::TokenLogprobs;

    #[test]
    fn answers_are_compared_up_to_the_first_token_that_differs() {
        let token = |id, part: f32| {
            let top = vec![(1, part.ln()), (2, (1.0 - part).ln())];
            SampledToken { id, logprobs: Some(TokenLogprobs { logprob: 0.0, top }) }
        };
        let kl = |p: f64, q: f64| p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln();
        let full = [token(1, 0.5), token(1, 0.9), token(1, 0.75)];
        for (blended, expected) in [
            (full.to_vec(), 0.0),
            (vec![token(1, 0.5), token(2, 0.1), token(1, 0.25)], kl(0.9, 0.1) / 2.0),
            (vec![token(1, 0.5), token(1, 0.9), token(2, 0.25)], kl(0.75, 0.25) / 3.0),
            (vec![token(1, 0.25)], kl(0.5, 0.25)),
        ] {
            let found = divergence(&full, &blended);
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn calibration_prompts_are_short_and_have_the_passages_in_several_orders() {
        let passages = vec![2..102, 102..110, 115..120, 120..130, 130..131];
        let request = Request {
            prompt: (0..200).collect(),
            output: vec![7],
            blend: Some(BlendMarks { passages, ..BlendMarks::default() }),
            ..Request::default()
        };
        let prompts = calibration_prompts(&request);
        assert_eq!(prompts.len(), 4);
        for prompt in &prompts {
            prompt.validate(200, 1000).expect("a good request");
            assert_eq!(prompt.prompt[prompt.prompt.len() - 32..], (168..200).collect::<Vec<u32>>());
        }
        let bounds = |prompt: &Request| prompt.blend.clone().expect("it has passages").passages;
        assert_eq!(bounds(&prompts[0]), [0..64, 64..72, 72..77, 77..87]);
        assert_eq!(bounds(&prompts[3]), [0..10, 10..11, 11..75, 75..83]);
        assert_eq!((prompts[3].prompt[0], prompts[3].prompt[11]), (120, 2));
    }
}
