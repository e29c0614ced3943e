//! Prefill workers that die, are absent, or have another identity than the plan says.

use std::time::Duration;

use baton_proto::worker::{PrefillPeer, failed::Kind};
use baton_worker::{EngineBroke, KvMemory};
use tokio::net::TcpListener;

use crate::{
    gate::{StepHook, gate},
    harness::{TestWorker, decode, expected, generate, prefill, prompt, read, request, transports},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_killed_during_a_handoff_is_reported_as_lost_and_costs_no_block() {
    for num_steps in [0, 2] {
        let (steps, hook) = gate();
        let mut p = prefill().hook(hook).start().await;
        let d = decode().start().await;
        let mut client = d.client().await;
        let prompt = prompt(1, 80);
        let mut events = client.generate(request(&prompt, 8, Some(p.peer()))).await.unwrap().into_inner();
        tokio::task::block_in_place(|| steps.pass(num_steps));
        while num_steps > 0 && d.worker.load(0).handoff_bytes.iter().all(|transport| transport.bytes == 0) {
            tokio::task::yield_now().await;
        }
        p.kill();
        let answer = read(&mut events).await.unwrap();
        assert!(answer.tokens.is_empty(), "{answer:?}");
        assert_eq!(answer.failed().0, Kind::PrefillLost, "{answer:?}");
        steps.open();
        d.assert_all_free().await;

        // The router plans again. The decode worker still serves.
        let answer = generate(&client, request(&prompt, 8, None)).await.unwrap();
        assert_eq!(answer.finished(), expected(&prompt, 8));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_killed_during_a_handoff_costs_the_prefill_worker_no_block() {
    for kind in transports() {
        let (steps, hook) = gate();
        let p = prefill().transport(kind).hook(hook).start().await;
        let mut d = decode().transport(kind).start().await;
        let mut client = d.client().await;
        let events = client.generate(request(&prompt(1, 80), 8, Some(p.peer()))).await.unwrap();
        tokio::task::block_in_place(|| steps.pass(2));
        while p.moved(kind) == 0 {
            tokio::task::yield_now().await;
        }
        d.kill();
        steps.open();
        p.assert_all_free().await;
        drop(events);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_absent_prefill_worker_is_reported_as_lost() {
    let d = decode().start().await;
    let client = d.client().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let absent = PrefillPeer { worker_id: "p9".into(), incarnation: 1, address };
    let answer = generate(&client, request(&prompt(1, 80), 8, Some(absent))).await.unwrap();
    let (kind, message) = answer.failed();
    assert_eq!(kind, Kind::PrefillLost);
    assert!(message.contains("p9 at http://127.0.0.1"), "{message}");
    assert!(d.has_metric("baton_worker_requests_ended_total{outcome=\"prefill_lost\"} 1").await);
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_incarnation_of_the_prefill_worker_refuses() {
    let (p, d) = (prefill().start().await, decode().start().await);
    let client = d.client().await;
    let old = PrefillPeer { incarnation: p.worker.incarnation() ^ 1, ..p.peer() };
    let answer = generate(&client, request(&prompt(1, 80), 8, Some(old))).await.unwrap();
    let (kind, message) = answer.failed();
    assert_eq!(kind, Kind::PrefillLost);
    assert!(message.contains("incarnation"), "{message}");
    p.assert_all_free().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_of_another_kv_format_refuses() {
    let (p, d) = (prefill().rope("theta=1").start().await, decode().start().await);
    let client = d.client().await;
    let answer = generate(&client, request(&prompt(1, 80), 8, Some(p.peer()))).await.unwrap();
    let (kind, message) = answer.failed();
    assert_eq!(kind, Kind::KvRejected);
    assert!(message.contains(r#"rope "theta=1" against "none""#), "{message}");
    p.assert_all_free().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_without_progress_runs_into_the_deadline() {
    let (steps, hook) = gate();
    let p = prefill().hook(hook).start().await;
    let soon = Duration::from_millis(300);
    let d = decode().with(|config| config.handoff_deadline = soon).start().await;
    let client = d.client().await;
    let answer = generate(&client, request(&prompt(1, 80), 8, Some(p.peer()))).await.unwrap();
    assert_eq!(answer.failed().0, Kind::Deadline);
    d.assert_all_free().await;
    tokio::task::block_in_place(|| steps.pass(0));
    steps.open();
    p.assert_all_free().await;
}

/// Ten steps take longer than the deadline together, and the second prompt waits for those of the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_with_progress_does_not_run_into_the_deadline() {
    let deadline = Duration::from_secs(4);
    let p = prefill().with(|config| config.token_budget = 8);
    let p = p.hook(Box::new(|_| {
        std::thread::sleep(Duration::from_millis(700));
        Ok(())
    }));
    let p = p.start().await;
    let d = decode().with(|config| config.handoff_deadline = deadline).start().await;
    let client = d.client().await;
    let ask = |seed| generate(&client, request(&prompt(seed, 40), 8, Some(p.peer())));
    let (first, second) = tokio::join!(ask(1), ask(2));
    for (seed, answer) in [(1, first), (2, second)] {
        assert_eq!(answer.unwrap().finished(), expected(&prompt(seed, 40), 8));
    }
    p.assert_all_free().await;
    d.assert_all_free().await;
}

/// The first request takes the blocks of the decode worker for longer than either side's deadline.
#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_with_progress_waits_for_its_blocks_longer_than_the_deadline() {
    let deadline = Duration::from_secs(4);
    let p = prefill().start().await;
    let mut num_slow = 16;
    let d = decode().hook(Box::new(move |_| {
        if num_slow > 0 {
            num_slow -= 1;
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }));
    let d = d.with(|config| {
        config.handoff_deadline = deadline;
        config.kv = KvMemory::Blocks(28);
    });
    let d = d.start().await;
    let client = d.client().await;
    let first = tokio::spawn({
        let (client, request) = (client.clone(), request(&prompt(1, 80), 16, None));
        async move { generate(&client, request).await.unwrap().finished() }
    });
    while d.worker.load(0).num_running == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let second = generate(&client, request(&prompt(2, 100), 2, Some(p.peer()))).await.unwrap();
    assert_eq!(second.finished(), expected(&prompt(2, 100), 2));
    assert_eq!(first.await.unwrap(), expected(&prompt(1, 80), 16));
    // The wait for blocks is no transfer.
    let metrics = d.metrics().await;
    let seconds = |name: &str| {
        let sum = metrics.lines().find_map(|line| line.strip_prefix(name)?.parse::<f64>().ok());
        sum.unwrap_or_else(|| panic!("no {name} in\n{metrics}"))
    };
    let waited = seconds("baton_handoff_block_wait_seconds_sum ");
    let exposed = seconds("baton_handoff_exposed_seconds_sum ");
    assert!(exposed < waited, "{exposed} s of transfer, {waited} s without blocks");
    p.assert_all_free().await;
    d.assert_all_free().await;
}

/// Its prefill worker has done its part: the router must not avoid that one.
#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_without_blocks_and_progress_is_full() {
    let p = prefill().start().await;
    let (steps, hook) = gate();
    let d = decode().hook(hook).with(|config| {
        config.handoff_deadline = Duration::from_secs(3);
        config.kv = KvMemory::Blocks(28);
    });
    let d = d.start().await;
    let client = d.client().await;
    let first = tokio::spawn({
        let (client, request) = (client.clone(), request(&prompt(1, 80), 8, None));
        async move { generate(&client, request).await.unwrap().finished() }
    });
    tokio::task::block_in_place(|| steps.pass(0));
    let answer = generate(&client, request(&prompt(2, 100), 2, Some(p.peer()))).await.unwrap();
    assert_eq!(answer.failed().0, Kind::Full, "{answer:?}");
    assert_eq!(answer.tokens, expected(&prompt(2, 100), 1), "the first token does not wait");
    p.assert_all_free().await;
    steps.open();
    assert_eq!(first.await.unwrap(), expected(&prompt(1, 80), 8));
    d.assert_all_free().await;
}

/// Panics in the step of this number, counted from 1.
fn breaks_in_step(step: usize) -> StepHook {
    let mut steps_left = step;
    Box::new(move |_| {
        steps_left -= 1;
        assert!(steps_left > 0, "a bug in the executor");
        Ok(())
    })
}

async fn assert_ended_by_its_engine(worker: &mut TestWorker) {
    let error = worker.outcome().await.expect_err("its engine broke");
    assert!(error.is::<EngineBroke>(), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_breaks_ends_its_worker_and_fails_its_requests() {
    let mut p = prefill().hook(breaks_in_step(2)).start().await;
    let d = decode().start().await;
    let prompt = prompt(1, 80);
    let answer = generate(&d.client().await, request(&prompt, 8, Some(p.peer()))).await.unwrap();
    assert_eq!(answer.failed().0, Kind::Internal, "{answer:?}");
    assert_ended_by_its_engine(&mut p).await;
    d.assert_all_free().await;

    // The prompt takes four steps.
    let mut d = decode().hook(breaks_in_step(6)).start().await;
    let answer = generate(&d.client().await, request(&prompt, 8, None)).await.unwrap();
    assert_eq!(answer.failed().0, Kind::Internal, "{answer:?}");
    assert!(!answer.tokens.is_empty() && expected(&prompt, 8).starts_with(&answer.tokens), "{answer:?}");
    assert_ended_by_its_engine(&mut d).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_computes_no_prompts_for_others() {
    let (other, d) = (decode().named("d1").start().await, decode().start().await);
    let answer = generate(&d.client().await, request(&prompt(1, 80), 8, Some(other.peer()))).await.unwrap();
    let (kind, message) = answer.failed();
    assert_eq!(kind, Kind::PrefillLost, "{message}");
    assert!(message.contains("not a prefill worker"), "{message}");
    assert_eq!(other.worker.engine().num_computed_tokens(), 0);
    d.assert_all_free().await;
    other.assert_all_free().await;
}
