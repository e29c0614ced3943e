//! Requests that migrate from one decode worker to another while they run.

use baton_cluster::Role;
use baton_proto::{
    v1,
    worker::{GenerateRequest, failed::Kind},
};
use baton_router::MigrationMode;
use serde_json::json;

use crate::{
    client::Client,
    fake::{FakeWorker, Step, say},
    harness::{Router, SOON},
    model::ids,
};

const TEXT: &str = "/v1/completions";
const ANSWER: &str = "Hello";

/// The first tokens, then `then`. More tokens follow after a release.
fn begin(num_tokens: usize, then: Step) -> impl Fn(&GenerateRequest) -> Vec<Step> + Send + Sync + 'static {
    move |request| {
        let mut steps = say(ANSWER)(request);
        steps.truncate(num_tokens);
        steps.extend([then.clone(), Step::Hang]);
        steps
    }
}

async fn pair(change: impl FnOnce(&mut baton_router::RouterConfig)) -> (Router, FakeWorker, FakeWorker) {
    let (mut router, old) = Router::with_worker_and(change).await;
    let new = FakeWorker::start("d1", Role::Decode, 1).await;
    router.register(&new).await;
    // The request is at the first worker by name: both are idle.
    (router, old, new)
}

async fn ask(router: &Router) -> String {
    let body = json!({"prompt": "x", "stream": true, "seed": 5});
    let events = router.client.post(TEXT, &body).await.events();
    events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect()
}

/// Waits for three requests. The worker with two of them is full.
async fn full_and_empty<'a>(old: &'a FakeWorker, new: &'a FakeWorker) -> (&'a FakeWorker, &'a FakeWorker) {
    for _ in 0..3 {
        tokio::select! {
            _ = old.next_arrived() => {}
            _ = new.next_arrived() => {}
        }
    }
    if old.requests().len() > 1 { (old, new) } else { (new, old) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_worker_is_the_prefix_source_of_the_migrated_request() {
    let (router, old, new) = pair(|_| {}).await;
    old.script(begin(2, Step::Leaving));
    new.script(say(ANSWER));
    assert_eq!(ask(&router).await, ANSWER);
    let [request] = &new.requests()[..] else { panic!("asked once") };
    assert_eq!(request.output_token_ids, ids(ANSWER)[..2]);
    assert!(request.prefill.is_none() && !request.for_balance);
    let source = request.prefix_source.as_ref().expect("it is told who has the KV");
    assert_eq!((source.worker_id.as_str(), source.incarnation), ("d0", 1));
    // The old stream is dropped before its end.
    tokio::time::timeout(SOON, old.next_dropped()).await.expect("the old worker is let go");
    router.until_metric("baton_router_migrations_total{cause=\"drain\",outcome=\"moved\"} 1").await;
}

/// What tells log-probabilities of a prompt leaves its KV in no cache.
#[tokio::test(flavor = "multi_thread")]
async fn a_draining_worker_is_no_source_of_a_prompt_whose_log_probabilities_it_told() {
    let (router, old, new) = pair(|_| {}).await;
    old.script(begin(2, Step::Leaving));
    new.script(say(ANSWER));
    let body = json!({"prompt": "x", "prompt_logprobs": 0, "seed": 5});
    let answer = router.client.post(TEXT, &body).await.json();
    assert_eq!(answer["choices"][0]["text"], ANSWER, "{answer}");
    let [request] = &new.requests()[..] else { panic!("asked once") };
    assert_eq!(request.output_token_ids, ids(ANSWER)[..2]);
    assert!(request.prefix_source.is_none() && request.prefill.is_none(), "{request:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_migration_costs_no_token() {
    let (router, old, new) = pair(|_| {}).await;
    old.script(begin(2, Step::Leaving));
    new.script(|_| vec![Step::Fail(Kind::Full)]);
    let text = ask(&router);
    let rest = async {
        router.until_metric("baton_router_migrations_total{cause=\"drain\",outcome=\"full\"} 1").await;
        // The old worker continues.
        old.release(Step::Finish(v1::FinishReason::Length));
    };
    let (text, ()) = tokio::join!(text, rest);
    assert_eq!(text, "He");
    assert_eq!(old.requests().len(), 1);
    new.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_new_worker_takes_over_when_the_old_one_dies_during_the_migration() {
    let (router, old, new) = pair(|_| {}).await;
    old.script(begin(2, Step::Leaving));
    new.script(|request| [vec![Step::Hang], say(ANSWER)(request)[1..].to_vec()].concat());
    let text = ask(&router);
    let rest = async {
        tokio::time::timeout(SOON, new.next_arrived()).await.expect("it is asked");
        old.kill();
        new.release(Step::Token(ids(ANSWER)[2]));
    };
    let (text, ()) = tokio::join!(text, rest);
    assert_eq!(text, ANSWER);
    assert_eq!(new.requests().len(), 1, "the attempt under way goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_the_old_worker_sends_meanwhile_come_once() {
    let (router, old, new) = pair(|_| {}).await;
    old.script(|request| {
        let all = say(ANSWER)(request);
        [&all[..1], &[Step::Leaving, Step::Hang], &all[2..3], &[Step::Silence]].concat()
    });
    new.script(|request| [vec![Step::Hang], say(ANSWER)(request)[1..].to_vec()].concat());
    let text = ask(&router);
    let rest = async {
        tokio::time::timeout(SOON, new.next_arrived()).await.expect("it is asked");
        // The old worker sends one more token while the new one prepares. The new worker sends it again.
        old.release(Step::Token(ids(ANSWER)[1]));
        router.until_metric("baton_router_output_tokens_total 3").await;
        new.release(Step::Token(ids(ANSWER)[1]));
    };
    let (text, ()) = tokio::join!(text, rest);
    assert_eq!(text, ANSWER);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_first_token_differs_from_a_delivered_one_does_not_get_the_request() {
    let (router, old, new) = pair(|_| {}).await;
    old.script(|request| {
        let all = say(ANSWER)(request);
        [&all[..1], &[Step::Leaving, Step::Hang, Step::Silence]].concat()
    });
    new.script(|request| match request.attempt {
        1 => vec![Step::Hang],
        _ => say(ANSWER)(request),
    });
    let text = ask(&router);
    let rest = async {
        tokio::time::timeout(SOON, new.next_arrived()).await.expect("it is asked");
        old.release(Step::Token(ids(ANSWER)[1]));
        router.until_metric("baton_router_output_tokens_total 2").await;
        new.release(Step::Token(ids("x")[0]));
    };
    let (text, ()) = tokio::join!(text, rest);
    assert_eq!(text, ANSWER);
    for outcome in ["diverged", "moved"] {
        let line = format!("baton_router_migrations_total{{cause=\"drain\",outcome=\"{outcome}\"}} 1");
        router.until_metric(&line).await;
    }
    // The old stream went on, and the request left it later.
    assert_eq!(old.requests().len(), 1);
    let [_, again] = &new.requests()[..] else { panic!("asked twice") };
    assert_eq!(again.output_token_ids, ids(ANSWER)[..2]);
    assert_eq!(again.prefix_source.as_ref().expect("it migrates").worker_id, "d0");
    let metrics = router.client.get("/metrics").await.text();
    let line = "\nbaton_router_attempt_failures_total{reason=\"diverged\"} 0\n";
    assert!(metrics.contains(line), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_repeats_a_later_token_differently_fails_the_attempt() {
    let (router, old, new) = pair(|_| {}).await;
    old.script(|request| match request.attempt {
        0 => {
            let all = say(ANSWER)(request);
            [&all[..1], &[Step::Leaving, Step::Hang], &all[2..3], &[Step::Silence]].concat()
        }
        _ => say(ANSWER)(request),
    });
    new.script(|request| match request.attempt {
        1 => vec![Step::Hang, Step::Token(ids("x")[0])],
        _ => say(ANSWER)(request),
    });
    let text = ask(&router);
    let rest = async {
        tokio::time::timeout(SOON, new.next_arrived()).await.expect("it is asked");
        old.release(Step::Token(ids(ANSWER)[1]));
        router.until_metric("baton_router_output_tokens_total 3").await;
        new.release(Step::Token(ids(ANSWER)[1]));
    };
    let (text, ()) = tokio::join!(text, rest);
    assert_eq!(text, ANSWER);
    router.until_metric("baton_router_attempt_failures_total{reason=\"diverged\"} 1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_stay_when_migration_is_off() {
    let (router, old, new) = pair(|config| config.migration = MigrationMode::Off).await;
    old.script(|request| [&[Step::Leaving][..], &say(ANSWER)(request)].concat());
    assert_eq!(ask(&router).await, ANSWER);
    assert_eq!(new.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_leaves_while_a_request_migrates_for_balance_is_left_if_that_fails() {
    let (router, old, new) = pair(|_| {}).await;
    let crowd = |request: &GenerateRequest| {
        [begin(2, Step::Token(ids(ANSWER)[2]))(request), vec![Step::Silence]].concat()
    };
    old.script(crowd);
    new.script(crowd);
    let three = futures_util::future::join_all((0..3).map(|_| ask(&router)));
    let rest = async {
        let (full, empty) = full_and_empty(&old, &new).await;
        empty.script(|request| if request.for_balance { vec![Step::Hang] } else { say(ANSWER)(request) });
        // The third request fails with the migration, and may be tried again at either.
        full.script(say(ANSWER));
        full.set_free_blocks(4);
        empty.next_arrived().await;
        // It says so once, to the request that migrates and to the other one, which goes to the empty worker.
        full.release(Step::Leaving);
        router.until_metric("baton_router_migrations_total{cause=\"drain\",outcome=\"moved\"} 1").await;
        empty.release(Step::Fail(Kind::MigrationRefused));
    };
    let (texts, ()) = tokio::join!(three, rest);
    assert_eq!(texts, [ANSWER; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_a_crowded_worker_migrates_to_an_empty_one() {
    let (router, old, new) = pair(|_| {}).await;
    old.script(begin(2, Step::Token(ids(ANSWER)[2])));
    new.script(begin(2, Step::Token(ids(ANSWER)[2])));
    let three = futures_util::future::join_all((0..3).map(|_| ask(&router)));
    let rest = async {
        let (full, empty) = full_and_empty(&old, &new).await;
        let num_before = empty.requests().len();
        empty.script(say(ANSWER));
        full.set_free_blocks(4);
        router.until_metric("baton_router_migrations_total{cause=\"balance\",outcome=\"moved\"} 1").await;
        let moved = empty.requests()[num_before].clone();
        assert!(moved.for_balance, "the worker decides by it");
        assert_eq!(moved.prefix_source.map(|source| source.worker_id), Some(full.record.id.0.clone()));
        // One request remains there and stays.
        full.set_free_blocks(64);
        old.release(Step::Finish(v1::FinishReason::Length));
        new.release(Step::Finish(v1::FinishReason::Length));
    };
    let (mut texts, ()) = tokio::join!(three, rest);
    texts.sort();
    assert_eq!(texts, ["Hel", "Hel", ANSWER]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_log_probabilities_of_its_prompt_stays_when_others_leave_for_balance() {
    let (mut router, old) = Router::with_worker().await;
    old.script(begin(2, Step::Hang));
    let mut asked = Vec::new();
    for (num_tokens, prompt_logprobs) in [(2, None), (4, None), (6, Some(1))] {
        let (address, body) = (router.address, json!({"prompt": "x", "prompt_logprobs": prompt_logprobs}));
        asked.push(tokio::spawn(async move { Client::new(address).post(TEXT, &body).await.status }));
        router.until_metric(&format!("baton_router_output_tokens_total {num_tokens}")).await;
    }
    let new = FakeWorker::start("d1", Role::Decode, 1).await;
    new.script(say(ANSWER));
    router.register(&new).await;
    // The newest is told first.
    old.set_free_blocks(4);
    router.until_metric("baton_router_migrations_total{cause=\"balance\",outcome=\"moved\"} 1").await;
    let [moved] = &new.requests()[..] else { panic!("one leaves") };
    assert_eq!(moved.sampling.as_ref().unwrap().prompt_logprobs, None);
    old.release(Step::Finish(v1::FinishReason::Length));
    for asked in asked {
        assert_eq!(asked.await.unwrap(), 200);
    }
}
