//! Prefixes that one worker has cached and another one fetches.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use baton_engine::{Request, SamplingParams};
use baton_handoff::TransportKind;
use baton_model::Batch;
use baton_proto::worker::{self as proto, DrainRequest, worker_client::WorkerClient};
use baton_worker::{KvMemory, WorkerConfig};
use tokio::{net::TcpListener, sync::Mutex, time::timeout};

use crate::{
    harness::{
        Answer, BLOCK_SIZE, Builder, End, PATIENCE, TestWorker, decode, expected, generate, prefill, prompt,
        request, transports,
    },
    matrix::tap::{Point, Tap, Twist},
};

const NUM_PROMPT: usize = 30;
const NUM_ANSWER: usize = 11;
const NUM_NEXT: usize = 8;

/// Runs a first turn on `d`, which alone caches prompt and answer. Returns the second turn's prompt.
async fn converse(d: &TestWorker) -> Vec<u32> {
    let first = prompt(3, NUM_PROMPT);
    let answer = generate(&d.client().await, request(&first, NUM_ANSWER as u32, None)).await.unwrap();
    [first, answer.finished(), prompt(5, 6)].concat()
}

/// Cached tokens on `d`: the KV of the answer's last token was never computed.
const NUM_CACHED: usize = (NUM_PROMPT + NUM_ANSWER - 1) / BLOCK_SIZE * BLOCK_SIZE;

fn next_turn(turn: &[u32], source: proto::PrefillPeer) -> proto::GenerateRequest {
    proto::GenerateRequest { prefix_source: Some(source), ..request(turn, NUM_NEXT as u32, None) }
}

fn computed(worker: &TestWorker) -> usize {
    worker.worker.engine().num_computed_tokens() as usize
}

/// Each token but the last is computed after it is sampled.
const NUM_DECODED: usize = NUM_NEXT - 1;

#[tokio::test(flavor = "multi_thread")]
async fn a_second_turn_elsewhere_computes_only_what_is_new() {
    for transport in transports() {
        let old = decode().transport(transport).start().await;
        let new = decode().named("d1").transport(transport).start().await;
        let turn = converse(&old).await;
        let before = computed(&old);
        let answer = generate(&new.client().await, next_turn(&turn, old.peer())).await.unwrap();
        assert_eq!(answer.finished(), expected(&turn, NUM_NEXT), "{transport}");
        assert_eq!(computed(&new), turn.len() - NUM_CACHED + NUM_DECODED);
        assert_eq!(computed(&old), before, "the source computes nothing");
        assert!(new.has_metric(&format!("baton_prefix_fetched_tokens_total {NUM_CACHED}")).await);
        assert!(new.has_metric("baton_prefix_wait_seconds_count{source=\"worker\"} 1").await);
        old.await_metric("baton_prefixes_given_total{outcome=\"committed\"} 1").await;
        assert!(new.moved(transport) > 0 && old.moved(transport) == new.moved(transport));

        // The new worker has the prefix now, so no KV moves.
        let (moved, before) = (new.moved(transport), computed(&new));
        let again = generate(&new.client().await, next_turn(&turn, old.peer())).await.unwrap();
        assert_eq!(again.finished(), expected(&turn, NUM_NEXT));
        assert_eq!(new.moved(transport), moved);
        let num_full = (turn.len() - 1) / BLOCK_SIZE * BLOCK_SIZE;
        assert_eq!(computed(&new) - before, turn.len() - num_full + NUM_DECODED);
        old.assert_all_free().await;
        new.assert_all_free().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_computes_only_what_a_decode_worker_has_not() {
    let d = decode().start().await;
    let p = prefill().start().await;
    let turn = converse(&d).await;
    let before = computed(&d);
    let request = proto::GenerateRequest { prefill: Some(p.peer()), ..next_turn(&turn, d.peer()) };
    let answer = generate(&d.client().await, request).await.unwrap();
    assert_eq!(answer.finished(), expected(&turn, NUM_NEXT));
    assert_eq!(computed(&p), turn.len() - NUM_CACHED);
    assert!(p.has_metric("baton_prefix_wait_seconds_count{source=\"worker\"} 1").await);
    assert_eq!(computed(&d) - before, NUM_DECODED);
    d.assert_all_free().await;
    p.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_takes_what_a_prefill_worker_has_cached() {
    let (p, d) = (prefill().start().await, decode().start().await);
    let other = decode().named("d1").start().await;
    let turn = prompt(3, 42);
    let remote = request(&turn, NUM_NEXT as u32, Some(p.peer()));
    assert_eq!(generate(&d.client().await, remote).await.unwrap().finished(), expected(&turn, NUM_NEXT));
    let before = computed(&p);
    let answer = generate(&other.client().await, next_turn(&turn, p.peer())).await.unwrap();
    assert_eq!(answer.finished(), expected(&turn, NUM_NEXT));
    assert_eq!(computed(&other), 2 + NUM_DECODED);
    assert_eq!(computed(&p), before);
    for worker in [&p, &d, &other] {
        worker.assert_all_free().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_is_fetched_into_blocks_of_another_size() {
    for (old_size, new_size) in [(4, 6), (6, 4)] {
        let old = decode().block_size(old_size).start().await;
        let new = decode().named("d1").block_size(new_size).start().await;
        let turn = converse(&old).await;
        let answer = generate(&new.client().await, next_turn(&turn, old.peer())).await.unwrap();
        assert_eq!(answer.finished(), expected(&turn, NUM_NEXT));
        let held = (NUM_PROMPT + NUM_ANSWER - 1) / old_size * old_size;
        let num_fetched = held / new_size * new_size;
        assert_eq!(computed(&new), turn.len() - num_fetched + NUM_DECODED, "{old_size} to {new_size}");
        old.assert_all_free().await;
        new.assert_all_free().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_worker_still_hands_over_cached_prefixes() {
    let mut old = decode().start().await;
    let new = decode().named("d1").start().await;
    let turn = converse(&old).await;
    // A running request keeps the worker from ending at once.
    let busy = old.worker.lifecycle().token();
    let mut control = WorkerClient::connect(old.address()).await.unwrap();
    control.drain(DrainRequest {}).await.unwrap();
    let answer = generate(&new.client().await, next_turn(&turn, old.peer())).await.unwrap();
    assert_eq!(answer.finished(), expected(&turn, NUM_NEXT));
    assert_eq!(computed(&new), turn.len() - NUM_CACHED + NUM_DECODED);
    drop(busy);
    old.ended().await;
    new.assert_all_free().await;
}

/// The prefix source fails. The worker computes the prompt itself and counts the reason.
async fn computes_by_itself(source: proto::PrefillPeer, new: &TestWorker, turn: &[u32], outcome: &str) {
    let before = computed(new);
    let answer = generate(&new.client().await, next_turn(turn, source)).await.unwrap();
    assert_eq!(answer.finished(), expected(turn, NUM_NEXT), "{outcome}");
    assert_eq!(computed(new) - before, turn.len() + NUM_DECODED, "{outcome}");
    let line = format!("baton_prefix_fetches_total{{outcome=\"{outcome}\"}} 1");
    assert!(new.has_metric(&line).await, "{outcome}: {}", new.metrics().await);
    new.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_cannot_give_costs_no_token() {
    let mut old = decode().start().await;
    let new = decode().named("d1").start().await;
    let turn = converse(&old).await;

    let unknown = prompt(9, 45);
    computes_by_itself(old.peer(), &new, &unknown, "not_cached").await;
    let restarted = proto::PrefillPeer { incarnation: 1, ..old.peer() };
    computes_by_itself(restarted, &new, &turn, "refused").await;
    let other_model = decode().named("d2").rope("other").start().await;
    computes_by_itself(old.peer(), &other_model, &turn, "refused").await;
    // A listener that never answers.
    let impatient = decode().named("d3").with(|config| config.fetch_deadline = None).start().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", silent.local_addr().unwrap());
    let frozen = proto::PrefillPeer { address, ..old.peer() };
    computes_by_itself(frozen, &impatient, &prompt(11, 45), "deadline").await;
    old.assert_all_free().await;
    let gone = old.peer();
    old.kill();
    computes_by_itself(gone, &new, &prompt(13, 45), "prefill_lost").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_free_blocks_fetches_no_prefix_and_queues_the_request() {
    let old = decode().start().await;
    let new = decode().named("d1").with(|config| config.kv = KvMemory::Blocks(16)).start().await;
    let turn = converse(&old).await;
    let sampling = SamplingParams { max_tokens: 8, ..SamplingParams::default() };
    let other = Request { id: "o".into(), prompt: prompt(7, 30).into(), sampling, ..Request::default() };
    let taken = new.worker.engine().reserve(other).await.unwrap();
    let waiting = tokio::spawn({
        let (client, request) = (new.client().await, next_turn(&turn, old.peer()));
        async move { generate(&client, request).await.unwrap() }
    });
    while !new.has_metric("baton_prefix_fetches_total{outcome=\"full\"} 1").await {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    drop(taken);
    assert_eq!(waiting.await.unwrap().finished(), expected(&turn, NUM_NEXT));
    assert_eq!(computed(&new), turn.len() + NUM_DECODED);
    old.assert_all_free().await;
    new.assert_all_free().await;
}

/// The source behind a tap that holds the first message of each fetch at `point`.
async fn held_at(point: Point, source: &TestWorker) -> (Tap, proto::PrefillPeer) {
    let upstream = source.address().trim_start_matches("http://").parse().expect("an address");
    let tap = Tap::beside_data(upstream, Some((point, Twist::Held))).await;
    let address = format!("http://{}", tap.address);
    (tap, proto::PrefillPeer { address, ..source.peer() })
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_during_a_prefix_fetch_frees_every_block() {
    let old = decode().transport(TransportKind::Tcp).start().await;
    let new = decode().named("d1").transport(TransportKind::Tcp).start().await;
    let turn = converse(&old).await;
    let client = new.client().await;
    for (point, num_cancelled) in [(Point::Begin, 1), (Point::Grant, 2), (Point::AnyWritten, 3)] {
        let (tap, source) = held_at(point, &old).await;
        let mut asking = client.clone();
        let stream = asking.generate(next_turn(&turn, source)).await.unwrap();
        timeout(PATIENCE, tap.twisted(1)).await.expect("the fetch comes to this message");
        drop(stream);
        new.await_metric(&format!("baton_prefix_fetches_total{{outcome=\"cancelled\"}} {num_cancelled}"))
            .await;
        tap.straighten();
        old.assert_all_free().await;
        new.assert_all_free().await;
    }
    // At any other moment.
    for delay in 0..40 {
        // Each conversation has a salt of its own, so each prefix is fetched anew.
        let salt = format!("s{delay}");
        let first = proto::GenerateRequest {
            cache_salt: salt.clone(),
            ..request(&turn[..NUM_PROMPT], NUM_ANSWER as u32, None)
        };
        generate(&old.client().await, first).await.unwrap().finished();
        let request = proto::GenerateRequest { cache_salt: salt, ..next_turn(&turn, old.peer()) };
        let moment = Duration::from_micros(delay * 150);
        let _ = tokio::time::timeout(moment, generate(&client, request)).await;
    }
    old.assert_all_free().await;
    new.assert_all_free().await;
}

/// A worker that takes its time for a `token`, and has seen KV come from `source` in half the time in which it computes it. It
/// computes nothing while the lock is held.
async fn slow_beside(
    source: &TestWorker,
    builder: Builder,
    block_size: usize,
    token: Duration,
) -> (TestWorker, Arc<Mutex<()>>) {
    let lock = Arc::new(Mutex::new(()));
    let held = lock.clone();
    let hook = move |batch: &Batch<'_>| {
        drop(held.blocking_lock());
        let num_tokens: usize = batch.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        std::thread::sleep(token * num_tokens as u32);
        Ok(())
    };
    let with = |config: &mut WorkerConfig| config.fetch_deadline = None;
    let new = builder.block_size(block_size).with(with).hook(Box::new(hook)).start().await;
    // Its steps are measured.
    generate(&new.client().await, request(&prompt(1, 60), 1, None)).await.unwrap().finished();
    let num_bytes = new.worker.engine().storage().layout().block_bytes() as u64;
    // What it measured, not `token`: on a busy machine a sleep takes longer.
    let block = new.worker.engine().prefill_time(block_size).expect("its steps are measured").as_secs_f64();
    (0..50).for_each(|_| new.worker.peer_links().observe(&source.peer().worker_id, num_bytes, 0.5 * block));
    (new, lock)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_source_gives_the_end_while_the_beginning_is_computed() {
    for transport in transports() {
        for block_size in [4, 6] {
            let old = decode().transport(transport).start().await;
            let new = decode().named("d1").transport(transport);
            // A busy machine still fetches within the time that the prompt takes: 1.5 s.
            let (new, lock) = slow_beside(&old, new, block_size, Duration::from_millis(6)).await;
            let turn = prompt(3, 250);
            generate(&old.client().await, request(&turn, 1, None)).await.unwrap().finished();
            let before = computed(&new);
            let one = proto::GenerateRequest { prefix_source: Some(old.peer()), ..request(&turn, 1, None) };
            // It came at once, however busy this machine is.
            let held = lock.lock().await;
            let came = async {
                new.await_metric("baton_prefix_fetches_total{outcome=\"fetched\"} 1").await;
                drop(held);
            };
            let client = new.client().await;
            let (answer, ()) = tokio::join!(generate(&client, one), came);
            let answer = answer.unwrap();
            let End::Finished { cached_tokens } = answer.end else { panic!("{answer:?}") };
            assert_eq!(answer.tokens, expected(&turn, 1), "{transport}");
            // It was planned by what was measured: the end has come, and not all.
            let num_sharable = (turn.len() - 1) / block_size * block_size;
            assert!((1..num_sharable).contains(&(cached_tokens as usize)), "{cached_tokens}");
            assert_eq!(computed(&new) - before, turn.len() - cached_tokens as usize);
            assert!(new.has_metric(&format!("baton_prefix_fetched_tokens_total {cached_tokens}")).await);
            old.assert_all_free().await;
            new.assert_all_free().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_dies_while_the_prompt_is_computed_costs_no_token_and_no_block() {
    let mut old = decode().transport(TransportKind::Tcp).start().await;
    let new = decode().named("d1").transport(TransportKind::Tcp);
    // The deadline of a fetch is the time that its prompt takes: 3 s, in which a busy machine sees the end of a stream.
    let (new, lock) = slow_beside(&old, new, 4, Duration::from_millis(12)).await;
    let turn = prompt(3, 250);
    generate(&old.client().await, request(&turn, 1, None)).await.unwrap().finished();
    let (tap, source) = held_at(Point::Grant, &old).await;
    let one = proto::GenerateRequest { prefix_source: Some(source), ..request(&turn, 1, None) };
    let before = computed(&new);
    let held = lock.lock().await;
    let dies = async {
        // Blocks are granted, and nothing has come.
        timeout(PATIENCE, tap.twisted(1)).await.expect("it is asked for the prefix");
        old.kill();
        new.await_metric("baton_prefix_fetches_total{outcome=\"prefill_lost\"} 1").await;
        drop(held);
    };
    let client = new.client().await;
    let (answer, ()) = tokio::join!(generate(&client, one), dies);
    let all_computed = Answer { tokens: expected(&turn, 1), end: End::Finished { cached_tokens: 0 } };
    assert_eq!(answer.unwrap(), all_computed);
    assert!(!tap.blocks().is_empty());
    assert_eq!(computed(&new) - before, turn.len());
    assert!(new.has_metric("baton_prefix_fetched_tokens_total 0").await);
    new.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_gone_or_a_request_that_leaves_meanwhile_leaves_no_block() {
    let mut old = decode().transport(TransportKind::Tcp).start().await;
    let new = decode().named("d1").transport(TransportKind::Tcp);
    let (new, _) = slow_beside(&old, new, 4, Duration::from_millis(2)).await;
    let client = new.client().await;
    let asked =
        |turn: &[u32]| proto::GenerateRequest { prefix_source: Some(old.peer()), ..request(turn, 1, None) };
    let turns: Vec<_> = (3..10).map(|seed| prompt(seed, 250)).collect();
    for (nth, turn) in turns.iter().enumerate() {
        generate(&old.client().await, request(turn, 1, None)).await.unwrap().finished();
        let moment = Duration::from_millis(5 * nth as u64);
        let _ = tokio::time::timeout(moment, generate(&client, asked(turn))).await;
    }
    old.assert_all_free().await;
    // Much slower than it was measured: it is asked for nothing more.
    let num_bytes = new.worker.engine().storage().layout().block_bytes() as u64;
    (0..50).for_each(|_| new.worker.peer_links().observe(&old.peer().worker_id, num_bytes, 1.0));
    let turn = prompt(20, 250);
    generate(&old.client().await, request(&turn, 1, None)).await.unwrap().finished();
    let answer = generate(&client, asked(&turn)).await.unwrap();
    assert_eq!(answer, Answer { tokens: expected(&turn, 1), end: End::Finished { cached_tokens: 0 } });
    let last = asked(&turns[6]);
    old.kill();
    assert_eq!(generate(&client, last).await.unwrap().finished(), expected(&turns[6], 1));
    new.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_and_a_source_that_are_stuck_cost_the_time_of_computing_once() {
    const NUM_BLOCKS: usize = 25;
    let (lock, num_steps) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
    let (held, count) = (lock.clone(), num_steps.clone());
    let hook = move |batch: &Batch<'_>| {
        count.fetch_add(1, Ordering::Relaxed);
        drop(held.blocking_lock());
        let num_tokens: usize = batch.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        std::thread::sleep(Duration::from_millis(6) * num_tokens as u32);
        Ok(())
    };
    let with = |config: &mut WorkerConfig| {
        config.fetch_deadline = None;
        config.host_kv_bytes = Some(1 << 20);
        config.kv = KvMemory::Blocks(40);
    };
    let new = decode().with(with).hook(Box::new(hook)).start().await;
    let client = new.client().await;
    let tiers = new.worker.tiers().expect("a host tier");
    let saved = async |num_blocks: usize| {
        while tiers.counts()[0].num_held < num_blocks as u64 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    // The pool loses all of the first one.
    let turns: Vec<_> = (3..6).map(|seed| prompt(seed, NUM_BLOCKS * BLOCK_SIZE + 1)).collect();
    for (nth, turn) in turns.iter().enumerate() {
        generate(&client, request(turn, 1, None)).await.unwrap().finished();
        timeout(PATIENCE, saved((nth + 1) * NUM_BLOCKS)).await.expect("it is saved");
    }
    // A recall waits for an engine that is in a step, and this listener never answers.
    let held = lock.lock().await;
    let before = num_steps.load(Ordering::Relaxed);
    let other = prompt(9, 20);
    let busy = generate(&client, request(&other, 1, None));
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", silent.local_addr().unwrap());
    let source = proto::PrefillPeer { worker_id: "silent".into(), incarnation: 1, address };
    let asked = async {
        while num_steps.load(Ordering::Relaxed) == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let one = proto::GenerateRequest { prefix_source: Some(source), ..request(&turns[0], 1, None) };
        generate(&client, one).await
    };
    let stuck = async {
        new.await_metric("baton_prefix_wait_seconds_count{source=\"tiers\"} 1").await;
        drop(held);
    };
    let (busy, answer, ()) = tokio::join!(busy, asked, stuck);
    assert_eq!(busy.unwrap().finished(), expected(&other, 1));
    assert_eq!(answer.unwrap().finished(), expected(&turns[0], 1));
    let metrics = new.metrics().await;
    let waited = |source: &str| -> f64 {
        let name = format!("baton_prefix_wait_seconds_sum{{source=\"{source}\"}} ");
        let seconds = metrics.lines().find_map(|line| line.strip_prefix(name.as_str()));
        seconds.expect("it is measured").parse().expect("a number")
    };
    let [tiers, worker] = ["tiers", "worker"].map(waited);
    assert!(worker < 0.5 * tiers, "{worker} s after {tiers} s");
    new.assert_all_free().await;
}
