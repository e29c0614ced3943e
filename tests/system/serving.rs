//! A real request through router, prefill worker and decode worker.

use std::{
    io::{self, Write},
    path::Path,
    time::Duration,
};

use serde_json::json;

use crate::{
    harness::{Cluster, eventually, sum_metric},
    prompts::{filler, tasks},
};

/// Bytes that the handoffs of all decode workers received, by their own counters.
async fn received_bytes(cluster: &Cluster, transport: &str) -> f64 {
    let label = format!("transport=\"{transport}\"");
    let mut sum = 0.0;
    for worker in cluster.loads().await.iter().filter(|worker| worker.role == "decode") {
        sum += cluster.metric(&worker.address, "baton_handoff_bytes_total", &[&label, "received"]).await;
    }
    sum
}

async fn remote_requests_move_their_kv(transport: &str, flags: &str) {
    let flags = format!("--transports {transport} {flags}");
    let cluster = Cluster::new().worker_flags(&flags).start().await;
    let prompt = filler(1, 200);
    let complete = async |mode: &str, salt: &str| {
        cluster
            .complete(&json!({
                "model": "baton-tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0,
                "ignore_eos": true, "prefill_mode": mode, "cache_salt": salt,
            }))
            .await
    };

    let local = complete("local", "a").await;
    assert_eq!(received_bytes(&cluster, transport).await, 0.0, "a local prefill moves nothing");
    let remote = complete("remote", "b").await;
    assert_eq!(remote["choices"][0]["text"], local["choices"][0]["text"]);

    // Every block of the prompt was transferred: 2 (k, v) x layers x kv heads x head dim x 2 bytes a token.
    let config: serde_json::Value =
        serde_json::from_str(include_str!("../../models/tiny/config.json")).expect("config.json is JSON");
    let number = |key: &str| config[key].as_u64().unwrap_or_else(|| panic!("config.json has {key}"));
    let head_dim =
        config["head_dim"].as_u64().unwrap_or_else(|| number("hidden_size") / number("num_attention_heads"));
    let token_bytes = 2 * number("num_hidden_layers") * number("num_key_value_heads") * head_dim * 2;
    let prompt_tokens = remote["usage"]["prompt_tokens"].as_u64().expect("usage is counted");
    let expected = prompt_tokens.div_ceil(16) * 16 * token_bytes;
    assert_eq!(received_bytes(&cluster, transport).await, expected as f64);

    // The router shows the same sent and received bytes after the next load report.
    let label = format!("transport=\"{transport}\"");
    eventually("the bytes moved, in the router's metrics", Duration::from_secs(20), async || {
        let metrics = cluster.http.get("/metrics").await.expect("metrics are served").text;
        (sum_metric(&metrics, "baton_router_worker_handoff_bytes", &[&label]) == 2.0 * expected as f64)
            .then_some(())
    })
    .await;

    // For a second request the decode worker has cached all full blocks. Only the last block is transferred.
    let again = complete("remote", "b").await;
    assert_eq!(again["choices"][0]["text"], local["choices"][0]["text"]);
    let moved = received_bytes(&cluster, transport).await - expected as f64;
    assert!(moved <= (16 * token_bytes) as f64, "{moved} bytes for blocks that were there");
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn remote_requests_move_their_kv_over_shm() {
    remote_requests_move_their_kv("shm", "").await;
}

#[tokio::test]
async fn remote_requests_move_their_kv_over_rdma() {
    // `cargo xtask setup` puts NIXL here. Without an RDMA device, UCX uses sockets.
    let nixl = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/nixl/.nixl_cu12.mesonpy.libs");
    if !Path::new(nixl).exists() {
        // Written to stderr directly: the test framework would capture it.
        let line = format!("SKIPPED serving over rdma: no NIXL in {nixl}; see `cargo xtask setup`\n");
        let _ = io::stderr().write_all(line.as_bytes());
        return;
    }
    remote_requests_move_their_kv("rdma", &format!("--nixl {nixl}")).await;
}

#[tokio::test]
async fn remote_requests_move_their_kv_over_tcp() {
    remote_requests_move_their_kv("tcp", "").await;
}

#[tokio::test]
async fn the_tiny_model_recalls_facts_through_a_handoff() {
    let cluster = Cluster::new().router_flags("--local-prefill-below 0").start().await;
    let tasks = tasks("recall-512");
    let mut num_right = 0;
    let asked = tasks.iter().take(20);
    let num_asked = asked.len();
    for task in asked {
        let body = json!({
            "model": "baton-tiny", "messages": task.messages, "temperature": 0, "max_tokens": 48,
            "prefill_mode": "remote",
        });
        let answer =
            cluster.http.post("/v1/chat/completions", &body).await.expect("the router answers").json();
        let text = answer["choices"][0]["message"]["content"].as_str().expect("an answer has content");
        num_right += usize::from(text.contains(&task.answer));
    }
    assert!(num_right * 10 >= num_asked * 9, "{num_right} of {num_asked} recalled");
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn seeded_samples_do_not_depend_on_worker_or_batch() {
    let cluster = Cluster::new().start().await;
    let body = |seed: u64, mode: &str, salt: &str| {
        json!({
            "model": "baton-tiny", "prompt": filler(2, 150), "max_tokens": 32, "temperature": 0.9,
            "top_p": 0.95, "seed": seed, "ignore_eos": true, "prefill_mode": mode, "cache_salt": salt,
            "presence_penalty": 0.5,
        })
    };
    let alone = cluster.complete(&body(7, "local", "alone")).await["choices"][0]["text"].clone();
    let other = cluster.complete(&body(8, "local", "alone")).await["choices"][0]["text"].clone();
    assert_ne!(alone, other, "the seed has no effect");
    // The same request in both modes, with and without a cached prefix (equal salt), batched with other requests.
    let together = (0..12).map(|idx| {
        let (seed, mode) = (7 + idx % 3, if idx % 2 == 0 { "remote" } else { "local" });
        let body = body(seed, mode, if idx < 6 { "alone" } else { "apart" });
        let cluster = &cluster;
        async move { (seed, cluster.complete(&body).await["choices"][0]["text"].clone()) }
    });
    for (seed, text) in futures_util::future::join_all(together).await {
        match seed {
            7 => assert_eq!(text, alone),
            8 => assert_eq!(text, other),
            _ => {}
        }
    }
    cluster.assert_all_blocks_free().await;
}
