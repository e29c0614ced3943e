//! What a client of one engine sees: tokens, limits, sharing, cancellation, failure.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use baton_engine::{
    EngineConfig, EngineError, EngineStartError, FinishReason, InvalidRequest, Problem, Request,
    SamplingParams, SubmitError, TokenEvent,
};
use baton_engine_testing::FakeModel;
use baton_kv_events::{BlockHolder, BlockKey, CacheEvent};
use baton_model_spec::ExecuteError;
use support::{BLOCK_SIZE, Output, collect, config, engine, engine_of, engine_with_hook, request};

fn prompt(first: u32, num_tokens: u32) -> Vec<u32> {
    (first..first + num_tokens).map(|token| token * 7 % 64).collect()
}

fn length(tokens: Vec<u32>, cached_tokens: usize) -> Output {
    Output { tokens, end: Ok((FinishReason::Length, cached_tokens)) }
}

#[tokio::test]
async fn greedy_tokens_are_those_of_the_model() {
    let (model, engine) = engine(config());
    for num_prompt in [1, 3, 4, 5, 8, 21] {
        let prompt = prompt(num_prompt, num_prompt);
        let output = engine.generate_all(request(&prompt, 30)).await;
        assert_eq!(output, length(model.greedy(&prompt, 30), 0), "{num_prompt} prompt tokens");
    }
    engine.check_whole().await;
}

#[tokio::test]
async fn tokens_do_not_depend_on_batch_chunks_or_preemption() {
    // Small pools and budgets: prompts are cut, sequences are preempted again and again.
    for (num_blocks, max_running, token_budget) in [(256, 16, 64), (256, 16, 5), (14, 8, 16), (14, 8, 3)] {
        let (model, engine) = engine(EngineConfig { num_blocks, max_running, token_budget, ..config() });
        let requests: Vec<_> = (0..12).map(|idx| request(&prompt(idx, 3 + idx * 2), 20 + idx)).collect();
        let streams: Vec<_> =
            requests.iter().map(|request| engine.generate(request.clone()).expect("accepted")).collect();
        for (request, stream) in requests.iter().zip(streams) {
            let expected = model.greedy(&request.prompt, request.sampling.max_tokens as usize);
            assert_eq!(collect(stream).await.tokens, expected);
        }
        engine.check_whole().await;
    }
}

#[tokio::test]
async fn a_lower_priority_number_passes_requests_that_came_before_it() {
    let (go, gate) = mpsc::channel::<()>();
    let (computed, order) = mpsc::channel();
    let config = EngineConfig { max_running: 1, ..config() };
    let (_, engine) = engine_with_hook(config, move |batch| {
        let _ = gate.recv();
        computed.send(batch.sequences[0].tokens[0]).expect("the test runs");
        Ok(())
    });
    let of_priority = |token, priority| Request { priority, ..request(&[token], 1) };
    // The second is computed after both of the others have come, at the earliest.
    let requests = [of_priority(1, 0), of_priority(2, 1), of_priority(3, 0), of_priority(4, -1)];
    let streams = requests.map(|request| engine.generate(request).expect("accepted"));
    drop(go);
    for stream in streams {
        collect(stream).await.end.expect("it ends well");
    }
    let order: Vec<u32> = order.try_iter().collect();
    assert_eq!(order.iter().filter(|&&token| token != 1).collect::<Vec<_>>(), [&4, &3, &2]);
    engine.check_whole().await;
}

#[tokio::test]
async fn sampled_tokens_do_not_depend_on_batch_or_preemption() {
    let sampled = |idx: u32| Request {
        sampling: SamplingParams {
            max_tokens: 25,
            temperature: 0.9,
            top_p: 0.95,
            repetition_penalty: 1.1,
            frequency_penalty: 0.2,
            seed: u64::from(idx),
            ..SamplingParams::default()
        },
        ..request(&prompt(idx, 9), 25)
    };
    let (_, alone) = engine(config());
    let (_, crowded) = engine(EngineConfig { num_blocks: 14, max_running: 6, token_budget: 7, ..config() });
    let streams: Vec<_> = (0..8).map(|idx| crowded.generate(sampled(idx)).expect("accepted")).collect();
    for (idx, stream) in (0..).zip(streams) {
        let expected = alone.generate_all(sampled(idx)).await;
        assert_eq!(collect(stream).await.tokens, expected.tokens, "request {idx}");
        let other_seed = alone
            .generate_all(Request {
                sampling: SamplingParams { seed: 1000, ..sampled(idx).sampling },
                ..sampled(idx)
            })
            .await;
        assert_ne!(other_seed.tokens, expected.tokens, "the seed matters");
    }
    crowded.check_whole().await;
}

#[tokio::test]
async fn a_cached_prefix_changes_nothing_but_the_count() {
    let (model, engine) = engine(config());
    let prompt = prompt(5, 22);
    let expected = model.greedy(&prompt, 10);
    assert_eq!(engine.generate_all(request(&prompt, 10)).await, length(expected.clone(), 0));
    assert_eq!(engine.generate_all(request(&prompt, 10)).await, length(expected.clone(), 20));
    // The last block of a prompt of whole blocks is computed again: it yields the logits.
    let whole = &prompt[..20];
    assert_eq!(engine.generate_all(request(whole, 10)).await, length(model.greedy(whole, 10), 16));
    // The output was cached with the prompt.
    let longer = [&prompt[..], &expected[..6], &[1, 2]].concat();
    assert_eq!(engine.generate_all(request(&longer, 10)).await, length(model.greedy(&longer, 10), 28));
    // Another salt shares nothing.
    let other = Request { cache_salt: "other".into(), ..request(&prompt, 10) };
    assert_eq!(engine.generate_all(other).await, length(expected, 0));
    engine.check_whole().await;
}

#[tokio::test]
async fn without_a_prefix_cache_nothing_is_shared() {
    let (model, engine) = engine(EngineConfig { prefix_cache: false, ..config() });
    let prompt = prompt(5, 22);
    for _ in 0..2 {
        assert_eq!(engine.generate_all(request(&prompt, 10)).await, length(model.greedy(&prompt, 10), 0));
    }
    assert_eq!(engine.check_whole().await.num_cached, 0);
}

#[tokio::test]
async fn a_stop_id_ends_the_sequence_but_not_before_min_tokens() {
    let (model, engine) = engine(config());
    let prompt = prompt(9, 10);
    let free = model.greedy(&prompt, 20);
    let stop = free[4];
    let first = free.iter().position(|&token| token == stop).expect("it is there");

    let mut stopped = request(&prompt, 20);
    stopped.sampling.stop_token_ids = vec![stop];
    let output = engine.generate_all(stopped.clone()).await;
    assert_eq!(output.tokens, free[..=first]);
    assert_eq!(output.end.map(|end| end.0), Ok(FinishReason::Stop));

    stopped.sampling.min_tokens = 15;
    let output = engine.generate_all(stopped).await;
    assert_eq!(output.tokens[..first], free[..first]);
    assert!(!output.tokens[..15].contains(&stop), "it is masked");
    assert!(output.tokens.len() >= 15);
}

#[tokio::test]
async fn the_end_of_the_context_ends_the_sequence() {
    let (model, engine) = engine(EngineConfig { context_length: 30, ..config() });
    let prompt = prompt(2, 22);
    assert_eq!(engine.generate_all(request(&prompt, 100)).await, length(model.greedy(&prompt, 8), 0));
    engine.check_whole().await;
}

#[tokio::test]
async fn a_resumed_request_continues_the_undisturbed_one() {
    let sampling = SamplingParams {
        max_tokens: 24,
        min_tokens: 12,
        temperature: 0.8,
        top_k: 30,
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 0.3,
        logit_bias: vec![(3, 1.5), (9, -2.0)],
        seed: 99,
        stop_token_ids: vec![11, 12, 13],
        ..SamplingParams::default()
    };
    let whole = Request { sampling, ..request(&prompt(1, 13), 0) };
    let (_, undisturbed) = engine(config());
    let expected = undisturbed.generate_all(whole.clone()).await;
    assert!(expected.tokens.len() > 12);
    for num_delivered in 1..expected.tokens.len() {
        let (_, engine) = engine(config());
        let resumed = Request { output: expected.tokens[..num_delivered].to_vec(), ..whole.clone() };
        let output = engine.generate_all(resumed).await;
        assert_eq!(output.tokens, expected.tokens[num_delivered..], "after {num_delivered}");
        assert_eq!(output.end, expected.end);
    }
}

#[tokio::test]
async fn logprobs_are_those_of_the_model_and_only_when_asked_for() {
    let (model, engine) = engine(config());
    let prompt = prompt(4, 6);
    let mut asked = request(&prompt, 1);
    asked.sampling.logprobs = Some(3);
    asked.sampling.logit_bias = vec![(5, 100.0)];
    let mut stream = engine.generate(asked).expect("accepted");
    assert_eq!(stream.next().await, Some(TokenEvent::Started { cached_tokens: 0 }));
    let Some(TokenEvent::Token(token)) = stream.next().await else { panic!("a token comes next") };
    assert_eq!(token.id, 5, "the bias decides");
    let logprobs = token.logprobs.expect("asked for");

    let logits = model.logits(&prompt);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let logprob = |id: u32| f64::from(logits[id as usize]) - sum.ln();
    assert!((f64::from(logprobs.logprob) - logprob(5)).abs() < 1e-5, "the bias does not show");
    let mut ids: Vec<u32> = (0..64).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    assert_eq!(logprobs.top.iter().map(|top| top.0).collect::<Vec<_>>(), ids[..3]);
    for (id, value) in logprobs.top {
        assert!((f64::from(value) - logprob(id)).abs() < 1e-5);
    }
}

#[tokio::test]
async fn invalid_requests_are_refused_at_once() {
    let (_, engine) = engine(EngineConfig { context_length: 64, ..config() });
    let cases = [
        (request(&[], 4), "prompt: has no tokens"),
        (request(&[64], 4), "prompt: token id 64 is outside the vocabulary of 64"),
        (request(&[1; 64], 4), "prompt: 64 tokens leave no room in a context of 64"),
    ];
    for (request, message) in cases {
        let error = engine.generate(request.clone()).expect_err(message);
        assert!(matches!(error, SubmitError::Invalid(_)));
        assert_eq!(error.to_string(), message);
        assert_eq!(engine.reserve(request).await.expect_err(message), error);
    }
    engine.check_whole().await;
}

#[tokio::test]
async fn no_context_is_longer_than_the_pool() {
    let (_, engine) = engine(EngineConfig { num_blocks: 8, ..config() });
    assert_eq!(engine.context_length(), 32, "eight blocks of four");
    let done = engine.generate_all(request(&[1; 30], 100)).await;
    assert_eq!((done.tokens.len(), done.end), (2, Ok((FinishReason::Length, 0))));
    let full = InvalidRequest::new("prompt", Problem::ContextFull { num_tokens: 32, context_length: 32 });
    assert_eq!(engine.prefill(request(&[1; 32], 1)).expect_err("too long"), full.clone().into());
    assert_eq!(engine.generate(request(&[1; 32], 1)).expect_err("too long"), full.into());
    engine.check_whole().await;
}

#[tokio::test]
async fn a_full_queue_refuses_and_recovers() {
    let (permit, permits) = mpsc::channel::<()>();
    let config = EngineConfig { max_waiting: 2, max_running: 1, ..config() };
    let (_, engine) = engine_with_hook(config, move |_| {
        permits.recv().ok();
        Ok(())
    });
    let running = engine.generate(request(&[1], 2)).expect("accepted");
    // The request has left the queue once the load counts it as running.
    engine.load().wait_for(|load| load.num_running == 1).await.expect("the engine lives");
    let waiting: Vec<_> = (0..2).map(|_| engine.generate(request(&[1], 2)).expect("accepted")).collect();
    assert_eq!(
        engine.generate(request(&[1], 2)).expect_err("full"),
        SubmitError::Full { num_waiting: 2, max_waiting: 2 }
    );
    drop(waiting);
    drop(permit); // steps no longer wait
    collect(running).await;
    engine.check_whole().await;
    engine.generate_all(request(&[1], 2)).await.end.expect("there is room again");
}

#[tokio::test]
async fn a_dropped_stream_returns_its_blocks() {
    let (model, engine) = engine(EngineConfig { max_running: 2, ..config() });
    let prompt = prompt(3, 30);
    let mut streams: Vec<_> =
        (0..4).map(|_| engine.generate(request(&prompt, 400)).expect("accepted")).collect();
    streams[0].next().await.expect("it runs");
    drop(streams); // two run, two wait
    engine.check_whole().await;
    assert_eq!(engine.generate_all(request(&prompt, 5)).await.tokens, model.greedy(&prompt, 5));
}

#[tokio::test]
async fn invalid_logits_fail_only_their_request() {
    let model = FakeModel { nan_after: Some(13), ..FakeModel::new(BLOCK_SIZE) };
    let (model, engine) = engine_of(model, config(), |_| Ok(()));
    let good = engine.generate(request(&[1, 2, 3], 8)).expect("accepted");
    let bad = engine.generate(request(&[1, 2, 13], 8)).expect("accepted");
    assert_eq!(collect(bad).await, Output { tokens: vec![], end: Err(EngineError::InvalidLogits) });
    let expected = model.greedy(&[1, 2, 3], 8);
    assert!(!expected.contains(&13));
    assert_eq!(collect(good).await, length(expected, 0));
    engine.check_whole().await;
}

/// Its KV may be the reason, also the part that it found in the cache.
#[tokio::test]
async fn blocks_of_a_request_with_invalid_logits_are_not_found_again() {
    let model = FakeModel { nan_after: Some(13), ..FakeModel::new(BLOCK_SIZE) };
    let (model, engine) = engine_of(model, config(), |_| Ok(()));
    let prompt = |last: u32| [(20..28).collect(), vec![last]].concat();
    let (first, next) = (prompt(1), prompt(2));
    let expected = |prompt: &[u32]| length(model.greedy(prompt, 2), 0);
    assert_eq!(engine.generate_all(request(&first, 2)).await, expected(&first));
    let end = engine.generate_all(request(&prompt(13), 2)).await.end;
    assert_eq!(end, Err(EngineError::InvalidLogits));
    assert_eq!(engine.generate_all(request(&next, 2)).await, expected(&next), "nothing was cached");
    engine.check_whole().await;
}

#[tokio::test]
async fn a_failing_device_ends_every_stream_and_the_engine() {
    let (permit, permits) = mpsc::channel::<()>();
    let mut num_steps = 0;
    let (model, engine) = engine_with_hook(EngineConfig { max_running: 1, ..config() }, move |_| {
        permits.recv().ok();
        num_steps += 1;
        match num_steps {
            3 => Err(ExecuteError { device: "fake".into(), message: "on fire".into() }),
            _ => Ok(()),
        }
    });
    let running = engine.generate(request(&[1], 9)).expect("accepted");
    let waiting = engine.generate(request(&[1], 9)).expect("accepted");
    drop(permit); // steps no longer wait
    let error = EngineError::Executor { message: "fake: on fire".into() };
    let expected = Output { tokens: model.greedy(&[1], 2), end: Err(error.clone()) };
    assert_eq!(collect(running).await, expected);
    // The engine has accepted the request or not. It ends either way.
    let end = collect(waiting).await.end.expect_err("the engine ended");
    assert!([error.clone(), EngineError::ShuttingDown].contains(&end), "{end}");
    engine.load().wait_for(|_| false).await.expect_err("the load closes with the engine");
    assert_eq!(engine.generate(request(&[1], 9)).expect_err("ended"), SubmitError::ShuttingDown);
    assert_eq!(engine.stop(), Err(error));
}

#[tokio::test]
async fn a_panicking_executor_ends_every_stream_and_the_engine() {
    let (_, engine) = engine_with_hook(config(), |_| panic!("a bug in the kernel"));
    let error = EngineError::Panicked { message: "a bug in the kernel".into() };
    assert_eq!(engine.generate_all(request(&[1], 9)).await.end, Err(error.clone()));
    assert_eq!(engine.stop(), Err(error));
}

#[tokio::test]
async fn shutdown_ends_every_stream_once() {
    let (permit, permits) = mpsc::channel::<()>();
    let (_, engine) = engine_with_hook(EngineConfig { max_running: 2, ..config() }, move |_| {
        permits.recv().ok();
        Ok(())
    });
    permit.send(()).expect("the engine waits for it");
    let mut streams: Vec<_> =
        (0..6).map(|idx| engine.generate(request(&[idx], 500)).expect("accepted")).collect();
    streams[0].next().await.expect("it runs");
    engine.shutdown();
    drop(permit); // the current step completes, and none follows
    for stream in streams {
        assert_eq!(collect(stream).await.end, Err(EngineError::ShuttingDown));
    }
    assert_eq!(engine.generate(request(&[1], 9)).expect_err("ended"), SubmitError::ShuttingDown);
    assert_eq!(engine.stop(), Ok(()));
}

#[test]
fn a_configuration_with_a_zero_is_refused() {
    let config = EngineConfig { token_budget: 0, ..config() };
    let error =
        baton_engine::start(FakeModel::new(BLOCK_SIZE).executor(), None, config).expect_err("refused");
    assert!(matches!(error, EngineStartError::Zero { field: "token_budget" }), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_stored_while_the_log_is_locked_is_told_before_the_engine_sleeps() {
    let (_, engine) = engine(config());
    let is_over = Arc::new(AtomicBool::new(false));
    let locking = thread::spawn({
        let (log, is_over) = (engine.cache_log().clone(), is_over.clone());
        move || {
            let blocks = || -> Vec<BlockKey> { (0..10_000).map(BlockKey).collect() };
            while !is_over.load(Ordering::Relaxed) {
                let events = vec![CacheEvent::stored(None, blocks()), CacheEvent::removed(blocks())];
                // The log is locked for most of the time.
                log.append(BlockHolder::Tier(0), events);
                thread::sleep(Duration::from_micros(100));
            }
        }
    });
    for first in 0..20 {
        let request = request(&prompt(first, 17), 1);
        engine.generate_all(request.clone()).await;
        let hashes = engine.prefix_hashes(&request, 16);
        let told = async {
            while engine.cache_log().num_in_pool(&hashes) < hashes.len() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), told).await.expect("the engine told it");
    }
    is_over.store(true, Ordering::Relaxed);
    locking.join().expect("no panic");
    engine.check_whole().await;
}
