//! Both ends of a handoff in one process: blocks prefilled by one engine, copied, decoded by another.

mod support;

use std::sync::mpsc;

use baton_engine::{
    EngineConfig, EngineError, FinishReason, IdleError, PrefillEvent, Request, Reservation, SampledToken,
    SamplingParams, SubmitError,
};
use baton_engine_testing::FakeModel;
use support::{
    BLOCK_SIZE, TestEngine, collect, config, engine, engine_of, engine_with_hook,
    handoff::{copy, copy_blocks, copy_prefix, hand_off, hold, prefill, reserve_prefix},
    join_all, request,
};
use tokio::task::JoinHandle;

fn prompt(first: u32, num_tokens: u32) -> Vec<u32> {
    (first..first + num_tokens).map(|token| token * 5 % 64).collect()
}

#[tokio::test]
async fn a_remote_prompt_gives_the_tokens_of_a_local_one() {
    for token_budget in [64, 5] {
        let (model, p) = engine(EngineConfig { token_budget, ..config() });
        let (_, d) = engine(config());
        for num_prompt in [1, 3, 4, 7, 8, 30] {
            let prompt = prompt(num_prompt, num_prompt);
            let (output, num_copied) = hand_off(&p, &d, request(&prompt, 12)).await;
            assert_eq!(output.tokens, model.greedy(&prompt, 12), "{num_prompt} prompt tokens");
            assert_eq!(output.end, Ok((FinishReason::Length, 0)));
            assert_eq!(num_copied, prompt.len().div_ceil(BLOCK_SIZE));
        }
        p.check_whole().await;
        d.check_whole().await;
    }
}

#[tokio::test]
async fn missing_blocks_change_the_tokens() {
    let (model, p) = engine(config());
    let (_, d) = engine(config());
    let prompt = prompt(1, 10);
    let prefilled = prefill(&p, request(&prompt, 12)).await;
    let reservation = d.reserve(request(&prompt, 12)).await.expect("granted");
    // Nothing is copied.
    let output = collect(d.decode(reservation, prefilled.first).expect("accepted")).await;
    assert_ne!(output.tokens, model.greedy(&prompt, 12)[1..]);
}

#[tokio::test]
async fn both_sides_use_and_fill_their_prefix_caches() {
    let (model, p) = engine(config());
    let (_, d) = engine(config());
    let prompt = prompt(1, 18);
    hand_off(&p, &d, request(&prompt, 12)).await;

    // Only the partial last block is copied. The rest is cached on both sides.
    let (output, num_copied) = hand_off(&p, &d, request(&prompt, 12)).await;
    assert_eq!(output.tokens, model.greedy(&prompt, 12));
    assert_eq!(num_copied, 1);
    assert_eq!(prefill(&p, request(&prompt, 12)).await.cached_tokens, 16);

    // Nothing is copied for a prompt of whole blocks.
    let (output, num_copied) = hand_off(&p, &d, request(&prompt[..16], 12)).await;
    assert_eq!(output.tokens, model.greedy(&prompt[..16], 12));
    assert_eq!(num_copied, 0);

    // The received blocks serve a local prompt.
    let longer = [&prompt[..], &[1, 2, 3]].concat();
    let output = d.generate_all(request(&longer, 12)).await;
    assert_eq!(output.tokens, model.greedy(&longer, 12));
    assert_eq!(output.end, Ok((FinishReason::Length, 16)));
    p.check_whole().await;
    d.check_whole().await;
}

#[tokio::test]
async fn a_resumed_remote_request_continues_the_undisturbed_one() {
    let sampling = SamplingParams {
        max_tokens: 16,
        temperature: 0.9,
        repetition_penalty: 1.2,
        presence_penalty: 0.4,
        seed: 5,
        ..SamplingParams::default()
    };
    let whole = Request { sampling, ..request(&prompt(1, 9), 0) };
    let (_, p) = engine(config());
    let (_, d) = engine(config());
    let expected = p.generate_all(whole.clone()).await.tokens;
    for num_delivered in 0..expected.len() {
        let resumed = Request { output: expected[..num_delivered].to_vec(), ..whole.clone() };
        let (output, _) = hand_off(&p, &d, resumed).await;
        assert_eq!(output.tokens, expected[num_delivered..], "after {num_delivered}");
    }
    p.check_whole().await;
    d.check_whole().await;
}

#[tokio::test]
async fn a_preempted_remote_prompt_gives_the_same_tokens() {
    let (model, p) = engine(config());
    // Room for about two sequences at their greatest length, and for four at their start.
    let (_, d) = engine(EngineConfig { num_blocks: 24, ..config() });
    let handoffs = (0..8).map(|idx| {
        let request = request(&prompt(idx, 9), 30);
        async {
            let expected = model.greedy(&request.prompt, 30);
            assert_eq!(hand_off(&p, &d, request).await.0.tokens, expected);
        }
    });
    join_all(handoffs.collect()).await;
    p.check_whole().await;
    d.check_whole().await;
}

#[tokio::test]
async fn a_first_token_that_ends_the_sequence_ends_it_at_once() {
    let (_, d) = engine(config());
    let first = |id| SampledToken { id, logprobs: None };
    let mut stopping = request(&[1, 2, 3, 4], 10);
    stopping.sampling.stop_token_ids = vec![9];
    for (request, token, reason) in
        [(stopping, 9, FinishReason::Stop), (request(&[1, 2, 3, 4], 1), 8, FinishReason::Length)]
    {
        let reservation = d.reserve(request).await.expect("granted");
        let output = collect(d.decode(reservation, first(token)).expect("accepted")).await;
        assert!(output.tokens.is_empty());
        assert_eq!(output.end.expect("finished").0, reason);
    }
    let reservation = d.reserve(request(&[1, 2], 4)).await.expect("granted");
    let error = d.decode(reservation, first(64)).expect_err("refused");
    assert_eq!(error.to_string(), "first: token id 64 is outside the vocabulary of 64");
    d.check_whole().await;
}

#[tokio::test]
async fn held_blocks_stay_until_they_are_dropped() {
    let (_, p) = engine(config());
    let prefilled = prefill(&p, request(&prompt(1, 10), 4)).await;
    let busy = IdleError::Busy { num_waiting: 0, num_running: 0, num_holds: 1 };
    assert_eq!(p.check_idle_integrity().await, Err(busy));
    assert_eq!(p.load().borrow().num_free_blocks, config().num_blocks - 3);
    drop(prefilled.held);
    p.check_whole().await;
}

#[tokio::test]
async fn held_blocks_are_not_written_while_others_need_blocks() {
    let (model, p) = engine(EngineConfig { num_blocks: 12, ..config() });
    let (_, d) = engine(config());
    let text = prompt(1, 22);
    let prefilled = prefill(&p, request(&text, 10)).await;
    // Six blocks are left, which is too few for these.
    let streams: Vec<_> =
        (0..6).map(|idx| p.generate(request(&prompt(idx, 5), 16)).expect("accepted")).collect();
    for (idx, stream) in (0..).zip(streams) {
        assert_eq!(collect(stream).await.tokens, model.greedy(&prompt(idx, 5), 16));
    }
    let reservation = d.reserve(request(&text, 10)).await.expect("granted");
    copy(&p, &prefilled.blocks, &d, &reservation);
    let output = collect(d.decode(reservation, prefilled.first).expect("accepted")).await;
    assert_eq!(output.tokens, model.greedy(&text, 10)[1..]);
    drop(prefilled.held);
    p.check_whole().await;
}

#[tokio::test]
async fn a_cancelled_prefill_keeps_only_what_is_held() {
    let (permit, permits) = mpsc::channel::<()>();
    let (_, p) = engine_with_hook(EngineConfig { token_budget: 4, ..config() }, move |_| {
        permits.recv().ok();
        Ok(())
    });
    let (mut events, held) = p.prefill(request(&prompt(1, 40), 4)).expect("accepted");
    assert!(matches!(events.next().await, Some(PrefillEvent::Started { .. })));
    drop(events);
    drop(permit); // the current step completes, and none follows
    let busy = IdleError::Busy { num_waiting: 0, num_running: 0, num_holds: 1 };
    assert_eq!(p.check_idle_integrity().await, Err(busy));
    drop(held);
    p.check_whole().await;
}

#[tokio::test]
async fn a_prefill_whose_hold_is_dropped_first_still_ends() {
    let (model, p) = engine(EngineConfig { token_budget: 4, ..config() });
    let prompt = prompt(1, 40);
    let (mut events, held) = p.prefill(request(&prompt, 4)).expect("accepted");
    drop(held);
    let mut last = None;
    while let Some(event) = events.next().await {
        last = Some(event);
    }
    let Some(PrefillEvent::FirstToken(token)) = last else { panic!("ends with its token, not {last:?}") };
    assert_eq!(token.id, model.greedy(&prompt, 1)[0]);
    p.check_whole().await;
}

#[tokio::test]
async fn a_failed_prefill_fails_once() {
    let model = FakeModel { nan_after: Some(13), ..FakeModel::new(BLOCK_SIZE) };
    let (_, p) = engine_of(model, config(), |_| Ok(()));
    let (mut events, held) = p.prefill(request(&[1, 13], 4)).expect("accepted");
    let mut last = None;
    while let Some(event) = events.next().await {
        last = Some(event);
    }
    assert_eq!(last, Some(PrefillEvent::Failed(EngineError::InvalidLogits)));
    drop(held);
    p.check_whole().await;
}

#[tokio::test]
async fn reservations_are_granted_in_order_and_leave_the_queue_when_dropped() {
    // Ten blocks. Each reservation takes four and needs one more to grow.
    let (_, d) = engine(EngineConfig { num_blocks: 10, prefix_cache: false, ..config() });
    let wanted = request(&prompt(1, 16), 4);
    let first = d.reserve(wanted.clone()).await.expect("granted");
    let mut queue: Vec<_> = (0..4).map(|_| reserve(&d, wanted.clone())).collect();
    d.load().wait_for(|load| load.num_running == 2).await.expect("the engine lives");
    let (second, third, fourth, fifth) = (queue.remove(0), queue.remove(0), queue.remove(0), queue.remove(0));
    let second = second.await.expect("no panic").expect("granted");
    d.load().wait_for(|load| load.num_waiting == 3).await.expect("the engine lives");

    third.abort();
    third.await.expect_err("aborted");
    d.load().wait_for(|load| load.num_waiting == 2).await.expect("the engine lives");
    drop(second);
    let fourth = fourth.await.expect("no panic").expect("granted, the third having left");
    assert_eq!(d.load().borrow().num_waiting, 1);
    drop(first);
    let fifth = fifth.await.expect("no panic").expect("granted");
    assert_eq!(fifth.blocks().len(), 4);
    drop((fourth, fifth));
    d.check_whole().await;
}

#[tokio::test]
async fn a_reservation_gives_its_slot_up_before_its_blocks() {
    let (model, d) = engine(EngineConfig { max_running: 1, ..config() });
    let wanted = request(&prompt(1, 10), 4);
    let (slot, held) = d.reserve(wanted.clone()).await.expect("granted").split();
    let waiting = d.generate(request(&[1, 2, 3], 4)).expect("accepted");
    drop(slot);
    assert_eq!(collect(waiting).await.tokens, model.greedy(&[1, 2, 3], 4));
    let busy = IdleError::Busy { num_waiting: 0, num_running: 0, num_holds: 1 };
    assert_eq!(d.check_idle_integrity().await, Err(busy), "a writer may still reach its blocks");
    drop(held);
    d.check_whole().await;

    // In the other order.
    let (slot, held) = d.reserve(wanted.clone()).await.expect("granted").split();
    drop(held);
    drop(slot);
    d.check_whole().await;

    // With both, it decodes.
    let (slot, held) = d.reserve(wanted).await.expect("granted").split();
    let first = SampledToken { id: 7, logprobs: None };
    let stream = d.decode(Reservation::join(slot, held), first).expect("accepted");
    assert_eq!(collect(stream).await.tokens.len(), 3);
    d.check_whole().await;
}

#[tokio::test]
async fn a_reservation_waits_for_running_sequences_and_does_not_preempt_them() {
    let (model, d) = engine(EngineConfig { num_blocks: 12, ..config() });
    let running = d.generate(request(&prompt(1, 20), 20)).expect("accepted");
    let reservation = reserve(&d, request(&prompt(2, 28), 4));
    assert_eq!(collect(running).await.tokens, model.greedy(&prompt(1, 20), 20));
    drop(reservation.await.expect("no panic").expect("granted at last"));
    d.check_whole().await;
}

#[tokio::test]
async fn shutdown_ends_reservations_and_prefills() {
    let (_, d) = engine(EngineConfig { max_running: 1, ..config() });
    let granted = d.reserve(request(&[1], 4)).await.expect("granted");
    let waiting = reserve(&d, request(&[1], 4));
    let (mut events, held) = d.prefill(request(&[1], 4)).expect("accepted");
    d.load().wait_for(|load| load.num_waiting == 2).await.expect("the engine lives");
    d.shutdown();
    assert_eq!(waiting.await.expect("no panic").expect_err("ended"), SubmitError::ShuttingDown);
    assert_eq!(events.next().await, Some(PrefillEvent::Failed(EngineError::ShuttingDown)));
    assert_eq!(events.next().await, None);
    d.load().wait_for(|_| false).await.expect_err("the load closes with the engine");
    let first = SampledToken { id: 1, logprobs: None };
    assert_eq!(d.decode(granted, first).expect_err("ended"), SubmitError::ShuttingDown);
    drop(held);
}

/// Starts a reservation. Tasks of the single-threaded test runtime start in the order of the calls.
fn reserve(engine: &TestEngine, request: Request) -> JoinHandle<Result<Reservation, SubmitError>> {
    let engine = engine.clone_handle();
    tokio::spawn(async move { engine.reserve(request).await })
}

#[tokio::test]
async fn a_prefix_that_another_engine_has_cached_need_not_be_computed() {
    let (model, a) = engine(config());
    let (_, b) = engine(config());
    let turn = prompt(1, 18);
    let answer = a.generate_all(request(&turn, 12)).await.tokens;
    // The next turn begins with question and answer. Only `a` has both, in 7 full blocks.
    let next = request(&[&turn[..], &answer, &[1, 2, 3]].concat(), 6);
    let held = hold(&a, &next).await;
    assert_eq!(held.blocks().len(), 7);
    let num_tokens = held.blocks().len() * BLOCK_SIZE;
    let reservation = reserve_prefix(&b, &next, num_tokens).await.expect("there is room");
    assert_eq!((reservation.blocks().len(), reservation.num_cached_blocks()), (7, 0));
    copy_prefix(&a, &held, &b, &reservation);
    drop(held);
    b.cache_prefix(reservation);

    let computed = b.num_computed_tokens();
    let output = b.generate_all(next.clone()).await;
    assert_eq!(output.tokens, model.greedy(&next.prompt, 6));
    assert_eq!(output.end, Ok((FinishReason::Length, num_tokens)));
    // The rest of the prompt, and each token but the last.
    let num_left = (next.prompt.len() - num_tokens) as u64;
    assert_eq!(b.num_computed_tokens() - computed, num_left + 5);

    // The prefix is cached now. Another salt has nothing.
    let again = reserve_prefix(&b, &next, num_tokens).await.expect("there is room");
    assert_eq!(again.num_cached_blocks(), 7);
    let other_salt = Request { cache_salt: "other".into(), ..next };
    assert!(hold(&a, &other_salt).await.blocks().is_empty());
    drop(again);
    a.check_whole().await;
    b.check_whole().await;
}

#[tokio::test]
async fn a_prefix_is_cached_piece_by_piece_as_far_as_there_is_room() {
    let (_, a) = engine(config());
    let turn = request(&prompt(1, 61), 1);
    a.generate_all(turn.clone()).await;
    let held = hold(&a, &turn).await;
    // Nine blocks.
    let (_, b) = engine(EngineConfig { num_blocks: 9, ..config() });
    let hashes = b.prefix_hashes(&turn, held.blocks().len() * BLOCK_SIZE);
    assert!(b.reserve_blocks(&hashes, 0, 10).await.unwrap().is_none());
    let reservation = b.reserve_blocks(&hashes, 0, 1).await.unwrap().expect("there is room for some");
    assert_eq!((reservation.blocks().len(), reservation.num_cached_blocks()), (9, 0));
    copy_blocks(&a, &held.blocks()[..9], &b, &reservation);
    let short = request(&prompt(1, 31), 1);
    // The middle is of no use without the beginning.
    b.cache_blocks(&reservation, 3..6);
    assert_eq!(hold(&b, &short).await.blocks().len(), 0);
    b.cache_blocks(&reservation, 0..3);
    assert_eq!(hold(&b, &short).await.blocks(), &reservation.blocks()[..6]);
    drop(reservation);
    // What was not cached is free, and the rest stays.
    assert_eq!(hold(&b, &short).await.blocks().len(), 6);
    drop(held);
    a.check_whole().await;
    b.check_whole().await;
}

#[tokio::test]
async fn a_prompt_that_is_computed_adopts_what_comes_meanwhile() {
    let (model, a) = engine(config());
    let turn = request(&prompt(1, 61), 1);
    a.generate_all(turn.clone()).await;
    let held = hold(&a, &turn).await;
    for is_handed_over in [false, true] {
        // A step takes as long as its permit.
        let (permit, permits) = mpsc::channel::<()>();
        let (_, b) = engine_with_hook(EngineConfig { token_budget: 4, ..config() }, move |_| {
            permits.recv().ok();
            Ok(())
        });
        let hashes = b.prefix_hashes(&turn, held.blocks().len() * BLOCK_SIZE);
        let first = hashes.len() - 4;
        let reservation =
            b.reserve_blocks(&hashes, first, hashes.len() - first).await.unwrap().expect("there is room");
        copy_blocks(&a, &held.blocks()[first..], &b, &reservation);
        let mut load = b.load();
        let fetching = async {
            load.wait_for(|load| load.num_running == 1).await.expect("it runs");
            b.cache_prefix(reservation);
            drop(permit);
        };
        let cached_tokens = if is_handed_over {
            let (prefilled, ()) = tokio::join!(prefill(&b, turn.clone()), fetching);
            assert_eq!([prefilled.first.id], model.greedy(&turn.prompt, 1)[..]);
            prefilled.cached_tokens
        } else {
            let stream = b.generate(turn.clone()).expect("accepted");
            let (output, ()) = tokio::join!(collect(stream), fetching);
            assert_eq!(output.tokens, model.greedy(&turn.prompt, 1));
            output.end.expect("it finishes").1
        };
        assert_eq!(cached_tokens, 4 * BLOCK_SIZE);
        assert_eq!(b.num_computed_tokens() as usize, turn.prompt.len() - cached_tokens);
        assert_eq!(b.totals().num_cached_tokens as usize, cached_tokens);
        b.check_whole().await;
    }
    drop(held);
    a.check_whole().await;
}

#[tokio::test]
async fn what_is_adopted_again_after_a_preemption_is_told_and_counted_once() {
    let (model, a) = engine(config());
    let turn = request(&prompt(1, 61), 20);
    a.generate_all(turn.clone()).await;
    let held = hold(&a, &turn).await;
    // The first step waits until both requests are submitted.
    let (permit, permits) = mpsc::channel::<()>();
    let (_, b) = engine_with_hook(EngineConfig { num_blocks: 25, ..config() }, move |_| {
        permits.recv().ok();
        Ok(())
    });
    // The last four blocks of the prompt stay in the cache. The older request takes the others, until it ends.
    let hashes = b.prefix_hashes(&turn, held.blocks().len() * BLOCK_SIZE);
    let first = hashes.len() - 4;
    let reservation = b.reserve_blocks(&hashes, first, 4).await.unwrap().expect("there is room");
    copy_blocks(&a, &held.blocks()[first..], &b, &reservation);
    b.cache_blocks(&reservation, 0..4);
    let older = b.generate(request(&prompt(7, 5), 75)).expect("accepted");
    let younger = b.generate(turn.clone()).expect("accepted");
    drop(permit);
    let (older, younger) = tokio::join!(collect(older), collect(younger));
    assert_eq!(older.tokens, model.greedy(&prompt(7, 5), 75));
    assert_eq!(younger.tokens, model.greedy(&turn.prompt, 20));
    assert_eq!(younger.end, Ok((FinishReason::Length, 4 * BLOCK_SIZE)));
    let totals = b.totals();
    assert_eq!((totals.num_preempted, totals.num_cached_tokens as usize), (1, 4 * BLOCK_SIZE));
    drop(reservation);
    b.check_whole().await;
}

#[tokio::test]
async fn a_prefix_takes_no_block_that_a_request_needs_and_a_failed_fetch_returns_its_blocks() {
    let (_, b) = engine(EngineConfig { num_blocks: 8, ..config() });
    let (_, a) = engine(config());
    let long = request(&prompt(3, 31), 1);
    let reservation = reserve_prefix(&b, &long, 28).await.expect("there is room");
    assert!(reserve_prefix(&b, &request(&prompt(4, 31), 1), 28).await.is_none(), "no room");
    // The prefix did not arrive: nothing is cached.
    drop(reservation);
    let reservation = reserve_prefix(&b, &long, 28).await.expect("they are back");
    assert_eq!(reservation.num_cached_blocks(), 0);
    drop(reservation);

    // Held blocks stay while other requests take all the rest.
    let turn = prompt(1, 17);
    a.generate_all(request(&turn, 1)).await;
    let held = hold(&a, &request(&turn, 1)).await;
    for seed in 5..40 {
        a.generate_all(request(&prompt(seed, 30), 1)).await;
    }
    let again = hold(&a, &request(&turn, 1)).await;
    assert_eq!(held.blocks(), again.blocks());
    assert_eq!(held.blocks().len(), 4);
    drop((held, again));
    a.check_whole().await;
    b.check_whole().await;
}
