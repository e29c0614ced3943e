//! Workers that drain finish running requests and refuse new ones.

use std::time::Duration;

use baton_proto::{
    failure_from_status,
    worker::{DrainRequest, failed::Kind, generate_event::Event, worker_client::WorkerClient},
};
use baton_request::FailureKind;
use tonic::Code;

use crate::{
    gate::gate,
    harness::{decode, expected, generate, next, prefill, prompt, read, request},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_decode_worker_finishes_running_requests_and_refuses_new_ones() {
    let p = prefill().start().await;
    let (steps, hook) = gate();
    let mut d = decode().hook(hook).start().await;
    let mut client = d.client().await;
    let prompt = prompt(1, 30);
    let mut events = client.generate(request(&prompt, 8, Some(p.peer()))).await.unwrap().into_inner();
    assert!(matches!(next(&mut events).await.unwrap(), Some(Event::Token(_))));
    tokio::task::block_in_place(|| steps.pass(0));

    let mut control = WorkerClient::connect(d.address()).await.unwrap();
    control.drain(DrainRequest {}).await.unwrap();
    let status = generate(&client, request(&prompt, 8, None)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(failure_from_status(&status).kind, FailureKind::Draining);
    steps.open();
    let rest = read(&mut events).await.unwrap().finished();
    assert_eq!(rest, expected(&prompt, 8)[1..]);
    d.ended().await;
    p.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_prefill_worker_finishes_its_handoffs_and_refuses_new_ones() {
    let (steps, hook) = gate();
    let mut p = prefill().hook(hook).start().await;
    let d = decode().start().await;
    let mut client = d.client().await;
    let prompt = prompt(1, 80);
    let mut events = client.generate(request(&prompt, 8, Some(p.peer()))).await.unwrap().into_inner();
    tokio::task::block_in_place(|| steps.pass(1));

    let mut control = WorkerClient::connect(p.address()).await.unwrap();
    control.drain(DrainRequest {}).await.unwrap();
    let refused = generate(&client, request(&prompt, 8, Some(p.peer()))).await.unwrap();
    assert_eq!(refused.failed().0, Kind::PrefillDraining, "{refused:?}");
    for worker in [&p, &d] {
        worker.await_metric("baton_handoffs_total{outcome=\"draining\"} 1").await;
    }
    steps.open();
    assert_eq!(read(&mut events).await.unwrap().finished(), expected(&prompt, 8));
    p.ended().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_end_with_a_draining_failure_when_the_drain_timeout_passes() {
    let p = prefill().start().await;
    let (steps, hook) = gate();
    let mut d =
        decode().with(|config| config.drain_timeout = Duration::from_millis(50)).hook(hook).start().await;
    let mut client = d.client().await;
    let mut events = client.generate(request(&prompt(1, 30), 8, Some(p.peer()))).await.unwrap().into_inner();
    assert!(matches!(next(&mut events).await.unwrap(), Some(Event::Token(_))));
    tokio::task::block_in_place(|| steps.pass(0));
    let mut control = WorkerClient::connect(d.address()).await.unwrap();
    control.drain(DrainRequest {}).await.unwrap();
    let answer = read(&mut events).await.unwrap();
    assert_eq!(answer.failed().0, Kind::Draining, "{answer:?}");
    steps.open();
    d.ended().await;
}
