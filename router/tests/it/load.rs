//! Many requests at once.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_cluster::Role;
use baton_proto::worker::failed::Kind;
use baton_router::RouterConfig;
use bytes::Bytes;
use http_body_util::BodyExt;
use serde_json::json;
use tokio::task::JoinSet;

use crate::{
    client::Client,
    fake::{FakeWorker, Step, say},
    harness::Router,
    model::ids,
};

const TEXT: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

/// The answer of the fake worker for a seed.
fn answer(seed: u64) -> String {
    format!("answer {seed}: ") + &"é".repeat(seed as usize % 7)
}

fn streamed(seed: u64) -> Bytes {
    Bytes::from(json!({"prompt": "x", "stream": true, "seed": seed, "max_tokens": 100}).to_string())
}

fn text_of(body: &[u8]) -> String {
    let body = std::str::from_utf8(body).expect("text");
    assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
    body.split("\"text\":\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect()
}

/// While a client waits for the first token, comments keep its stream open through proxies. A failure comes as an event.
#[tokio::test(flavor = "multi_thread")]
async fn silent_streams_are_kept_open() {
    let change = |config: &mut RouterConfig| {
        (config.stream_keep_alive, config.max_attempts) = (Duration::from_millis(50), 1);
    };
    for (end, last) in [(Step::Token(72), "[DONE]"), (Step::Fail(Kind::Internal), "scripted Internal")] {
        let (router, worker) = Router::with_worker_and(change).await;
        let steps = [Step::Hang, Step::Finish(baton_proto::v1::FinishReason::Length)];
        worker.script(move |_| steps.to_vec());
        let body = Bytes::from(json!({"prompt": "x", "stream": true}).to_string());
        let response = router.client.begin("POST", TEXT, &JSON, body).await;
        assert_eq!(response.status(), 200);
        let mut body = response.into_body();
        for _ in 0..3 {
            let comment =
                body.frame().await.expect("a frame").expect("bytes").into_data().expect("no trailers");
            assert!(comment.starts_with(b": ") && comment.ends_with(b"\n\n"), "{comment:?}");
        }
        worker.release(end);
        let rest = body.collect().await.expect("it ends").to_bytes();
        let rest = String::from_utf8_lossy(&rest);
        assert!(rest.contains("data: {") && rest.contains(last), "{rest}");
    }
}

/// Also while tokens come whose text is held back: white space in front of what may be a call.
#[tokio::test(flavor = "multi_thread")]
async fn streams_whose_text_is_held_back_are_kept_open() {
    let change = |config: &mut RouterConfig| {
        config.stream_keep_alive = Duration::from_millis(100);
        config.tool_format = Some(baton_router::ToolFormat::Hermes);
    };
    let (router, worker) = Router::with_worker_and(change).await;
    worker.script(|_| {
        let spaces = (0..300).flat_map(|_| [Step::Progress(Duration::from_millis(10)), Step::Token(32)]);
        spaces.chain([Step::Finish(baton_proto::v1::FinishReason::Length)]).collect()
    });
    let tools = [json!({"type": "function", "function": {"name": "add"}})];
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": tools, "stream": true});
    let response =
        router.client.begin("POST", "/v1/chat/completions", &JSON, Bytes::from(body.to_string())).await;
    let (mut body, mut text) = (response.into_body(), String::new());
    while !(text.contains("data: ") && text.ends_with(": keep-alive\n\n")) {
        let frame = body.frame().await.expect("a comment comes before the end").expect("bytes");
        text.push_str(std::str::from_utf8(&frame.into_data().expect("no trailers")).expect("text"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_streams_survive_the_death_of_their_only_worker() {
    let (mut router, worker) = Router::with_worker().await;
    worker.script(|request| {
        let seed = request.sampling.as_ref().unwrap().seed;
        let some = ids(&answer(seed)).into_iter().take(seed as usize).map(Step::Token);
        some.chain([Step::Hang]).collect()
    });
    let client = Arc::new(Client::new(router.address));
    let mut streams = JoinSet::new();
    for seed in 0..16 {
        let client = client.clone();
        streams.spawn(async move {
            let response = client.begin("POST", TEXT, &JSON, streamed(seed)).await;
            (seed, text_of(&response.into_body().collect().await.unwrap().to_bytes()))
        });
    }
    for _ in 0..16 {
        worker.next_arrived().await;
    }
    worker.kill();
    router.withdraw_first().await;
    let worker = FakeWorker::start("d0", Role::Decode, 2).await;
    worker.script(|request| say(&answer(request.sampling.as_ref().unwrap().seed))(request));
    router.register(&worker).await;
    while let Some(stream) = streams.join_next().await {
        let (seed, text) = stream.unwrap();
        assert_eq!(text, answer(seed), "seed {seed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_failures_and_cancellations_leave_no_stream_open() {
    let (mut router, worker) = Router::with_worker_and(|config| config.max_attempts = 1000).await;
    let other = FakeWorker::start("d1", Role::Decode, 1).await;
    router.register(&other).await;
    for worker in [&worker, &other] {
        worker.script(|request| {
            let seed = request.sampling.as_ref().unwrap().seed;
            let mut steps = say(&answer(seed))(request);
            // Some first attempts fail at a random token in a random way.
            if request.attempt == 0 && seed % 3 == 0 {
                steps.truncate(seed as usize % 11 + 1);
                let ends = [Step::Break, Step::End, Step::Fail(Kind::Internal), Step::Fail(Kind::Deadline)];
                steps.push(ends[seed as usize % 4].clone());
            } else if seed % 10 == 7 {
                // These clients leave, or their streams never end.
                steps.truncate(seed as usize % 5);
                steps.push(Step::Hang);
            }
            steps
        });
    }
    let client = Arc::new(Client::new(router.address));
    let room = Arc::new(tokio::sync::Semaphore::new(48));
    let mut requests = JoinSet::new();
    for seed in 0..600u64 {
        let (client, room) = (client.clone(), room.clone());
        requests.spawn(async move {
            let _permit = room.acquire_owned().await.unwrap();
            let request = async {
                let response = client.begin("POST", TEXT, &JSON, streamed(seed)).await;
                assert_eq!(response.status(), 200);
                let body = response.into_body().collect().await.unwrap().to_bytes();
                assert_eq!(text_of(&body), answer(seed), "seed {seed}");
            };
            if seed % 10 >= 7 {
                let patience = async {
                    for _ in 0..seed % 40 {
                        tokio::task::yield_now().await;
                    }
                };
                tokio::select! {
                    () = request => {}
                    () = patience => {}
                }
            } else {
                request.await;
            }
        });
    }
    while let Some(request) = requests.join_next().await {
        request.unwrap();
    }
    drop(client);
    router.until_metric("baton_router_requests_running 0").await;
    for worker in [&worker, &other] {
        worker.until_idle().await;
    }
    // The router still serves.
    assert_eq!(router.client.post(TEXT, &json!({"prompt": "x", "seed": 1})).await.status, 200);
}

/// `cargo test -p baton-router --test it -- --ignored --nocapture overhead`
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures, asserts nothing"]
async fn overhead_of_the_router_at_concurrency_one() {
    use baton_proto::worker::{GenerateRequest, decode_client::DecodeClient};

    let (router, worker) = Router::with_worker().await;
    let mut direct = DecodeClient::connect(worker.record.address.clone()).await.unwrap();
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2]
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..500 {
        let sampling = baton_proto::worker::Sampling { max_tokens: 16, ..Default::default() };
        let request = GenerateRequest {
            prompt_token_ids: vec![1; 64],
            sampling: Some(sampling),
            ..GenerateRequest::default()
        };
        let began = Instant::now();
        direct.generate(request).await.unwrap().into_inner().message().await.unwrap();
        without.push(began.elapsed());

        let body = Bytes::from(json!({"prompt": "x".repeat(64), "stream": true}).to_string());
        let began = Instant::now();
        let mut response = router.client.begin("POST", TEXT, &JSON, body).await;
        response.body_mut().frame().await.unwrap().unwrap();
        with.push(began.elapsed());
        response.into_body().collect().await.unwrap();
    }
    println!("first token: {:?} through the router, {:?} directly", median(with), median(without));
}
