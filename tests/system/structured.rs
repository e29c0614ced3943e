//! Answers under generated schemas: they validate with Python's `jsonschema`, and are the same wherever the prompt is
//! computed and when a decode worker is killed midway.

use std::time::Duration;

use futures_util::future::join_all;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Map, Value, json};
use tokio::sync::Notify;

use crate::{
    clients::run_script,
    harness::{Cluster, Http, sum_metric},
};

/// Answers that run at a time.
const WAVE: usize = 24;

/// A schema whose texts are bounded, but for numbers.
fn schema(random: &mut StdRng, depth: usize) -> Value {
    let kind = random.random_range(0..if depth == 0 { 8 } else { 11 });
    match kind {
        0 => json!({"type": "boolean"}),
        1 => json!({"type": "null"}),
        2 => {
            let low: i64 = random.random_range(-50..50);
            json!({"type": "integer", "minimum": low, "maximum": low + random.random_range(0..200)})
        }
        3 => json!({"enum": ["red", "grün", 7, null, true]}),
        4 => json!({"const": {"fixed text": [1, "two"]}}),
        5 => json!({"type": "string", "maxLength": random.random_range(0..9)}),
        6 => json!({"type": "string", "pattern": "^[a-f]{1,4}(-[0-9]{2})?$"}),
        7 => json!({"type": "string", "enum": ["a \"quoted\" word", "back\\slash", "line\nbreak"]}),
        8 => {
            let low: usize = random.random_range(0..2);
            json!({"type": "array", "items": schema(random, depth - 1), "minItems": low, "maxItems": low + 2})
        }
        9 => json!({"anyOf": [{"type": "boolean"}, object(random, depth - 1)]}),
        _ => object(random, depth - 1),
    }
}

fn object(random: &mut StdRng, depth: usize) -> Value {
    let names = ["name", "size of it", "größe", "id", "x-1", "list"];
    let num = random.random_range(1..5);
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for name in &names[..num] {
        properties.insert((*name).to_owned(), schema(random, depth));
        if random.random_bool(0.7) {
            required.push(json!(name));
        }
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// The request of one answer.
fn body(idx: usize, seed: usize, schema: &Value, mode: &str, salt: &str) -> Value {
    json!({
        "messages": [{"role": "user", "content": format!("Describe thing {idx} as JSON, please.")}],
        "temperature": if seed == 0 { 0.0 } else { 0.8 }, "seed": seed, "max_tokens": 400, "stream": true,
        "prefill_mode": mode, "cache_salt": salt,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "strict": true, "schema": schema}},
    })
}

/// The text of an answer, and whether it is complete.
async fn answer(http: &Http, body: &Value, on_chunk: impl Fn(usize)) -> (String, bool) {
    let mut events = http.stream("/v1/chat/completions", body).await.expect("the stream begins");
    let (mut text, mut is_complete, mut num_chunks) = (String::new(), false, 0);
    while let Some(event) = events.next().await.expect("the stream goes on") {
        let choice = &event["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        is_complete |= choice["finish_reason"] == "stop";
        num_chunks += 1;
        on_chunk(num_chunks);
    }
    (text, is_complete)
}

/// Answers under `num_schemas` schemas, each with `num_seeds` seeds.
async fn check(num_schemas: usize, num_seeds: usize) {
    let mut random = StdRng::seed_from_u64(20);
    let schemas: Vec<Value> = (0..num_schemas).map(|_| object(&mut random, 2)).collect();
    let all: Vec<(usize, usize)> =
        (0..num_schemas).flat_map(|idx| (0..num_seeds).map(move |seed| (idx, seed))).collect();
    let mut cluster = Cluster::new().prefill(1).decode(2).start().await;
    let mut lines = String::new();
    let mut num_complete = 0;
    for wave in all.chunks(WAVE) {
        let http = Http::new(cluster.base.clone());
        let calm = async |mode: &'static str| {
            join_all(wave.iter().map(async |&(idx, seed)| {
                answer(&http, &body(idx, seed, &schemas[idx], mode, mode), |_| {}).await
            }))
            .await
        };
        let local = calm("local").await;
        assert_eq!(calm("remote").await, local);

        let reached = Notify::new();
        let streams = join_all(wave.iter().map(async |&(idx, seed)| {
            let body = body(idx, seed, &schemas[idx], "remote", "disturbed");
            answer(&http, &body, |num_chunks| {
                if num_chunks == 4 {
                    reached.notify_one();
                }
            })
            .await
        }));
        let kill = async {
            // Answers may all be shorter than that.
            let _ = tokio::time::timeout(Duration::from_secs(20), reached.notified()).await;
            cluster.kill("decode-0");
        };
        let (disturbed, ()) = tokio::join!(streams, kill);
        cluster.start_again("decode-0");
        cluster.wait_for_workers(1, 2).await;
        for ((&(idx, seed), calm), disturbed) in wave.iter().zip(&local).zip(&disturbed) {
            assert_eq!(disturbed, calm, "schema {idx}, seed {seed}: {}", schemas[idx]);
            let (text, is_complete) = calm;
            if *is_complete {
                lines.push_str(&json!({"schema": schemas[idx], "text": text}).to_string());
                lines.push('\n');
                num_complete += 1;
            }
        }
    }
    let metrics = cluster.http.get("/metrics").await.expect("metrics are served").text;
    let num_lost = sum_metric(&metrics, "baton_router_attempt_failures_total", &[]);
    assert!(num_lost > 0.0, "the deaths disturbed no answer");
    // All texts of these schemas are bounded; the model may still write more than it has tokens for.
    assert!(num_complete * 10 >= all.len() * 9, "{num_complete} of {} answers end", all.len());
    println!("{num_complete} of {} answers end; {num_lost} attempts were lost", all.len());
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let path = dir.path().join("answers.jsonl");
    std::fs::write(&path, lines).expect("the directory is writable");
    let path = path.display().to_string();
    tokio::task::spawn_blocking(move || run_script("validate_schemas.py", &[&path]))
        .await
        .expect("the script runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_under_generated_schemas_are_valid_and_equal_when_a_worker_dies() {
    check(WAVE, 1).await;
}

/// A minute on two cores, and as many deaths.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes long; run it by hand"]
async fn answers_under_many_generated_schemas_are_valid_and_equal_when_a_worker_dies() {
    check(300, 3).await;
}
