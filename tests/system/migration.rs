//! Requests that migrate while they run, with real workers and real KV.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::{
    harness::{Cluster, ClusterBuilder, Http, eventually, sum_metric},
    prefix::{BLOCK_SIZE, PATIENT, address_of, computed},
    prompts::filler,
};

pub(crate) fn body(idx: usize, num_words: usize, max_tokens: u32, salt: &str) -> Value {
    // Half of the streams are greedy, half are sampled. Both must continue exactly.
    let temperature = if idx.is_multiple_of(2) { 0.0 } else { 0.8 };
    json!({
        "model": "baton-tiny", "prompt": filler(300 + idx, num_words), "max_tokens": max_tokens,
        "temperature": temperature, "seed": idx, "ignore_eos": true, "stream": true,
        "cache_salt": salt, "frequency_penalty": 0.1,
    })
}

/// The whole text. `reached` is notified after `after_chunks` chunks.
pub(crate) async fn streamed(http: &Http, body: &Value, after_chunks: usize, reached: &Notify) -> String {
    let mut events = http.stream("/v1/completions", body).await.expect("the stream begins");
    let (mut text, mut num_chunks) = (String::new(), 0);
    while let Some(event) = events.next().await.expect("the stream goes on") {
        text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
        num_chunks += 1;
        if num_chunks == after_chunks {
            reached.notify_one();
        }
    }
    text
}

async fn router_metric(cluster: &Cluster, name: &str, labels: &[&str]) -> f64 {
    sum_metric(&cluster.http.get("/metrics").await.expect("metrics are served").text, name, labels)
}

const NUM_STREAMS: usize = 16;
/// Tokens of a stream that is long enough for a worker to start meanwhile.
const LONG: u32 = 1500;

/// A cluster of two decode workers of which the second is stopped, so that all requests run on the first.
pub(crate) async fn all_on_one(builder: ClusterBuilder) -> Cluster {
    let mut cluster = builder.prefill(0).decode(2).worker_flags(PATIENT).start().await;
    cluster.kill("decode-1");
    cluster.wait_for_workers(0, 1).await;
    cluster
}

/// Runs the streams and calls `disturb` after each has begun. The texts must equal those of an undisturbed run.
async fn undisturbed_and_disturbed_agree(
    cluster: &mut Cluster,
    max_tokens: u32,
    disturb: impl AsyncFnOnce(&mut Cluster),
) {
    let http = cluster.http.clone();
    let unheard = Notify::new();
    let bodies = |salt: &'static str| (0..NUM_STREAMS).map(move |idx| body(idx, 120, max_tokens, salt));
    let calm = join_all(bodies("calm").map(async |body| streamed(&http, &body, 0, &unheard).await)).await;
    let reached: Vec<Notify> = (0..NUM_STREAMS).map(|_| Notify::new()).collect();
    let streams =
        bodies("moved").zip(&reached).map(async |(body, reached)| streamed(&http, &body, 4, reached).await);
    let disturb = async {
        for reached in &reached {
            reached.notified().await;
        }
        disturb(cluster).await;
    };
    let (moved, ()) = tokio::join!(join_all(streams), disturb);
    for (idx, (calm, moved)) in calm.iter().zip(&moved).enumerate() {
        assert_eq!(calm, moved, "stream {idx}");
    }
}

#[tokio::test]
async fn a_draining_worker_hands_over_its_streams_and_no_prompt_is_computed_again() {
    let mut cluster = all_on_one(Cluster::new().router_flags("--migration drain")).await;
    undisturbed_and_disturbed_agree(&mut cluster, LONG, async |cluster| {
        cluster.start_again("decode-1");
        cluster.wait_for_workers(0, 2).await;
        let began = Instant::now();
        cluster.signal("decode-0", libc::SIGTERM);
        cluster.wait_for_end("decode-0").await;
        println!("left after {:?}", began.elapsed());
    })
    .await;
    let moved = router_metric(&cluster, "baton_router_migrations_total", &["drain", "moved"]).await;
    assert_eq!(moved, NUM_STREAMS as f64);
    assert_eq!(router_metric(&cluster, "baton_router_attempt_failures_total", &[]).await, 0.0);

    // The new worker computed only new tokens, a part of a block for each stream, and the tokens that the old worker
    // sampled during the transfer.
    let address = address_of(&cluster, "decode-1").await;
    let output = cluster.metric(&address, "vllm:generation_tokens_total", &[]).await;
    let computed = computed(&cluster, "decode-1").await;
    let again = computed - output;
    assert!(again < (NUM_STREAMS * BLOCK_SIZE) as f64, "{computed} tokens computed for {output}");
    let fetched = cluster.metric(&address, "baton_prefix_fetches_total", &["fetched"]).await;
    assert_eq!(fetched, NUM_STREAMS as f64);
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn killing_the_draining_worker_costs_no_token() {
    let mut cluster = all_on_one(Cluster::new().router_flags("--migration drain")).await;
    undisturbed_and_disturbed_agree(&mut cluster, LONG, async |cluster| {
        cluster.start_again("decode-1");
        cluster.wait_for_workers(0, 2).await;
        cluster.signal("decode-0", libc::SIGTERM);
        let http = cluster.http.clone();
        // At this moment some streams migrate, some have migrated, and some have not begun to.
        eventually("the first stream that has moved", Duration::from_secs(60), async || {
            let metrics = http.get("/metrics").await.ok()?.text;
            (sum_metric(&metrics, "baton_router_migrations_total", &["drain"]) >= 1.0).then_some(())
        })
        .await;
        cluster.kill("decode-0");
    })
    .await;
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn a_draining_worker_without_a_successor_finishes_its_streams() {
    let mut cluster = Cluster::new().prefill(0).decode(1).start().await;
    undisturbed_and_disturbed_agree(&mut cluster, 200, async |cluster| {
        cluster.signal("decode-0", libc::SIGTERM);
        cluster.wait_for_end("decode-0").await;
    })
    .await;
}

#[tokio::test]
async fn streams_of_a_crowded_worker_migrate_to_an_empty_one() {
    // In the end 16 streams need about 43 MB.
    let builder = Cluster::new().flags_of("decode-0", "--kv-memory 24M");
    let mut cluster = all_on_one(builder).await;
    undisturbed_and_disturbed_agree(&mut cluster, 1200, async |cluster| {
        cluster.start_again("decode-1");
        cluster.wait_for_workers(0, 2).await;
    })
    .await;
    let moved = router_metric(&cluster, "baton_router_migrations_total", &["balance", "moved"]).await;
    println!("{moved} streams moved");
    assert!(moved >= 1.0, "nothing moved");
    cluster.assert_all_blocks_free().await;
}
