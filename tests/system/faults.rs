//! Workers are killed and etcd is stopped: a client loses time, but no tokens.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, Http, Up, eventually, signal_pid, sum_metric},
    prompts::filler,
};

const NUM_STREAMS: usize = 16;

fn body(idx: usize, num_words: usize, max_tokens: u32, salt: &str) -> Value {
    // Half of the streams are greedy, half are sampled. Both must continue exactly.
    let temperature = if idx.is_multiple_of(2) { 0.0 } else { 0.8 };
    json!({
        "model": "baton-tiny", "prompt": filler(100 + idx, num_words), "max_tokens": max_tokens,
        "temperature": temperature, "seed": idx, "ignore_eos": true, "stream": true,
        "prefill_mode": "remote", "cache_salt": salt, "frequency_penalty": 0.1,
    })
}

/// The text of a streamed completion. `on_chunk(num_chunks)` is called as chunks arrive.
async fn streamed(http: &Http, body: &Value, mut on_chunk: impl FnMut(usize)) -> String {
    let mut events = http.stream("/v1/completions", body).await.expect("the stream begins");
    let mut text = String::new();
    let mut finish = None;
    let mut num_chunks = 0;
    while let Some(event) = events.next().await.expect("the stream goes on") {
        let choice = &event["choices"][0];
        text.push_str(choice["text"].as_str().unwrap_or_default());
        finish = choice["finish_reason"].as_str().map(str::to_owned).or(finish);
        num_chunks += 1;
        on_chunk(num_chunks);
    }
    assert_eq!(finish.as_deref(), Some("length"));
    text
}

/// Runs the streams twice, the second time with a `fault` after the first stream got `after_chunks`
/// chunks (0: as soon as all are sent). The texts must be equal.
async fn undisturbed_and_disturbed_agree(
    http: &Http,
    num_words: usize,
    max_tokens: u32,
    after_chunks: usize,
    fault: impl AsyncFnOnce(),
) {
    let calm = undisturbed(http, num_words, max_tokens).await;
    disturbed_agree(&calm, http, num_words, max_tokens, after_chunks, fault).await;
}

/// The texts of the streams without a fault.
async fn undisturbed(http: &Http, num_words: usize, max_tokens: u32) -> Vec<String> {
    let body = |idx| body(idx, num_words, max_tokens, "calm");
    join_all((0..NUM_STREAMS).map(async |idx| streamed(http, &body(idx), |_| {}).await)).await
}

/// The second half of [`undisturbed_and_disturbed_agree`]. The fault must fail an attempt.
async fn disturbed_agree(
    calm: &[String],
    http: &Http,
    num_words: usize,
    max_tokens: u32,
    after_chunks: usize,
    fault: impl AsyncFnOnce(),
) {
    let num_failed = async || metric(http, "baton_router_attempt_failures_total").await;
    let before = num_failed().await;
    let reached = tokio::sync::Notify::new();
    let streams = join_all((0..NUM_STREAMS).map(async |idx| {
        streamed(http, &body(idx, num_words, max_tokens, "disturbed"), |num_chunks| {
            if num_chunks == after_chunks {
                reached.notify_one();
            }
        })
        .await
    }));
    let disturb = async {
        if after_chunks > 0 {
            reached.notified().await;
        }
        fault().await;
    };
    let (disturbed, ()) = tokio::join!(streams, disturb);
    for (idx, (calm, disturbed)) in calm.iter().zip(&disturbed).enumerate() {
        assert_eq!(calm, disturbed, "stream {idx}");
    }
    assert!(num_failed().await > before, "no attempt failed");
}

async fn metric(http: &Http, name: &str) -> f64 {
    sum_metric(&http.get("/metrics").await.expect("metrics are served").text, name, &[])
}

/// The only prefill worker of a router.
async fn prefill_worker(router: &Http) -> Http {
    let health = router.get("/health").await.expect("the router answers").json();
    let mut workers = health["workers"].as_array().expect("/health lists the workers").iter();
    let worker = workers.find(|worker| worker["role"] == "prefill").expect("it is registered");
    Http::new(worker["address"].as_str().expect("a worker has an address").to_owned())
}

#[tokio::test]
async fn killing_the_prefill_worker_mid_prefill_costs_no_token() {
    let up = Up::start("--prefill 1 --token-budget 64").await;
    let before = up.pid_of("prefill-0").expect("the prefill worker runs");
    let worker = prefill_worker(&up.http).await;
    let num_computed = async || metric(&worker, "baton_engine_computed_tokens_total").await;
    let idle = num_computed().await;
    let calm = undisturbed(&up.http, 600, 24).await;
    let all = num_computed().await - idle;
    disturbed_agree(&calm, &up.http, 600, 24, 0, async || {
        let num_again = eventually("a prefill worker that computes", Duration::from_secs(30), async || {
            let num_again = num_computed().await - idle - all;
            (num_again > 0.0).then_some(num_again)
        })
        .await;
        signal_pid(before, libc::SIGKILL);
        assert!(num_again < all, "it has computed {num_again} of {all} tokens: it is killed too late");
    })
    .await;
    eventually("a new prefill worker", Duration::from_secs(30), async || {
        up.pid_of("prefill-0").filter(|&pid| pid != before)
    })
    .await;
}

#[tokio::test]
async fn killing_the_decode_worker_mid_stream_costs_no_token() {
    let up = Up::start("--prefill 1").await;
    let before = up.pid_of("decode-0").expect("the decode worker runs");
    undisturbed_and_disturbed_agree(&up.http, 60, 160, 20, async || signal_pid(before, libc::SIGKILL)).await;
    assert_ne!(up.pid_of("decode-0"), Some(before));
}

#[tokio::test]
async fn with_two_of_each_the_others_take_over() {
    let mut cluster = Cluster::new().prefill(2).decode(2).start().await;
    let http = cluster.http.clone();
    undisturbed_and_disturbed_agree(&http, 60, 120, 10, async || {
        cluster.kill("decode-1");
        cluster.kill("prefill-0");
    })
    .await;
    cluster.start_again("decode-1");
    cluster.start_again("prefill-0");
    cluster.wait_for_workers(2, 2).await;
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn losing_etcd_for_a_minute_changes_nothing_and_a_death_meanwhile_costs_no_token() {
    let mut cluster = Cluster::new().prefill(2).decode(2).with_etcd().start().await;
    let http = cluster.http.clone();
    let etcd = cluster.etcd.as_mut().expect("built with etcd");
    let endpoint = etcd.endpoint.clone();
    etcd.stop();
    let stopped = tokio::time::Instant::now();

    undisturbed_and_disturbed_agree(&http, 60, 120, 10, async || {
        cluster.kill("decode-0");
        cluster.kill("prefill-1");
    })
    .await;

    // The test needs the whole minute: every lease has expired by then.
    tokio::time::sleep_until(stopped + Duration::from_secs(60)).await;
    assert!(!streamed(&http, &body(3, 60, 24, "out"), |_| {}).await.is_empty());
    let log = cluster.log("decode-1");
    let lost: Vec<_> = log.lines().filter(|line| line.contains("discovery lost")).collect();
    assert!(lost.len() == 1 && lost[0].contains("WARN") && lost[0].contains(&endpoint), "{log}");

    cluster.etcd.as_mut().expect("built with etcd").start_again();
    cluster.start_again("decode-0");
    cluster.start_again("prefill-1");
    cluster.wait_for_workers(2, 2).await;
    let calm = streamed(&http, &body(3, 60, 24, "out"), |_| {}).await;
    assert_eq!(calm, streamed(&http, &body(3, 60, 24, "back"), |_| {}).await);
    cluster.assert_all_blocks_free().await;
}
