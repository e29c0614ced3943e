//! Workers whose KV layouts differ, as real processes.

use serde_json::json;

use crate::{
    harness::Cluster,
    prompts::{filler, tasks},
};

async fn blocks_of_other_sizes_give_the_tokens_of_a_local_prefill(transport: &str) {
    let cluster = Cluster::new()
        .worker_flags(&format!("--transports {transport}"))
        .prefill_flags("--block-size 24")
        .decode_flags("--block-size 16")
        .start()
        .await;
    for (seed, num_words) in [(1, 200), (2, 31)] {
        let mut texts = Vec::new();
        for (mode, salt) in [("local", "a"), ("remote", "b"), ("remote", "b")] {
            let body = json!({
                "model": "baton-tiny", "prompt": filler(seed, num_words), "max_tokens": 24, "temperature": 0,
                "ignore_eos": true, "prefill_mode": mode, "cache_salt": salt,
            });
            texts.push(cluster.complete(&body).await["choices"][0]["text"].clone());
        }
        // The decode worker has cached the blocks of the third request.
        assert_eq!(texts[1..], [texts[0].clone(), texts[0].clone()], "{num_words} words");
    }
    let label = format!("transport=\"{transport}\"");
    for worker in cluster.loads().await {
        let metric = "baton_handoff_bytes_total";
        assert!(cluster.metric(&worker.address, metric, &[&label]).await > 0.0, "{}", worker.address);
    }
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn blocks_of_other_sizes_give_the_tokens_of_a_local_prefill_over_shm() {
    blocks_of_other_sizes_give_the_tokens_of_a_local_prefill("shm").await;
}

#[tokio::test]
async fn blocks_of_other_sizes_give_the_tokens_of_a_local_prefill_over_tcp() {
    blocks_of_other_sizes_give_the_tokens_of_a_local_prefill("tcp").await;
}

/// With different number formats there is no local prefill to compare with: the prompt's KV is computed in one format and
/// read in another. Facts must be recalled as well.
#[tokio::test]
async fn the_tiny_model_recalls_facts_from_kv_of_another_number_format() {
    let cluster = Cluster::new()
        .router_flags("--local-prefill-below 0")
        .prefill_flags("--block-size 8 --kv-dtype bf16")
        .decode_flags("--block-size 32 --kv-dtype int8")
        .start()
        .await;
    let tasks = tasks("recall-512");
    let asked = tasks.iter().take(20);
    let (num_asked, mut num_right) = (asked.len(), 0);
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
