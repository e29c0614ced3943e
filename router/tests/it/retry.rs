use std::time::Duration;

use baton_cluster::Role;
use baton_proto::worker::{GenerateRequest, failed::Kind};
use baton_request::FailureKind;
use bytes::Bytes;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::{
    client::Client,
    fake::{FakeWorker, Step, say},
    harness::{Router, SOON},
    model::{END, ids},
};

const TEXT: &str = "/v1/completions";

/// Sends `answer`. The first attempt ends with `end` after `num_tokens` tokens.
fn fail_once(
    answer: &str,
    num_tokens: usize,
    end: Step,
) -> impl Fn(&GenerateRequest) -> Vec<Step> + Send + Sync + 'static {
    let say = say(answer);
    move |request| {
        let mut steps = say(request);
        if request.attempt == 0 {
            steps.truncate(num_tokens);
            steps.push(end.clone());
        }
        steps
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_token_comes_exactly_once_after_any_failure() {
    let ends = [
        Step::Break,
        Step::End,
        Step::Fail(Kind::Full),
        Step::Fail(Kind::PrefillLost),
        Step::Fail(Kind::KvRejected),
        Step::Fail(Kind::Deadline),
        Step::Fail(Kind::Draining),
        Step::Fail(Kind::Internal),
    ];
    for end in ends {
        for num_tokens in [0, 1, 3] {
            if num_tokens == 0 && matches!(end, Step::Fail(Kind::Full)) {
                continue; // Before the first token the client is told that all workers are full.
            }
            let (router, worker) = Router::with_worker().await;
            worker.script(fail_once("Hé!!", num_tokens, end.clone()));
            let body = json!({"prompt": "x", "stream": true, "seed": 5});
            let events = router.client.post(TEXT, &body).await.events();
            let text: String =
                events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
            assert_eq!(text, "Hé!!", "{end:?} after {num_tokens}");
            let requests = worker.requests();
            assert_eq!(requests.len(), 2, "{end:?} after {num_tokens}");
            let (first, second) = (&requests[0], &requests[1]);
            assert_eq!((first.attempt, second.attempt), (0, 1));
            assert_eq!(second.output_token_ids, ids("Hé!!")[..num_tokens]);
            assert_eq!(
                (&first.prompt_token_ids, &first.sampling),
                (&second.prompt_token_ids, &second.sampling)
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_fails_twice_is_an_internal_error_at_once() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| vec![Step::Fail(Kind::Model)]);
    let started = std::time::Instant::now();
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await;
    assert_eq!(answer.status, 500, "{}", answer.text());
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("the model cannot answer"));
    assert_eq!(worker.requests().len(), 2);
    // Patience is a minute, and 16 attempts took 58 s.
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_with_progress_does_not_time_out() {
    let (router, worker) =
        Router::with_worker_and(|config| config.stall_timeout = Duration::from_secs(3)).await;
    worker.script(|request| {
        let signs = (0..4).map(|_| Step::Progress(Duration::from_secs(1)));
        signs.chain(say("Hello")(request)).collect()
    });
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await;
    assert_eq!(answer.json()["choices"][0]["text"], "Hello", "{}", answer.text());
    assert_eq!(worker.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_random_seed_is_kept_over_attempts() {
    let (router, worker) = Router::with_worker().await;
    worker.script(fail_once("Hello", 2, Step::Break));
    assert_eq!(router.client.post(TEXT, &json!({"prompt": "x"})).await.status, 200);
    assert_eq!(router.client.post(TEXT, &json!({"prompt": "x"})).await.status, 200);
    let seeds: Vec<_> =
        worker.requests().iter().map(|request| request.sampling.as_ref().unwrap().seed).collect();
    assert_eq!(seeds[0], seeds[1]);
    assert_ne!(seeds[1], seeds[2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_worker_is_killed_and_comes_back() {
    let (mut router, worker) = Router::with_worker().await;
    worker.script(|_| ids("Hel").into_iter().map(Step::Token).chain([Step::Hang]).collect());
    let json = [("content-type", "application/json")];
    let body = Bytes::from(json!({"prompt": "x", "stream": true}).to_string());
    let response = router.client.begin("POST", TEXT, &json, body).await;
    worker.next_arrived().await;
    worker.kill();
    router.withdraw_first().await;

    let worker = FakeWorker::start("d0", Role::Decode, 2).await;
    worker.script(say("Hello"));
    router.register(&worker).await;
    let text = tokio::time::timeout(SOON, response.into_body().collect()).await.unwrap().unwrap().to_bytes();
    let text = String::from_utf8(text.to_vec()).unwrap();
    let pieces: Vec<_> =
        text.split("\"text\":\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert_eq!(pieces.concat(), "Hello", "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let continued = &worker.requests()[0];
    assert_eq!(ids("Hello")[..continued.output_token_ids.len()], continued.output_token_ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_drains_is_avoided_and_not_blamed() {
    let (mut router, worker) = Router::with_worker().await;
    worker.script(|request| match request.attempt {
        0 => vec![Step::Refuse(FailureKind::Draining)],
        _ => say("Hello")(request),
    });
    let other = FakeWorker::start("d1", Role::Decode, 1).await;
    router.register(&other).await;
    for num in 1..=2 {
        let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await.json();
        assert_eq!(answer["choices"][0]["text"], "Hello");
        // After a crash the router would avoid the worker for a while.
        assert_eq!((worker.requests().len(), other.requests().len()), (num, num));
    }
    router.until_metric("baton_router_attempt_failures_total{reason=\"draining\"} 2").await;
    router.until_metric("baton_router_worker_attempt_failures_total{worker=\"d0\"} 0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_ends_with_its_worker_s_drain_is_no_crash() {
    let (mut router, worker) = Router::with_worker().await;
    worker.script(fail_once("Hello", 1, Step::Hang));
    let request = json!({"prompt": "x", "stream": true}).to_string();
    let json = [("content-type", "application/json")];
    let response = router.client.begin("POST", TEXT, &json, Bytes::from(request)).await;
    worker.next_arrived().await;
    worker.set_draining();
    router.until_metric("baton_router_workers{role=\"decode\",state=\"draining\"} 1").await;
    let other = FakeWorker::start("d1", Role::Decode, 1).await;
    other.script(say("Hello"));
    router.register(&other).await;
    worker.release(Step::Break);
    response.into_body().collect().await.unwrap();
    router.until_metric("baton_router_attempt_failures_total{reason=\"draining\"} 1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_worker_takes_over_at_once() {
    let (mut router, worker) = Router::with_worker().await;
    worker.script(fail_once("Hello", 2, Step::Break));
    let other = FakeWorker::start("d1", Role::Decode, 1).await;
    router.register(&other).await;
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await.json();
    assert_eq!(answer["choices"][0]["text"], "Hello");
    // d0 is taken first: they are equally idle.
    assert_eq!((worker.requests().len(), other.requests().len()), (1, 1));
    assert_eq!(other.requests()[0].output_token_ids, ids("He"));
    router.until_metric("baton_router_attempt_failures_total{reason=\"lost\"} 1").await;
    router.until_metric("baton_router_worker_attempt_failures_total{worker=\"d0\"} 1").await;
    router.until_metric("baton_router_worker_attempt_failures_total{worker=\"d1\"} 0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_terminal_event_costs_no_second_attempt() {
    for (tokens, max_tokens, reason) in [(vec![104, END], 16, "stop"), (vec![104, 105], 2, "length")] {
        let (router, worker) = Router::with_worker().await;
        worker.script(move |_| tokens.iter().map(|id| Step::Token(*id)).chain([Step::Break]).collect());
        let body = json!({"prompt": "x", "max_tokens": max_tokens});
        let answer = router.client.post(TEXT, &body).await.json();
        assert_eq!(answer["choices"][0]["finish_reason"], reason);
        assert_eq!(answer["usage"]["completion_tokens"], 2);
        assert_eq!(worker.requests().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_without_progress_are_bounded() {
    let (router, worker) = Router::with_worker_and(|config| config.max_attempts = 3).await;
    worker.script(|_| vec![Step::Fail(Kind::Internal)]);
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await;
    assert_eq!(answer.status, 503);
    let error = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(error, "the request failed 3 times in a row, last: scripted Internal");
    assert_eq!(worker.requests().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_worker_is_abandoned_after_the_stall_timeout() {
    let (mut router, worker) =
        Router::with_worker_and(|config| config.stall_timeout = Duration::from_millis(200)).await;
    worker.script(|_| vec![Step::Token(72), Step::Hang]);
    let other = FakeWorker::start("d1", Role::Decode, 1).await;
    router.register(&other).await;
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await.json();
    assert_eq!(answer["choices"][0]["text"], "Hello");
    worker.next_dropped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_worker_is_detected_by_keep_alive() {
    let (mut router, worker) =
        Router::with_worker_and(|config| config.keep_alive = Duration::from_millis(300)).await;
    worker.script(|_| ids("He").into_iter().map(Step::Token).chain([Step::Freeze]).collect());
    let other = FakeWorker::start("d1", Role::Decode, 1).await;
    router.register(&other).await;
    // The connection stays open. Only the unanswered ping reveals the freeze, long before `stall_timeout`.
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await.json();
    assert_eq!(answer["choices"][0]["text"], "Hello");
    let delivered = &other.requests()[0].output_token_ids;
    assert_eq!(ids("Hello")[..delivered.len()], *delivered);
    router.until_metric("baton_router_workers{role=\"decode\",state=\"unreachable\"} 1").await;
}

/// Its connection stays open, and it would answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_reports_no_load_gets_no_request_until_it_reports_again() {
    let (mut router, worker) = Router::with_worker().await;
    let other = FakeWorker::start("d1", Role::Decode, 1).await;
    router.register(&other).await;
    let answers = |wanted: bool| {
        move |health: &Value| {
            let workers = health["workers"].as_array().expect("a list");
            workers.iter().any(|worker| worker["id"] == "d0" && worker["answers"] == wanted)
        }
    };
    worker.fall_silent();
    router.until_health(answers(false)).await;
    for _ in 0..20 {
        assert_eq!(router.client.post(TEXT, &json!({"prompt": "x"})).await.status, 200);
    }
    assert_eq!((worker.requests().len(), other.requests().len()), (0, 20));

    worker.report_again();
    router.until_health(answers(true)).await;
    assert_eq!(router.client.post(TEXT, &json!({"prompt": "x"})).await.status, 200);
    // d0 is taken first: they are equally idle.
    assert_eq!((worker.requests().len(), other.requests().len()), (1, 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_request_is_planned_again_while_the_router_drains() {
    let (router, worker) = Router::with_worker().await;
    worker.script(fail_once("Hello", 2, Step::Hang));
    let json = [("content-type", "application/json")];
    let body = Bytes::from(json!({"prompt": "x", "stream": true}).to_string());
    let response = router.client.begin("POST", TEXT, &json, body).await;
    router.begin_shutdown();
    // The worker fails after the router has stopped to accept connections.
    while Client::new(router.address).try_connect().await {
        tokio::task::yield_now().await;
    }
    worker.release(Step::Break);
    let text = tokio::time::timeout(SOON, response.into_body().collect()).await.unwrap().unwrap().to_bytes();
    assert!(text.ends_with(b"data: [DONE]\n\n"), "{text:?}");
    assert_eq!(worker.requests().len(), 2);
    router.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_outage_is_a_pause_for_new_requests_too() {
    let (mut router, worker) = Router::with_worker().await;
    router.withdraw_first().await;
    drop(worker);
    let client = Client::new(router.address);
    let asked = tokio::spawn(async move { client.post(TEXT, &json!({"prompt": "x"})).await });
    router.until_metric("baton_router_requests_waiting 1").await;
    let worker = FakeWorker::start("d0", Role::Decode, 2).await;
    router.register(&worker).await;
    assert_eq!(asked.await.unwrap().status, 200);
    router.until_metric("baton_router_requests_waiting 0").await;

    let (mut router, _worker) =
        Router::with_worker_and(|config| config.recovery_timeout = Duration::ZERO).await;
    router.withdraw_first().await;
    router.until("/readyz", 503).await;
    assert_eq!(router.client.post(TEXT, &json!({"prompt": "x"})).await.status, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn long_prompts_use_a_prefill_worker_that_may_fail() {
    let (mut router, worker) = Router::with_worker().await;
    let prefill = FakeWorker::start("p0", Role::Prefill, 7).await;
    router.register(&prefill).await;
    let long = |first: char| json!({"prompt": format!("{first}{}", "y".repeat(63))});

    assert_eq!(router.client.post(TEXT, &long('a')).await.status, 200);
    let peer = worker.requests()[0].prefill.clone().expect("a remote prefill");
    assert_eq!((peer.worker_id.as_str(), peer.incarnation), ("p0", 7));
    assert_eq!(peer.address, prefill.record.address);

    // The router now knows that the decode worker has cached the whole prompt.
    assert_eq!(router.client.post(TEXT, &long('a')).await.status, 200);
    assert!(worker.requests()[1].prefill.is_none(), "cached prompts stay");

    worker.script(fail_once("Hello", 0, Step::Fail(Kind::PrefillLost)));
    assert_eq!(router.client.post(TEXT, &long('b')).await.status, 200);
    let requests = worker.requests();
    assert!(requests[2].prefill.is_some());
    assert!(requests[3].prefill.is_none(), "the prefill worker has failed: local");
    router.until_metric("baton_router_plans_total{prefill=\"remote\"} 2").await;
    router.until_metric("baton_router_plans_total{prefill=\"local\"} 2").await;

    // A request that demands remote prefill waits until the prefill worker may be used again.
    let mut remote = long('c');
    remote["prefill_mode"] = json!("remote");
    assert_eq!(router.client.post(TEXT, &remote).await.status, 200);
    let requests = worker.requests();
    assert!(requests[4..].iter().all(|request| request.prefill.is_some()));
    assert_eq!(requests.len(), 6, "the first attempt fails as scripted");
}

/// Its first tokens are those of prefill workers, whose KV does not arrive.
#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_that_gets_no_kv_is_left_after_two_tokens() {
    let mut router = Router::start(|_| {}).await;
    let mut workers = Vec::new();
    for (id, role) in
        [("d0", Role::Decode), ("d1", Role::Decode), ("p0", Role::Prefill), ("p1", Role::Prefill)]
    {
        let worker = FakeWorker::start(id, role, 1).await;
        router.register(&worker).await;
        workers.push(worker);
    }
    workers[0].script(|request| {
        let mut steps = say("Hello")(request);
        steps.truncate(1);
        steps.push(Step::Fail(Kind::PrefillLost));
        steps
    });
    let answer = router.client.post(TEXT, &json!({"prompt": "x", "prefill_mode": "remote"})).await;
    assert_eq!(answer.json()["choices"][0]["text"], "Hello", "{}", answer.text());
    assert_eq!((workers[0].requests().len(), workers[1].requests().len()), (2, 1));
}
