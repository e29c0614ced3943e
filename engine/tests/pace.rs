//! What an engine tells about its speed and its queue.

mod support;

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use baton_cost::{StepLine, StepWork};
use baton_engine::{EngineConfig, PrefillEvent, TokenEvent, TokenStream};
use baton_engine_testing::FakeModel;

use support::{
    BLOCK_SIZE, config, draft_with_hook, engine, engine_with_hook, request, speculating_with_hook,
};

#[tokio::test]
async fn a_request_is_counted_from_its_submission_on_also_during_a_step() {
    let (permit, permits) = mpsc::channel::<()>();
    let (started, starts) = mpsc::channel::<()>();
    let (_, engine) = engine_with_hook(config(), move |_| {
        started.send(()).ok();
        permits.recv().ok();
        Ok(())
    });
    let first = engine.generate(request(&[1; 20], 9)).expect("accepted");
    starts.recv().expect("the engine computes");
    // The engine is in the midst of a step and has not seen these.
    let others: Vec<_> =
        (0..3).map(|idx| engine.generate(request(&[idx; 50], 9)).expect("accepted")).collect();
    let load = engine.load_now();
    assert_eq!((load.num_waiting, load.num_queued_tokens), (3, 20 + 150));
    // Each needs 13 for its prompt, and one to grow.
    assert_eq!(load.num_queued_blocks, 3 * 14);
    drop(permit);
    for stream in [first].into_iter().chain(others) {
        support::collect(stream).await;
    }
    engine.check_whole().await;
    let load = engine.load_now();
    assert_eq!((load.num_waiting, load.num_queued_tokens), (0, 0), "nothing lingers");
    assert_eq!(load.num_queued_blocks, 0);
}

/// A clock that only executed steps advance.
static NANOS: AtomicU64 = AtomicU64::new(0);

fn clock() -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    *START + Duration::from_nanos(NANOS.load(Ordering::Relaxed))
}

#[tokio::test]
async fn the_step_line_begins_with_the_prior_and_follows_the_steps() {
    let truth = StepLine { fixed: 0.01, per_token: 1e-4, per_context_token: 2e-6, per_pair: 1e-7 };
    let prior = StepLine { fixed: 0.001, per_token: 1e-3, per_context_token: 1e-6, per_pair: 1e-6 };
    let (permit, permits) = mpsc::channel::<()>();
    let (started, starts) = mpsc::channel::<()>();
    let (_, engine) = engine_with_hook(
        EngineConfig { clock, step_prior: Some(prior), prefix_cache: false, ..config() },
        move |batch| {
            // The very last step: an engine without work has no recent time between tokens.
            if batch.sequences[0].start_idx == 367 {
                started.send(()).ok();
                permits.recv().ok();
            }
            let chunks = batch.sequences.iter();
            let work = chunks
                .map(|chunk| StepWork::chunk(chunk.start_idx as f64, chunk.tokens.len() as f64))
                .fold(StepWork::default(), StepWork::plus);
            NANOS.fetch_add((truth.seconds(&work) * 1e9) as u64, Ordering::Relaxed);
            Ok(())
        },
    );
    assert_eq!(engine.pace().step, Some(prior));
    let mut recent_itl = 0.0;
    for idx in 0..40 {
        let prompt = vec![idx; 10 + 9 * idx as usize];
        let stream = engine.generate(request(&prompt, 8)).expect("accepted");
        if idx == 39 {
            starts.recv().expect("the engine computes");
            recent_itl = engine.pace().recent_itl_seconds;
            permit.send(()).expect("the engine waits");
        }
        support::collect(stream).await;
    }
    engine.check_whole().await;
    let pace = engine.pace();
    assert!(pace.num_steps > 300, "{pace:?}");
    let line = pace.step.expect("it was measured");
    for work in [StepWork::decode(1.0, 200.0), StepWork::chunk(0.0, 64.0), StepWork::chunk(256.0, 64.0)] {
        let ratio = line.seconds(&work) / truth.seconds(&work);
        assert!((0.85..1.15).contains(&ratio), "{work:?}: {ratio}");
    }
    let itl = truth.seconds(&StepWork::decode(1.0, 365.0));
    assert!((0.9..1.1).contains(&(recent_itl / itl)), "{recent_itl}, {itl}");
    assert_eq!((pace.num_decoding, pace.num_context_tokens, pace.num_queued_pairs), (0, 0, 0.0));
}

#[tokio::test]
async fn waits_for_a_processor_lengthen_what_clients_see_and_not_what_steps_take() {
    static STEPS: AtomicU64 = AtomicU64::new(0);
    const STEP: Duration = Duration::from_millis(10);
    /// Three others share the processors.
    const WAIT: Duration = Duration::from_millis(30);
    fn clock() -> Instant {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        *START + (STEP + WAIT) * STEPS.load(Ordering::Relaxed) as u32
    }
    let thread_waits = || WAIT * STEPS.load(Ordering::Relaxed) as u32;
    let prior = StepLine { fixed: STEP.as_secs_f64(), per_token: 0.0, per_context_token: 0.0, per_pair: 0.0 };
    let (permit, permits) = mpsc::channel::<()>();
    let (started, starts) = mpsc::channel::<()>();
    let (_, engine) = engine_with_hook(
        EngineConfig { clock, thread_waits, step_prior: Some(prior), ..config() },
        move |_| {
            // After 50 steps: an engine without work has no recent time between tokens.
            if STEPS.fetch_add(1, Ordering::Relaxed) == 50 {
                started.send(()).ok();
                permits.recv().ok();
            }
            Ok(())
        },
    );
    let stream = engine.generate(request(&[1; 20], 51)).expect("accepted");
    starts.recv().expect("the engine computes");
    let pace = engine.pace();
    permit.send(()).expect("the engine waits");
    support::collect(stream).await;
    engine.check_whole().await;
    assert!(pace.num_steps >= 50, "{pace:?}");
    let seconds = pace.step.expect("a prior").seconds(&StepWork::decode(1.0, 60.0));
    assert!((seconds / STEP.as_secs_f64() - 1.0).abs() < 1e-3, "{seconds}");
    let itl = (STEP + WAIT).as_secs_f64();
    assert!((pace.recent_itl_seconds / itl - 1.0).abs() < 1e-3, "{pace:?}");
}

#[tokio::test]
async fn the_time_between_tokens_counts_drafting_and_what_it_gains() {
    static MICROS: AtomicU64 = AtomicU64::new(0);
    fn clock() -> Instant {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        *START + Duration::from_micros(MICROS.load(Ordering::Relaxed))
    }
    let model = FakeModel::new(BLOCK_SIZE);
    // A draft model that is always right: 1500 microseconds for six tokens. And one that is always wrong, soon after the
    // first drafts.
    for (errs_in, draft, num_steps, expected, yields) in
        [(None, 100, 40, 240.0..260.0, 3.5..6.01), (Some(1), 900, 12, 1001.0..4000.0, 1.0..2.0)]
    {
        let drafter = draft_with_hook(FakeModel { errs_in, ..model }, move |_| {
            MICROS.fetch_add(draft, Ordering::Relaxed);
            Ok(())
        });
        let (permit, permits) = mpsc::channel::<()>();
        let (started, starts) = mpsc::channel::<()>();
        let mut num_ended = 0;
        let config = EngineConfig { clock, ..config() };
        let engine = speculating_with_hook(model, drafter, config, move |_| {
            if num_ended == num_steps {
                started.send(()).ok();
                permits.recv().ok();
            }
            num_ended += 1;
            MICROS.fetch_add(1000, Ordering::Relaxed);
            Ok(())
        });
        let stream = engine.generate(request(&[1, 2, 3], 300)).expect("accepted");
        starts.recv().expect("the engine computes");
        let micros = 1e6 * engine.pace().recent_itl_seconds;
        permit.send(()).expect("the engine waits");
        support::collect(stream).await;
        engine.check_whole().await;
        assert!(expected.contains(&micros), "{micros} microseconds with drafts of {draft}");
        // By its last steps, also when it has nothing to do. A minute later it is half as much more than one.
        let expected_yield = || engine.expected_yield(&engine.pace()).num_tokens();
        let told = expected_yield();
        assert!(yields.contains(&told), "{told} tokens a step with drafts of {draft}");
        MICROS.fetch_add(60_000_000, Ordering::Relaxed);
        let later = expected_yield();
        assert!((2.0 * (later - 1.0) - (told - 1.0)).abs() < 1e-9, "{later} after {told}");
    }
}

#[tokio::test]
async fn cancelled_requests_leave_nothing_in_the_pace() {
    static STEPS: AtomicU64 = AtomicU64::new(0);
    fn clock() -> Instant {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        *START + Duration::from_millis(10) * STEPS.load(Ordering::Relaxed) as u32
    }
    // In the second step of a prompt that takes three, and in the second one that decodes.
    for (num_prompt_tokens, num_steps, decodes) in [(150, 1, false), (20, 2, true)] {
        let (permit, permits) = mpsc::channel::<()>();
        let (started, starts) = mpsc::channel::<()>();
        let (_, engine) = engine_with_hook(EngineConfig { clock, ..config() }, move |_| {
            started.send(()).ok();
            permits.recv().ok();
            STEPS.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        let stream = engine.generate(request(&vec![1; num_prompt_tokens], 50)).expect("accepted");
        for _ in 0..num_steps {
            starts.recv().expect("the engine computes");
            permit.send(()).expect("the engine waits");
        }
        starts.recv().expect("the engine computes");
        let pace = engine.pace();
        assert_eq!((pace.num_decoding > 0, pace.recent_itl_seconds > 0.0), (decodes, decodes), "{pace:?}");
        assert_eq!(pace.num_queued_pairs > 0.0, !decodes, "{pace:?}");
        // The engine learns of it after the step.
        drop(stream);
        permit.send(()).expect("the engine waits");
        engine.load().wait_for(|load| load.num_running == 0).await.expect("the engine lives");
        let pace = engine.pace();
        assert_eq!((pace.num_decoding, pace.num_context_tokens, pace.num_queued_pairs), (0, 0, 0.0));
        assert_eq!(pace.recent_itl_seconds, 0.0);
    }
}

#[tokio::test]
async fn a_slow_engine_without_work_is_expected_to_be_as_fast_as_its_prior_again() {
    static MILLIS: AtomicU64 = AtomicU64::new(0);
    fn clock() -> Instant {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        *START + Duration::from_millis(MILLIS.load(Ordering::Relaxed))
    }
    let prior = StepLine { fixed: 0.01, per_token: 0.0, per_context_token: 0.0, per_pair: 0.0 };
    let config = EngineConfig { clock, step_prior: Some(prior), ..config() };
    let (_, engine) = engine_with_hook(config, move |_| {
        MILLIS.fetch_add(100, Ordering::Relaxed);
        Ok(())
    });
    let expected = || engine.expected_step(&engine.pace()).expect("a prior").fixed;
    assert_eq!(expected(), prior.fixed);
    engine.generate_all(request(&[1; 20], 50)).await;
    engine.check_whole().await;
    let slow = expected();
    assert!(slow > 0.09, "{slow}");
    MILLIS.fetch_add(60_000, Ordering::Relaxed);
    assert!((expected() / slow - 0.5).abs() < 1e-9, "{} after {slow}", expected());
    MILLIS.fetch_add(3_600_000, Ordering::Relaxed);
    assert_eq!(expected(), prior.fixed);
    assert_eq!(engine.pace().step.expect("a prior").fixed, slow, "what was measured stays");
    // So does what one step says.
    engine.generate_all(request(&[2; 20], 2)).await;
    engine.check_whole().await;
    assert!(expected() > 0.09, "{}", expected());
}

#[tokio::test]
async fn without_a_prior_nothing_is_claimed_before_the_first_step() {
    let (_, engine) = engine(config());
    assert_eq!(engine.pace().step, None);
}

#[tokio::test]
async fn events_have_the_time_of_the_engine_however_late_they_are_read() {
    static MILLIS: AtomicU64 = AtomicU64::new(0);
    fn clock() -> Instant {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        *START + Duration::from_millis(MILLIS.load(Ordering::Relaxed))
    }
    /// The time of each event, from `start` on.
    async fn times(mut stream: TokenStream, start: Instant) -> Vec<(&'static str, u128)> {
        let mut times = Vec::new();
        while let Some(event) = stream.next().await {
            let name = match event {
                TokenEvent::Started { .. } => "started",
                TokenEvent::Token(_) => "token",
                _ => "finished",
            };
            times.push((name, (stream.sent_at() - start).as_millis()));
        }
        times
    }
    // The prompt takes two steps.
    let config = EngineConfig { clock, token_budget: 16, ..config() };
    let (_, engine) = engine_with_hook(config, move |_| {
        MILLIS.fetch_add(10, Ordering::Relaxed);
        Ok(())
    });
    let start = clock();
    let stream = engine.generate(request(&[1; 20], 2)).expect("accepted");
    let (prefill, _blocks) = engine.prefill(request(&[2; 20], 1)).expect("accepted");
    // The reader comes after an hour.
    engine.generate_all(request(&[3; 4], 5)).await;
    let computed = MILLIS.fetch_add(3_600_000, Ordering::Relaxed);
    let times = times(stream, start).await;
    assert_eq!(times[..2], [("started", 0), ("token", 20)]);
    assert!(times[2..].iter().all(|&(_, millis)| millis <= computed.into()), "{times:?}");
    let mut prefill = prefill;
    let mut last = None;
    while let Some(event) = prefill.next().await {
        last = Some((event, (prefill.sent_at() - start).as_millis()));
    }
    let (event, millis) = last.expect("a first token");
    assert!(matches!(event, PrefillEvent::FirstToken(_)) && millis <= computed.into(), "{event:?} {millis}");
}
