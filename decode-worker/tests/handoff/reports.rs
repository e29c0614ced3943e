//! What load reports tell a router: which of its requests they count, and how fast KV travels.

use std::time::Duration;

use baton_handoff::TransportKind;
use baton_proto::{
    v1,
    worker::{self as proto, Ticket},
};

use crate::{
    gate::gate,
    harness::{TestWorker, decode, expected, generate, prefill, prompt, read, request},
};

const ROUTER: u64 = 7;

fn numbered(number: u64, prompt: &[u32], prefill: Option<proto::PrefillPeer>) -> proto::GenerateRequest {
    let ticket = Some(Ticket { router: ROUTER, number, settled_below: 0 });
    proto::GenerateRequest { ticket, prefill_ticket: ticket, ..request(prompt, 4, prefill) }
}

fn report(worker: &TestWorker) -> v1::Load {
    worker.worker.load(ROUTER)
}

/// Waits until the worker's reports count all requests below `below`.
async fn until_covered(worker: &TestWorker, below: u64) {
    let covered = async {
        while report(worker).covered.expect("the router has a name").below < below {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), covered).await.expect("it is covered");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_covered_when_its_worker_counts_it() {
    let (steps, hook) = gate();
    let p = prefill().hook(hook).start().await;
    let d = decode().start().await;
    let prompts = [prompt(1, 80), prompt(2, 50)];
    let mut client = d.client().await;
    let mut first = client.generate(numbered(0, &prompts[0], Some(p.peer()))).await.unwrap().into_inner();
    until_covered(&p, 1).await;
    until_covered(&d, 1).await;
    // Covered in the queue, it is given its blocks by the engine's thread.
    let reserved = async {
        loop {
            let load = report(&d);
            if load.num_free_blocks < load.num_total_blocks {
                return load.num_free_blocks;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let num_free =
        tokio::time::timeout(Duration::from_secs(20), reserved).await.expect("its blocks are reserved");

    // The prefill worker is in the midst of a step.
    let mut second = client.generate(numbered(1, &prompts[1], Some(p.peer()))).await.unwrap().into_inner();
    until_covered(&p, 2).await;
    assert_eq!(report(&p).num_queued_tokens, 80 + 50);
    let load = report(&d);
    assert_eq!(load.covered, Some(v1::Covered { below: 1, numbers: vec![] }), "it has no blocks yet");
    assert_eq!(load.num_free_blocks, num_free);
    assert_eq!(d.worker.load(0).covered, None, "a reader without a name gets no echo");

    steps.open();
    for (prompt, events) in [(&prompts[0], &mut first), (&prompts[1], &mut second)] {
        assert_eq!(read(events).await.unwrap().finished(), expected(prompt, 4));
    }
    until_covered(&d, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_that_waits_is_covered_and_counted_once() {
    let (steps, hook) = gate();
    let p = prefill().start().await;
    let d = decode().hook(hook).with(|config| config.max_running = 1).start().await;
    let prompts = [prompt(1, 80), prompt(2, 50)];
    let mut client = d.client().await;
    let mut first = client.generate(numbered(0, &prompts[0], Some(p.peer()))).await.unwrap().into_inner();
    steps.pass(0);
    // The first one decodes and has the only slot.
    let mut second = client.generate(numbered(1, &prompts[1], Some(p.peer()))).await.unwrap().into_inner();
    until_covered(&d, 2).await;
    let load = report(&d);
    assert_eq!((load.num_running, load.num_waiting), (1, 1));
    assert_eq!(load.num_queued_blocks, 14, "13 for its prompt, and one to grow");
    assert_eq!(load.recent_tokens_per_step, 1.0, "it drafts nothing");

    steps.open();
    for (prompt, events) in [(&prompts[0], &mut first), (&prompts[1], &mut second)] {
        assert_eq!(read(events).await.unwrap().finished(), expected(prompt, 4));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_fail_or_are_cancelled_are_covered_too() {
    let (steps, hook) = gate();
    let mut p = prefill().hook(hook).start().await;
    let d = decode().start().await;
    let lost = p.peer();
    let mut client = d.client().await;
    let events = client.generate(numbered(0, &prompt(1, 80), Some(p.peer()))).await.unwrap();
    drop(events);
    until_covered(&d, 1).await;
    steps.open();
    p.kill();
    generate(&client, numbered(1, &prompt(1, 80), Some(lost))).await.unwrap().failed();
    until_covered(&d, 2).await;
    // Refused.
    let too_long = numbered(2, &vec![1; 100_000], None);
    generate(&client, too_long).await.unwrap_err();
    until_covered(&d, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn handoffs_measure_the_link() {
    let p = prefill().transport(TransportKind::Tcp).start().await;
    let d = decode().transport(TransportKind::Tcp).start().await;
    assert_eq!(report(&p).links, []);
    generate(&d.client().await, request(&prompt(1, 80), 4, Some(p.peer()))).await.unwrap().finished();
    let links = report(&p).links;
    assert_eq!(links.len(), 1, "{links:?}");
    assert_eq!(links[0].transport, "tcp");
    assert!(links[0].bytes_per_second > 1e3 && links[0].latency_seconds < 5.0, "{links:?}");
    let step = report(&p).step.expect("it has computed");
    assert!(step.num_steps > 0 && step.fixed > 0.0, "{step:?}");
}
