//! An executor that samples tokens itself and computes steps ahead. A client sees the same as with any other
//! executor.

mod support;

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use baton_engine::{
    DraftCounts, Drafter, EngineConfig, EngineError, FinishReason, Request, SamplingParams, SpeculationMode,
    TokenEvent,
};
use baton_engine_testing::FakeModel;
use baton_model_spec::ExecuteError;
use support::{
    BLOCK_SIZE, MAX_STEP_TOKENS, TestEngine, collect, config, draft, engine, engine_of,
    handoff::{hand_off, hold, reserve_prefix},
    kinds::{read, requests},
    request, sampling_draft, sampling_engine, speculating,
};

fn num(counter: &AtomicUsize) -> usize {
    counter.load(Ordering::Relaxed)
}

#[tokio::test]
async fn a_client_sees_the_same_when_the_executor_samples() {
    let model = FakeModel { vocab_size: 3, ..FakeModel::new(BLOCK_SIZE) };
    let (_, plain) = engine_of(model, config(), |_| Ok(()));
    let mut expected = Vec::new();
    for request in requests() {
        let (tokens, end, _) = read(plain.generate(request).expect("accepted")).await;
        expected.push((tokens, end));
    }
    assert!(expected.iter().any(|(_, end)| *end == Ok(FinishReason::Stop)));

    for (num_blocks, max_running, token_budget) in [(256, 32, 64), (256, 16, 7), (26, 8, 16), (20, 3, 64)] {
        let errs = FakeModel { errs_in: Some(4), ..model };
        for drafter in [None, Some(Drafter::Ngram), Some(draft(errs)), Some(sampling_draft(errs).0)] {
            let config = EngineConfig { num_blocks, max_running, token_budget, ..config() };
            let (engine, _) = sampling_engine(model, drafter, config, |_| Ok(()));
            let streams: Vec<_> =
                requests().into_iter().map(|request| engine.generate(request).expect("accepted")).collect();
            for (idx, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
                let (tokens, end, _) = read(stream).await;
                let context = format!("request {idx}, {num_blocks} blocks, budget {token_budget}");
                assert_eq!((&tokens, &end), (&expected.0, &expected.1), "{context}");
            }
            engine.check_whole().await;
        }
    }
}

#[tokio::test]
async fn prefixes_are_held_and_reserved_while_a_step_is_computed() {
    let model = FakeModel::new(BLOCK_SIZE);
    let is_computed = Arc::new(AtomicBool::new(true));
    let engine = TestEngine::of(model.sampling_executor_while(is_computed.clone()));
    let turn: Vec<u32> = (0..18).collect();
    engine.generate_all(request(&turn, 4)).await;

    // Else what is waited for below may be said of this request.
    engine.load().wait_for(|load| load.num_running == 0).await.expect("the engine lives");
    is_computed.store(false, Ordering::Relaxed);
    let other: Vec<u32> = (30..39).collect();
    let running = engine.generate(request(&other, 6)).expect("accepted");
    engine.load().wait_for(|load| load.num_running == 1).await.expect("the engine lives");
    let answered = async {
        let held = hold(&engine, &request(&turn, 4)).await;
        assert_eq!(held.blocks().len(), 4);
        let prefix = request(&[7; 9], 4);
        let reservation = reserve_prefix(&engine, &prefix, 8).await.expect("there is room");
        assert_eq!((reservation.blocks().len(), reservation.num_cached_blocks()), (2, 0));
        engine.cache_prefix(reservation);
        assert_eq!(hold(&engine, &prefix).await.blocks().len(), 2);
        // This one waits for the end of the step.
        engine.generate(request(&turn, 3)).expect("accepted")
    };
    let waiting = tokio::time::timeout(Duration::from_secs(20), answered).await.expect("beside the step");
    assert_eq!(engine.load().borrow().num_running, 1);
    is_computed.store(true, Ordering::Relaxed);
    assert_eq!(collect(running).await.tokens, model.greedy(&other, 6));
    assert_eq!(collect(waiting).await.tokens, model.greedy(&turn, 3));
    engine.check_whole().await;
}

#[tokio::test]
async fn every_step_but_the_first_is_launched_ahead() {
    let model = FakeModel::new(BLOCK_SIZE);
    for max_tokens in [1, 2, 30] {
        let (engine, num_ahead) = sampling_engine(model, None, config(), |_| Ok(()));
        let output = engine.generate_all(request(&[1, 2, 3, 4, 5], max_tokens)).await;
        assert_eq!(output.tokens, model.greedy(&[1, 2, 3, 4, 5], max_tokens as usize));
        assert_eq!(num(&num_ahead), max_tokens as usize - 1, "none in vain");
        assert_eq!(engine.num_computed_tokens(), 5 + u64::from(max_tokens) - 1);
        engine.check_whole().await;
    }
}

#[tokio::test]
async fn a_draft_model_that_samples_computes_ahead_of_its_tokens() {
    let model = FakeModel::new(BLOCK_SIZE);
    let kinds = [
        SamplingParams::default(),
        SamplingParams { temperature: 1.0, ..SamplingParams::default() },
        SamplingParams { presence_penalty: 0.6, frequency_penalty: 1.5, ..SamplingParams::default() },
    ];
    for sampling in kinds {
        let (drafter, num_ahead) = sampling_draft(model);
        let (_, plain) = engine(config());
        let (engine, _) = sampling_engine(model, Some(drafter), config(), |_| Ok(()));
        let sampling = SamplingParams { max_tokens: 120, ..sampling };
        let request = Request { sampling, ..request(&[7, 8], 0) };
        let output = engine.generate_all(request.clone()).await;
        assert_eq!(output, plain.generate_all(request).await);
        let (_, counts) = engine.drafts().expect("it has a drafter");
        assert!(counts.drafted > 80 && counts.accepted == counts.drafted, "{counts:?}");
        // All but the first step of each draft.
        let num_first = counts.drafted - num(&num_ahead) as u64;
        assert!((counts.drafted / 5..counts.drafted / 3).contains(&num_first), "{num_first} of {counts:?}");
        engine.check_whole().await;
    }
}

#[tokio::test]
async fn steps_without_drafts_are_launched_ahead_with_a_drafter() {
    let model = FakeModel::new(BLOCK_SIZE);
    let wrong = || sampling_draft(FakeModel { errs_in: Some(1), ..model }).0;
    let off = Request { speculation: SpeculationMode::Off, ..request(&[1, 2, 3], 60) };
    let (engine, num_ahead) = sampling_engine(model, Some(wrong()), config(), |_| Ok(()));
    assert_eq!(engine.generate_all(off).await.tokens, model.greedy(&[1, 2, 3], 60));
    assert_eq!(num(&num_ahead), 59);

    // Drafts that do not pay are probed ever more rarely. Those steps are not launched ahead.
    let (engine, num_ahead) = sampling_engine(model, Some(wrong()), config(), |_| Ok(()));
    let output = engine.generate_all(request(&[1, 2, 3], 300)).await;
    assert_eq!(output.tokens, model.greedy(&[1, 2, 3], 300));
    let (_, counts) = engine.drafts().expect("it has a drafter");
    assert!((5..30).contains(&counts.drafted), "{counts:?}");
    assert!((250..299).contains(&num(&num_ahead)), "{} of 300 steps", num(&num_ahead));
    engine.check_whole().await;

    // As many sequences as a step with drafts may have tokens. None ends before the last one is submitted.
    let config = EngineConfig { max_running: MAX_STEP_TOKENS, num_blocks: 2048, ..config() };
    let (let_go, gate) = mpsc::channel::<()>();
    let (engine, num_ahead) = sampling_engine(model, Some(sampling_draft(model).0), config, move |_| {
        let _ = gate.recv();
        Ok(())
    });
    let streams: Vec<_> = (0..MAX_STEP_TOKENS as u32)
        .map(|idx| engine.generate(request(&[idx], 40)).expect("accepted"))
        .collect();
    drop(let_go);
    for (idx, stream) in (0..).zip(streams) {
        assert_eq!(collect(stream).await.tokens, model.greedy(&[idx], 40));
    }
    assert!(num(&num_ahead) > 0);
    engine.check_whole().await;
}

#[tokio::test]
async fn a_step_is_launched_ahead_where_lookup_finds_nothing_after_it() {
    // The vocabulary is so large that no token of the text follows the same token twice.
    let model = FakeModel { vocab_size: 512, ..FakeModel::new(BLOCK_SIZE) };
    let (engine, num_ahead) = sampling_engine(model, Some(Drafter::Ngram), config(), |_| Ok(()));
    let text = [vec![1, 2, 3], model.greedy(&[1, 2, 3], 60)].concat();
    assert_eq!(engine.generate_all(request(&text[..3], 60)).await.tokens, text[3..]);
    assert_eq!(engine.drafts(), Some(("ngram", DraftCounts::default())));
    // Occurrences of the newest known token, which the step before computes.
    let is_new = |&idx: &usize| !text[..idx].contains(&text[idx]);
    let expected = (2..text.len() - 2).filter(is_new).count();
    assert!((40..59).contains(&expected), "of 59");
    assert_eq!(num(&num_ahead), expected);
    engine.check_whole().await;

    // The vocabulary is so small that some do. Steps launched ahead between drafts lose no draft.
    let model = FakeModel { vocab_size: 10, ..model };
    let never_ahead = speculating(model, Drafter::Ngram, config());
    let (engine, num_ahead) = sampling_engine(model, Some(Drafter::Ngram), config(), |_| Ok(()));
    for (first, temperature) in (0..10).flat_map(|first| [(first, 0.0), (first, 1.0)]) {
        let sampling = SamplingParams { max_tokens: 40, temperature, ..SamplingParams::default() };
        let request = Request { sampling, ..request(&[first, 7, 8], 0) };
        let output = engine.generate_all(request.clone()).await;
        assert_eq!(output, never_ahead.generate_all(request).await);
        assert_eq!(engine.drafts(), never_ahead.drafts());
    }
    let (_, counts) = engine.drafts().expect("it has a drafter");
    assert!(0 < counts.accepted && num(&num_ahead) > 100, "{counts:?}, {num_ahead:?} ahead");
    engine.check_whole().await;
}

#[tokio::test]
async fn most_steps_are_launched_ahead_where_lookups_find_nothing() {
    const VOCAB_SIZE: u32 = 256;
    let model = FakeModel { vocab_size: VOCAB_SIZE as usize, ..FakeModel::new(BLOCK_SIZE) };
    // The prompt has all tokens, so none is new after it. But no token follows the same token twice.
    let mut texts = (0..VOCAB_SIZE).map(|first| {
        let prompt: Vec<u32> = (0..VOCAB_SIZE).map(|idx| (first + idx) % VOCAB_SIZE).collect();
        let output = model.greedy(&prompt, 100);
        (prompt, output)
    });
    let has_new_pairs = |(prompt, output): &(Vec<u32>, Vec<u32>)| {
        let text = [&prompt[..], &output[..]].concat();
        let pairs: HashSet<&[u32]> = text.windows(2).collect();
        pairs.len() == text.len() - 1
    };
    let (prompt, output) = texts.find(has_new_pairs).expect("one of them");
    let (engine, num_ahead) = sampling_engine(model, Some(Drafter::Ngram), config(), |_| Ok(()));
    assert_eq!(engine.generate_all(request(&prompt, 100)).await.tokens, output);
    assert_eq!(engine.drafts(), Some(("ngram", DraftCounts::default())));
    assert!(num(&num_ahead) > 50, "{} of 99 steps", num(&num_ahead));
    engine.check_whole().await;
}

#[tokio::test]
async fn one_step_is_computed_beyond_a_stop_and_its_blocks_return() {
    let model = FakeModel::new(BLOCK_SIZE);
    let free = model.greedy(&[7, 8], 20);
    for num_tokens in 1..12 {
        let stop = free[num_tokens - 1];
        let expected = 1 + free.iter().position(|&token| token == stop).expect("it is there");
        let (engine, num_ahead) = sampling_engine(model, None, config(), |_| Ok(()));
        let mut stopping = request(&[7, 8], 20);
        stopping.sampling.stop_token_ids = vec![stop];
        let output = engine.generate_all(stopping).await;
        assert_eq!((output.tokens, output.end), (free[..expected].to_vec(), Ok((FinishReason::Stop, 0))));
        engine.check_whole().await;
        assert_eq!(num(&num_ahead), expected, "one in vain");
    }
}

#[tokio::test]
async fn penalties_count_tokens_that_are_not_known_yet() {
    let model = FakeModel::new(BLOCK_SIZE);
    let penalised = Request {
        sampling: SamplingParams {
            max_tokens: 40,
            presence_penalty: 0.6,
            frequency_penalty: 1.5,
            repetition_penalty: 1.2,
            ..SamplingParams::default()
        },
        ..request(&[7, 8], 40)
    };
    let (_, plain) = engine(config());
    let (engine, num_ahead) = sampling_engine(model, None, config(), |_| Ok(()));
    let expected = plain.generate_all(penalised.clone()).await.tokens;
    assert_ne!(expected, model.greedy(&[7, 8], 40));
    assert_eq!(engine.generate_all(penalised).await.tokens, expected);
    assert_eq!(num(&num_ahead), 39);
}

#[tokio::test]
async fn the_first_token_is_penalised_before_it_is_known() {
    let model = FakeModel::new(BLOCK_SIZE);
    // A token of the output is likelier then.
    let sampling = SamplingParams {
        max_tokens: 3,
        presence_penalty: -2.0,
        frequency_penalty: -2.0,
        ..SamplingParams::default()
    };
    let (_, plain) = engine(config());
    let (engine, num_ahead) = sampling_engine(model, None, config(), |_| Ok(()));
    let mut num_repeated = 0;
    for first in 0..16 {
        let penalised = Request { sampling: sampling.clone(), ..request(&[first, 9], 0) };
        let expected = plain.generate_all(penalised.clone()).await.tokens;
        num_repeated += usize::from(expected[0] == expected[1]);
        assert_eq!(engine.generate_all(penalised).await.tokens, expected);
    }
    assert!(num_repeated > 0);
    assert_eq!(num(&num_ahead), 16 * 2);
}

#[tokio::test]
async fn invalid_logits_end_only_their_sequence() {
    let good = FakeModel::new(BLOCK_SIZE);
    let prompt = [3, 1, 4, 1, 5];
    let tokens = good.greedy(&prompt, 12);
    let model = FakeModel { nan_after: Some(tokens[6]), ..good };
    let first = tokens.iter().position(|&token| token == tokens[6]).expect("it is there");
    let (engine, _) = sampling_engine(model, None, config(), |_| Ok(()));
    // Another prompt, which does not reach such a token.
    let other = (0..64)
        .map(|token| vec![token, 9])
        .find(|other| !good.greedy(other, 30).contains(&tokens[6]) && !other.contains(&tokens[6]))
        .expect("there is one");
    let stream = engine.generate(request(&other, 30)).expect("accepted");
    let (found, end, _) = read(engine.generate(request(&prompt, 12)).expect("accepted")).await;
    assert_eq!(found.iter().map(|token| token.id).collect::<Vec<_>>(), tokens[..=first]);
    assert_eq!(end, Err(EngineError::InvalidLogits));
    let (found, end, _) = read(stream).await;
    assert_eq!(found.iter().map(|token| token.id).collect::<Vec<_>>(), good.greedy(&other, 30));
    assert_eq!(end, Ok(FinishReason::Length));
    engine.check_whole().await;
}

#[tokio::test]
async fn a_prompt_is_handed_off_between_executors_that_sample() {
    let model = FakeModel::new(BLOCK_SIZE);
    let (p, _) = sampling_engine(model, None, EngineConfig { token_budget: 6, ..config() }, |_| Ok(()));
    let (d, num_ahead) = sampling_engine(model, None, config(), |_| Ok(()));
    for num_prompt in [1, 4, 9, 21] {
        let prompt: Vec<u32> = (0..num_prompt).map(|idx| (idx * idx + 5) % 64).collect();
        let (output, _) = hand_off(&p, &d, request(&prompt, 10)).await;
        assert_eq!(output.tokens, model.greedy(&prompt, 10));
    }
    assert!(num(&num_ahead) > 0);
    p.check_whole().await;
    d.check_whole().await;
}

#[tokio::test]
async fn a_dropped_stream_stops_the_step_ahead() {
    let (let_go, gate) = mpsc::channel();
    let model = FakeModel::new(BLOCK_SIZE);
    let (engine, _) = sampling_engine(model, None, config(), move |_| {
        let _ = gate.recv();
        Ok(())
    });
    let mut stream = engine.generate(request(&[1, 2, 3], 100)).expect("accepted");
    for _ in 0..5 {
        let_go.send(()).expect("the engine runs");
    }
    let mut num_tokens = 0;
    while num_tokens < 5 {
        num_tokens += usize::from(matches!(stream.next().await, Some(TokenEvent::Token(_))));
    }
    drop(stream);
    drop(let_go);
    engine.check_whole().await;
}

#[tokio::test]
async fn a_failure_while_collecting_ends_the_engine() {
    let mut num_left = 4;
    let (engine, _) = sampling_engine(FakeModel::new(BLOCK_SIZE), None, config(), move |_| {
        num_left -= 1;
        let failed = ExecuteError { device: "fake".into(), message: "lost".into() };
        if num_left > 0 { Ok(()) } else { Err(failed) }
    });
    let output = engine.generate_all(request(&[1, 2, 3], 100)).await;
    let failed = EngineError::Executor { message: "fake: lost".into() };
    assert_eq!((output.tokens.len(), output.end), (3, Err(failed.clone())));
    assert_eq!(engine.stop(), Err(failed));
}
