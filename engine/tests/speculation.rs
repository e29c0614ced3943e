//! Speculative decoding: tokens, log-probabilities and ends are the same as without it, for any draft.

mod support;

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
    mpsc,
};
use std::time::Duration;

use baton_engine::{
    DraftCounts, Drafter, EngineConfig, EngineError, EngineStartError, FinishReason, Request, Speculation,
    SpeculationMode, TokenEvent,
};
use baton_engine_testing::FakeModel;
use baton_model_spec::ExecuteError;
use support::{
    BLOCK_SIZE, MAX_STEP_TOKENS, collect, config, draft, draft_with_hook, engine, engine_of,
    handoff::hand_off,
    kinds::{prompt, read, requests},
    request, sampling_draft, speculating, speculating_with_hook, standing_clock,
};

/// A vocabulary so small that texts repeat themselves.
fn model() -> FakeModel {
    FakeModel { vocab_size: 3, ..FakeModel::new(BLOCK_SIZE) }
}

/// Right, mostly right, mostly wrong, always wrong, or by lookup.
fn drafters() -> Vec<(&'static str, Drafter)> {
    let errs_in = |num_texts| draft(FakeModel { errs_in: Some(num_texts), ..model() });
    vec![
        ("right", draft(model())),
        ("wrong in 8", errs_in(8)),
        ("wrong in 2", errs_in(2)),
        ("wrong", errs_in(1)),
        ("sampling on the device", sampling_draft(FakeModel { errs_in: Some(8), ..model() }).0),
        ("ngram", Drafter::Ngram),
    ]
}

#[tokio::test]
async fn a_client_sees_the_same_with_drafts() {
    let (_, plain) = engine_of(model(), config(), |_| Ok(()));
    let mut expected = Vec::new();
    for request in requests() {
        let (tokens, end, _) = read(plain.generate(request).expect("accepted")).await;
        expected.push((tokens, end));
    }
    assert!(expected.iter().any(|(_, end)| *end == Ok(FinishReason::Stop)));

    // Room for all, prompts in chunks, and pools so small that every sequence is preempted repeatedly.
    let sizes = [(256, 16, 64), (256, 16, 7), (26, 8, 16), (26, 8, 5), (20, 3, 64)];
    for (num_blocks, max_running, token_budget) in sizes {
        for prefix_cache in [true, false] {
            for (name, drafter) in drafters() {
                let config = EngineConfig { num_blocks, max_running, token_budget, prefix_cache, ..config() };
                let engine = speculating(model(), drafter, config);
                let streams: Vec<_> = requests()
                    .into_iter()
                    .map(|request| engine.generate(request).expect("accepted"))
                    .collect();
                let mut sum = DraftCounts::default();
                for (idx, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
                    let (tokens, end, counts) = read(stream).await;
                    let context =
                        format!("request {idx}, {name}, {num_blocks} blocks, budget {token_budget}");
                    assert_eq!((&tokens, &end), (&expected.0, &expected.1), "{context}");
                    sum.drafted += counts.drafted;
                    sum.accepted += counts.accepted;
                }
                engine.check_whole().await;
                let (drafter, counts) = engine.drafts().expect("it has a drafter");
                assert_eq!(drafter, if name == "ngram" { name } else { "draft" });
                let forced = engine.forced_drafts();
                let (drafted, accepted) =
                    (counts.drafted + forced.drafted, counts.accepted + forced.accepted);
                assert_eq!(DraftCounts { drafted, accepted }, sum);
                assert!(sum.drafted > 0, "{name} drafts");
                match name {
                    "right" => assert_eq!(sum.accepted, sum.drafted, "{num_blocks} blocks"),
                    "wrong" => assert!(sum.accepted < sum.drafted / 2),
                    _ => assert!(0 < sum.accepted && sum.accepted < sum.drafted),
                }
            }
        }
    }
}

#[tokio::test]
async fn a_draft_model_recovers_from_a_wrong_draft() {
    // It is wrong after some texts and right after all others, independent of earlier rejections.
    let model = FakeModel::new(BLOCK_SIZE);
    let errs = FakeModel { errs_in: Some(6), ..model };
    for token_budget in [64, 16] {
        let engine = speculating(model, draft(errs), EngineConfig { token_budget, ..config() });
        let mut text: Vec<u32> = (0..11).collect();
        let mut stream = engine.generate(request(&text, 200)).expect("accepted");
        let (mut num_rejected, mut others) = (0, Vec::new());
        while let Some(event) = stream.next().await {
            match event {
                TokenEvent::Verified(DraftCounts { drafted, accepted }) => {
                    for idx in 0..drafted.min(accepted + 1) {
                        let follower = model.greedy(&text, idx as usize + 1);
                        let (token, before) = follower.split_last().expect("at least one");
                        let drafted_token = errs.greedy(&[&text[..], before].concat(), 1)[0];
                        assert_eq!(drafted_token == *token, idx < accepted, "after {} tokens", text.len());
                    }
                    if accepted < drafted {
                        num_rejected += 1;
                        // A prompt that fills a step: there is no draft in it.
                        let prompt: Vec<u32> =
                            (0..MAX_STEP_TOKENS as u32 + 20).map(|idx| (idx + num_rejected) % 64).collect();
                        others.push(engine.generate(request(&prompt, 1)).expect("accepted"));
                    }
                }
                TokenEvent::Token(token) => text.push(token.id),
                TokenEvent::Started { .. }
                | TokenEvent::Adopted { .. }
                | TokenEvent::Blended { .. }
                | TokenEvent::Scored { .. }
                | TokenEvent::Finished(_) => {}
                TokenEvent::Failed(error) => panic!("{error}"),
            }
        }
        assert_eq!(text.len(), 211);
        assert!(num_rejected > 10, "{num_rejected}");
    }
}

/// Counts the steps of an executor, or the tokens that it computes.
fn counter() -> (Arc<AtomicUsize>, Arc<AtomicUsize>) {
    let counter = Arc::new(AtomicUsize::new(0));
    (counter.clone(), counter)
}

#[tokio::test]
async fn a_right_draft_saves_steps() {
    for temperature in [0.0, 1.0] {
        let (num_steps, count) = counter();
        let model = FakeModel::new(BLOCK_SIZE);
        let engine = speculating_with_hook(model, draft(model), config(), move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        let mut request = request(&[1, 2, 3, 4, 5], 120);
        request.sampling.temperature = temperature;
        let (tokens, end, counts) = read(engine.generate(request).expect("accepted")).await;
        assert_eq!((tokens.len(), end), (120, Ok(FinishReason::Length)));
        assert_eq!(counts.accepted, counts.drafted);
        // Five drafted tokens and one more per step, once the length has grown.
        let num_steps = num_steps.load(Ordering::Relaxed);
        assert!((20..30).contains(&num_steps), "{num_steps} steps");
        assert_eq!(num_steps as u64 + counts.accepted, 120);
    }
}

#[tokio::test]
async fn a_text_that_repeats_itself_is_looked_up() {
    let engine = speculating(model(), Drafter::Ngram, config());
    let mut only_one = request(&[0, 1, 0, 1], 60);
    only_one.sampling.logit_bias = vec![(2, 100.0)];
    let (tokens, _, counts) = read(engine.generate(only_one).expect("accepted")).await;
    assert!(tokens.iter().all(|token| token.id == 2));
    assert!(counts.accepted > 40, "{counts:?}");
}

#[tokio::test]
async fn a_request_without_speculation_has_no_drafts() {
    let engine = speculating(model(), draft_with_hook(model(), |_| panic!("it drafts")), config());
    let off = Request { speculation: SpeculationMode::Off, ..request(&prompt(1, 9), 30) };
    let (tokens, _, counts) = read(engine.generate(off).expect("accepted")).await;
    assert_eq!((tokens.len(), counts), (30, DraftCounts::default()));
    assert_eq!(engine.drafts(), Some(("draft", DraftCounts::default())));
}

#[tokio::test]
async fn a_draft_model_whose_logits_are_not_finite_is_asked_ever_more_rarely() {
    let (num_steps, count) = counter();
    // Each token is 0, after which the draft model has no logits.
    let model = FakeModel { vocab_size: 1, ..model() };
    let drafter = draft_with_hook(FakeModel { nan_after: Some(0), ..model }, move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    let engine = speculating(model, drafter, config());
    let (tokens, end, counts) = read(engine.generate(request(&[0, 0, 0], 200)).expect("accepted")).await;
    assert_eq!((tokens.len(), end, counts.drafted), (200, Ok(FinishReason::Length), 0));
    let num_steps = num_steps.load(Ordering::Relaxed);
    assert!((5..30).contains(&num_steps), "{num_steps} of 200");
    engine.check_whole().await;
}

#[tokio::test]
async fn the_draft_model_computes_a_remote_prompt_in_chunks() {
    let (model, p) = engine(config());
    for token_budget in [64, 7] {
        let (num_tokens, count) = counter();
        let drafter = draft_with_hook(model, move |batch| {
            let num: usize = batch.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
            assert!(num <= token_budget, "{num} tokens in one step");
            count.fetch_add(num, Ordering::Relaxed);
            Ok(())
        });
        let d = speculating(model, drafter, EngineConfig { token_budget, ..config() });
        let prompt: Vec<u32> = (0..50).map(|idx| idx * 7 % 64).collect();
        let (output, _) = hand_off(&p, &d, request(&prompt, 90)).await;
        assert_eq!(output.tokens, model.greedy(&prompt, 90));
        let (_, counts) = d.drafts().expect("it has a drafter");
        assert!(counts.drafted > 50 && counts.accepted == counts.drafted, "{counts:?}");
        let computed = num_tokens.swap(0, Ordering::Relaxed);
        assert!(computed >= 50 + counts.drafted as usize, "{computed}");

        // Neither model computes a prompt that both have cached.
        let (output, _) = hand_off(&p, &d, request(&prompt, 10)).await;
        assert_eq!(output.tokens, model.greedy(&prompt, 10));
        let again = num_tokens.load(Ordering::Relaxed);
        assert!(0 < again && again < 20, "{again} of the prompt's 50 tokens and 10 more");
        d.check_whole().await;
    }
    p.check_whole().await;
}

#[tokio::test]
async fn a_long_prompt_in_the_draft_model_does_not_keep_others_from_drafting() {
    // The draft model computes the long prompt with the rest of 8 tokens per step. The other sequence still drafts.
    let (model, p) = engine(EngineConfig { token_budget: 256, ..config() });
    let d = speculating(model, draft(model), EngineConfig { token_budget: 8, ..config() });
    let long: Vec<u32> = (0..300).map(|idx| idx * 11 % 64).collect();
    let short = d.generate(request(&[1, 2, 3], 100)).expect("accepted");
    let (output, _) = hand_off(&p, &d, request(&long, 20)).await;
    assert_eq!(output.tokens, model.greedy(&long, 20));
    let (tokens, _, counts) = read(short).await;
    let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
    assert_eq!(ids, model.greedy(&[1, 2, 3], 100));
    assert!(counts.accepted > 0);
}

/// Microseconds that executors add to a fake clock.
static ELAPSED: AtomicU64 = AtomicU64::new(0);

#[tokio::test]
async fn drafting_ends_when_it_is_measured_to_cost_more_than_it_gains() {
    let clock = || standing_clock() + Duration::from_micros(ELAPSED.load(Ordering::Relaxed));
    let model = FakeModel::new(BLOCK_SIZE);
    // Microseconds that the first step takes longer, those of a step of either model, in how many texts the draft model
    // errs once, and drafted tokens out of 300.
    for (cold, target, draft, errs_in, expected) in [
        (0, 1000, 50, None, 200..300),
        (0, 1000, 1100, None, 1..100),
        (0, 1000, 50_000, None, 1..100),
        (200_000, 1000, 50, None, 200..300),
        (200_000, 1000, 900, Some(2), 1..100),
    ] {
        let (num_steps, count) = counter();
        let drafter = draft_with_hook(FakeModel { errs_in, ..model }, move |_| {
            ELAPSED.fetch_add(draft, Ordering::Relaxed);
            Ok(())
        });
        let config = EngineConfig { clock, ..config() };
        let engine = speculating_with_hook(model, drafter, config, move |_| {
            let is_first = count.fetch_add(1, Ordering::Relaxed) == 0;
            ELAPSED.fetch_add(if is_first { target + cold } else { target }, Ordering::Relaxed);
            Ok(())
        });
        let output = engine.generate_all(request(&[1, 2, 3], 300)).await;
        assert_eq!(output.tokens, model.greedy(&[1, 2, 3], 300));
        let (_, counts) = engine.drafts().expect("it has a drafter");
        assert!(
            expected.contains(&counts.drafted),
            "{counts:?} at {draft} of {target}, {cold} more at first"
        );
        engine.check_whole().await;
        let num_steps = num_steps.load(Ordering::Relaxed);
        assert_eq!(engine.pace().num_steps, num_steps as u64, "routers learn from steps with drafts, too");
    }
}

#[tokio::test]
async fn a_step_without_drafts_comes_after_many_with_drafts() {
    let model = FakeModel::new(BLOCK_SIZE);
    let (longest, most) = counter();
    let mut num_drafted = 0;
    let engine = speculating_with_hook(model, draft(model), config(), move |batch| {
        num_drafted = if batch.sequences[0].num_logits > 1 { num_drafted + 1 } else { 0 };
        most.fetch_max(num_drafted, Ordering::Relaxed);
        Ok(())
    });
    // At least 75 steps.
    let output = engine.generate_all(request(&[1, 2, 3], 450)).await;
    assert_eq!(output.tokens, model.greedy(&[1, 2, 3], 450));
    assert_eq!(longest.load(Ordering::Relaxed), 64);
}

#[tokio::test]
async fn a_large_step_has_no_drafts() {
    // As many sequences as a step with drafts may have tokens: when all decode there are no drafts.
    let model = FakeModel::new(BLOCK_SIZE);
    let config = EngineConfig { max_running: MAX_STEP_TOKENS, num_blocks: 2048, ..config() };
    let engine = speculating_with_hook(model, draft(model), config, |batch| {
        let num_tokens: usize = batch.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let is_drafted = batch.sequences.iter().any(|sequence| sequence.num_logits > 1);
        assert!(!is_drafted || num_tokens <= MAX_STEP_TOKENS, "{num_tokens} tokens with drafts");
        Ok(())
    });
    let count = MAX_STEP_TOKENS as u32;
    let streams: Vec<_> =
        (0..count).map(|idx| engine.generate(request(&[idx], 40 + idx)).expect("accepted")).collect();
    for (idx, stream) in (0..).zip(streams) {
        assert_eq!(collect(stream).await.tokens, model.greedy(&[idx], 40 + idx as usize));
    }
    let (_, counts) = engine.drafts().expect("it has a drafter");
    assert!(counts.drafted > 0, "when most have ended, the others are drafted for");
}

#[tokio::test]
async fn invalid_logits_after_a_draft_fail_the_request_at_the_same_token() {
    let model = FakeModel { nan_after: Some(13), ..FakeModel::new(BLOCK_SIZE) };
    let (_, plain) = engine_of(model, config(), |_| Ok(()));
    // The draft model does not fail there, so it drafts past the token.
    let engine = speculating(model, draft(FakeModel::new(BLOCK_SIZE)), config());
    let mut num_failed = 0;
    for first in 0..12 {
        let request = request(&[first, 40], 60);
        let (expected_tokens, expected_end, _) =
            read(plain.generate(request.clone()).expect("accepted")).await;
        let (tokens, end, _) = read(engine.generate(request).expect("accepted")).await;
        assert_eq!((tokens, &end), (expected_tokens, &expected_end));
        num_failed += usize::from(end == Err(EngineError::InvalidLogits));
    }
    assert!(num_failed > 3, "{num_failed}");
    engine.check_whole().await;
}

#[tokio::test]
async fn dropped_streams_return_their_blocks() {
    let model = FakeModel::new(BLOCK_SIZE);
    let engine = speculating(model, draft(model), EngineConfig { max_running: 3, ..config() });
    let mut streams: Vec<_> =
        (0..6).map(|idx| engine.generate(request(&[idx, 2, 3], 400)).expect("accepted")).collect();
    for _ in 0..20 {
        streams[0].next().await.expect("it runs");
    }
    drop(streams);
    engine.check_whole().await;
    assert_eq!(engine.generate_all(request(&[9, 9], 30)).await.tokens, model.greedy(&[9, 9], 30));
    engine.check_whole().await;
}

#[tokio::test]
async fn a_draft_model_that_fails_ends_the_engine_like_any_device() {
    let model = FakeModel::new(BLOCK_SIZE);
    let (permit, permits) = mpsc::channel::<()>();
    let drafter = draft_with_hook(model, move |_| {
        permits.recv().ok();
        Err(ExecuteError { device: "fake".into(), message: "on fire".into() })
    });
    let engine = speculating(model, drafter, config());
    let stream = engine.generate(request(&[1], 9)).expect("accepted");
    drop(permit);
    let error = EngineError::Executor { message: "fake: on fire".into() };
    assert_eq!(collect(stream).await.end, Err(error.clone()));
    assert_eq!(engine.stop(), Err(error));
}

#[test]
fn a_draft_model_with_another_vocabulary_is_refused() {
    let other = FakeModel { vocab_size: 65, ..FakeModel::new(BLOCK_SIZE) };
    let speculation = Speculation { drafter: draft(other), max_draft_tokens: 5 };
    let error = baton_engine::start(FakeModel::new(BLOCK_SIZE).executor(), Some(speculation), config())
        .expect_err("refused");
    assert!(matches!(error, EngineStartError::Vocabulary { draft: 65, target: 64 }), "{error}");
}
