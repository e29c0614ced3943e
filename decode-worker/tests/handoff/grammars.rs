//! A prefill worker looks at the prompt before it compiles the grammar, and at the stream while it compiles.

use std::{
    sync::{Mutex, mpsc},
    time::Duration,
};

use baton_engine::SamplingParams;
use baton_grammar::{GrammarError, Vocabulary, VocabularyToken};
use baton_proto::{
    v1,
    worker::{self as proto, DrainRequest, failed::Kind, worker_client::WorkerClient},
};
use baton_request::{Grammar, GrammarKind};
use tokio::{sync::mpsc as async_mpsc, time::timeout};

use crate::{
    gate::gate,
    harness::{Builder, PATIENCE, TestWorker, decode, expected, generate, prefill, prompt, read, request},
};

/// A letter and the end.
fn vocabulary() -> Result<Vocabulary, GrammarError> {
    let token = |text: &str, is_special| VocabularyToken { bytes: text.into(), is_special };
    Vocabulary::new([token("a", false), token("<end>", true)], &[1], Box::new(|_| Vec::new()))
}

/// A worker's compiler that stops before its first grammar.
struct Stopped {
    arrivals: async_mpsc::UnboundedReceiver<()>,
    /// It goes on when this is dropped.
    _permit: mpsc::Sender<()>,
}

fn stopped(worker: Builder) -> (Builder, Stopped) {
    let (arrive, arrivals) = async_mpsc::unbounded_channel();
    let (permit, permitted) = mpsc::channel();
    let permitted = Mutex::new(permitted);
    let worker = worker.grammars(move || {
        let _ = arrive.send(());
        let _ = permitted.lock().expect("no panic").recv();
        vocabulary()
    });
    (worker, Stopped { arrivals, _permit: permit })
}

/// A request with a grammar.
fn constrained(prefill: &TestWorker) -> proto::GenerateRequest {
    let grammar = Some(Grammar::new(GrammarKind::Regex, "a*"));
    let sampling = SamplingParams { max_tokens: 8, grammar, ..SamplingParams::default() };
    let sampling = Some((&sampling).into());
    proto::GenerateRequest { sampling, ..request(&prompt(2, 30), 8, Some(prefill.peer())) }
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_while_the_prefill_worker_compiles_its_grammar() {
    let (p, mut compiler) = stopped(prefill());
    let (p, d) = (p.start().await, decode().grammars(vocabulary).start().await);
    let mut client = d.client().await;
    let passages = vec![v1::TokenRange { start: 0, end: 20 }];
    let blend = Some(proto::Blend { passages, ratio: None, layer: 0 });
    let events = client.generate(proto::GenerateRequest { blend, ..constrained(&p) }).await.unwrap();
    timeout(PATIENCE, compiler.arrivals.recv()).await.expect("in time").expect("it compiles");
    drop(events);
    // It still compiles.
    p.await_metric("baton_handoffs_total{outcome=\"cancelled\"} 1").await;
    d.assert_all_free().await;
    let metrics = p.metrics().await;
    let mut refused = metrics.lines().filter(|line| line.starts_with("baton_blends_refused_total"));
    assert!(refused.all(|line| line.ends_with(" 0")), "it was decided whether to blend it: {metrics}");
    drop(compiler);
    p.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_prefill_worker_compiles_no_grammar_of_a_prompt_that_it_refuses() {
    let (steps, hook) = gate();
    let (p, mut compiler) = stopped(prefill().hook(hook));
    let (mut p, d) = (p.start().await, decode().grammars(vocabulary).start().await);
    let mut client = d.client().await;
    // It drains as long as it computes this one.
    let prompt = prompt(1, 80);
    let mut events = client.generate(request(&prompt, 8, Some(p.peer()))).await.unwrap().into_inner();
    tokio::task::block_in_place(|| steps.pass(1));
    let mut control = WorkerClient::connect(p.address()).await.unwrap();
    control.drain(DrainRequest {}).await.unwrap();

    let refused = generate(&client, constrained(&p)).await.unwrap();
    assert_eq!(refused.failed().0, Kind::PrefillDraining, "{refused:?}");
    assert!(compiler.arrivals.try_recv().is_err(), "it compiled");
    steps.open();
    assert_eq!(read(&mut events).await.unwrap().finished(), expected(&prompt, 8));
    p.ended().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vocabulary_that_never_loads_holds_a_handoff_until_its_deadline() {
    let (p, compiler) = stopped(prefill());
    let soon = Duration::from_millis(300);
    let d = decode().grammars(vocabulary).with(|config| config.handoff_deadline = soon);
    let (p, d) = (p.start().await, d.start().await);
    let client = d.client().await;
    let answer = generate(&client, constrained(&p)).await.unwrap();
    assert_eq!(answer.failed().0, Kind::Deadline, "{answer:?}");
    d.assert_all_free().await;
    drop(compiler);
    p.assert_all_free().await;
}
