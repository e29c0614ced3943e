//! Dropped streams free every block on both sides.

use std::{thread, time::Duration};

use baton_handoff::TransportKind;
use baton_proto::worker::generate_event::Event;

use crate::{
    gate::gate,
    harness::{decode, expected, generate, next, prefill, prompt, request, transports},
};

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_before_the_prefill_is_computed() {
    let (steps, hook) = gate();
    let p = prefill().hook(hook).start().await;
    let d = decode().start().await;
    let mut client = d.client().await;
    let events = client.generate(request(&prompt(1, 80), 8, Some(p.peer()))).await.unwrap();
    steps.pass(0);
    drop(events);
    // The decode worker frees its blocks as soon as it notices, although the prefill worker is stopped.
    d.assert_all_free().await;
    steps.open();
    p.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_during_the_transfer() {
    let (steps, hook) = gate();
    let p = prefill().hook(hook).start().await;
    let d = decode().start().await;
    let mut client = d.client().await;
    let events = client.generate(request(&prompt(1, 80), 8, Some(p.peer()))).await.unwrap();
    // Two chunks are computed and pushed, the third is about to be.
    steps.pass(2);
    while d.worker.load(0).handoff_bytes.iter().all(|transport| transport.bytes == 0) {
        tokio::task::yield_now().await;
    }
    drop(events);
    steps.open();
    p.assert_all_free().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_while_decoding() {
    let p = prefill().start().await;
    // The whole answer takes a second: on a busy machine the worker hears late that the client left.
    let slow = decode().hook(Box::new(|_| {
        thread::sleep(Duration::from_millis(10));
        Ok(())
    }));
    let d = slow.start().await;
    let mut client = d.client().await;
    let mut events =
        client.generate(request(&prompt(1, 80), 100, Some(p.peer()))).await.unwrap().into_inner();
    for _ in 0..5 {
        assert!(matches!(next(&mut events).await.unwrap(), Some(Event::Token(_))));
    }
    drop(events);
    d.await_metric("baton_worker_requests_ended_total{outcome=\"cancelled\"} 1").await;
    p.assert_all_free().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_while_waiting_for_blocks_of_the_decode_worker() {
    // One sequence takes the whole pool of the decode worker.
    let p = prefill().start().await;
    let (steps, hook) = gate();
    let d = decode().with(|config| config.kv = baton_worker::KvMemory::Blocks(28)).hook(hook).start().await;
    let mut client = d.client().await;
    let large = prompt(1, 100);
    let first = tokio::spawn({
        let (client, request) = (client.clone(), request(&large, 8, Some(p.peer())));
        async move { generate(&client, request).await.unwrap().finished() }
    });
    // It decodes, and waits before its first step.
    tokio::task::block_in_place(|| steps.pass(0));
    let mut second = client.generate(request(&prompt(2, 100), 8, Some(p.peer()))).await.unwrap().into_inner();
    assert!(
        matches!(next(&mut second).await.unwrap(), Some(Event::Token(_))),
        "the first token does not wait"
    );
    drop(second);
    p.assert_all_free().await;
    steps.open();
    assert_eq!(first.await.unwrap(), expected(&large, 8));
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_at_any_moment_over_shm() {
    cancelled_at_any_moment(TransportKind::Shm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_at_any_moment_over_tcp() {
    cancelled_at_any_moment(TransportKind::Tcp).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_at_any_moment_over_rdma() {
    if transports().any(|kind| kind == TransportKind::Rdma) {
        cancelled_at_any_moment(TransportKind::Rdma).await;
    }
}

async fn cancelled_at_any_moment(kind: TransportKind) {
    let (p, d) = (prefill().transport(kind).start().await, decode().transport(kind).start().await);
    let client = d.client().await;
    let mut requests = tokio::task::JoinSet::new();
    for seed in 0..150_u32 {
        let (mut client, peer) = (client.clone(), p.peer());
        requests.spawn(async move {
            let prompt = prompt(seed, 1 + (seed as usize * 37) % 120);
            let call = client.generate(request(&prompt, 24, Some(peer)));
            match seed % 5 {
                // Dropped before the response.
                0 => drop(tokio::time::timeout(std::time::Duration::from_micros(seed.into()), call).await),
                // Dropped after some of its events.
                1..4 => {
                    let mut events = call.await.unwrap().into_inner();
                    for _ in 0..seed % 11 {
                        next(&mut events).await.unwrap();
                    }
                }
                // Read to its end, concurrently with the others.
                _ => {
                    let answer = crate::harness::read(&mut call.await.unwrap().into_inner()).await.unwrap();
                    assert_eq!(answer.finished(), expected(&prompt, 24), "request {seed}");
                }
            }
        });
    }
    while let Some(request) = requests.join_next().await {
        request.unwrap();
    }
    p.assert_all_free().await;
    d.assert_all_free().await;
    d.stop().await;
    p.stop().await;
}
