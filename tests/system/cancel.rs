//! Requests that are cancelled at random moments free every block.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use baton_proto::v1::{
    GenerateRequest, SamplingParams, generate_request::Prompt, generate_response::Event,
    inference_client::InferenceClient,
};
use futures_util::{StreamExt, stream};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::json;

use crate::{harness::Cluster, prompts::filler};

const NUM_REQUESTS: usize = 10_000;
const NUM_AT_ONCE: usize = 48;

#[tokio::test]
async fn ten_thousand_requests_of_which_a_third_is_cancelled_leave_every_block_free() {
    let cluster = Cluster::new().worker_flags("--kv-memory 16M --max-running 24").start().await;
    let http = &cluster.http;
    let (num_done, num_cancelled) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let requests = stream::iter(0..NUM_REQUESTS).for_each_concurrent(NUM_AT_ONCE, async |idx| {
        let mut rng = StdRng::seed_from_u64(idx as u64);
        let body = json!({
            "model": "baton-tiny", "prompt": filler(idx, rng.random_range(4..120)),
            "max_tokens": rng.random_range(1..12), "temperature": 0, "ignore_eos": true, "stream": true,
            "prefill_mode": if rng.random_bool(0.8) { "remote" } else { "auto" },
        });
        let run = async {
            let mut events = http.stream("/v1/completions", &body).await.expect("the stream begins");
            while events.next().await.expect("the stream goes on").is_some() {}
        };
        if rng.random_bool(0.3) {
            // From before the request arrives until after its last token: the moment is random.
            let moment = Duration::from_micros(rng.random_range(0..400_000));
            if tokio::time::timeout(moment, run).await.is_err() {
                num_cancelled.fetch_add(1, Ordering::Relaxed);
                return;
            }
        } else {
            run.await;
        }
        num_done.fetch_add(1, Ordering::Relaxed);
    });
    requests.await;
    let (num_done, num_cancelled) = (num_done.into_inner(), num_cancelled.into_inner());
    println!("{num_done} done, {num_cancelled} cancelled");
    assert!(num_cancelled > NUM_REQUESTS / 20, "too few were cancelled in flight: {num_cancelled}");
    cluster.assert_all_blocks_free().await;
    // The cluster still answers.
    assert!(!cluster.chat("Hello!").await.is_empty());
}

#[tokio::test]
async fn calls_cancelled_in_a_burst_do_not_end_their_connection() {
    let cluster = Cluster::new().start().await;
    let client = InferenceClient::connect(cluster.base.clone()).await.expect("the router listens");
    let request = |max_tokens| GenerateRequest {
        prompt: Some(Prompt::Text(filler(9, 40))),
        sampling: Some(SamplingParams {
            max_tokens: Some(max_tokens),
            ignore_eos: true,
            ..SamplingParams::default()
        }),
        ..GenerateRequest::default()
    };
    let mut survivor = client.clone().generate(request(400)).await.expect("the call begins").into_inner();
    // HTTP/2 servers close a connection on which many calls are reset before they are accepted.
    let burst = (0..400).map(async |idx| {
        let mut client = client.clone();
        let _ = tokio::time::timeout(Duration::from_micros(idx * 20), client.generate(request(4))).await;
    });
    futures_util::future::join_all(burst).await;
    let mut num_tokens = 0;
    while let Some(response) = survivor.message().await.expect("the other call goes on") {
        if let Some(Event::Output(output)) = response.event {
            num_tokens += output.token_ids.len();
        }
    }
    assert_eq!(num_tokens, 400);
    cluster.assert_all_blocks_free().await;
}
