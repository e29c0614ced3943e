//! Passages that clients mark, blended by real workers: what is reported, and that nothing but time changes.

use std::time::{Duration, Instant};

use baton_proto::v1::WorkerLoad;
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, Events},
    prefix::address_of,
    prompts::filler,
};

const BLENDING: &str = "--blend auto --blend-max-kl 20 --blend-audit 1";

/// For what happens in the background of a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn document(idx: usize) -> Value {
    json!({"title": format!("Page {idx}"), "text": filler(idx, 40 + 7 * idx)})
}

/// A chat with documents in an order; `blend` is the field.
fn chat(order: &[usize], blend: Value, mode: &str, salt: &str) -> Value {
    let documents: Vec<Value> = order.iter().map(|&idx| document(idx)).collect();
    json!({
        "messages": [{"role": "system", "content": "Read."}, {"role": "user", "content": "What does the old house keep?"}],
        "documents": documents, "blend": blend, "prefill_mode": mode, "cache_salt": salt,
        "temperature": 0, "max_tokens": 24, "ignore_eos": true,
    })
}

/// The text of an answer, and how many tokens of its prompt were blended.
async fn answer(cluster: &Cluster, body: &Value) -> (String, u64) {
    let answer = cluster.http.post("/v1/chat/completions", body).await.expect("the router answers");
    assert_eq!(answer.status, 200, "{}", answer.text);
    let answer = answer.json();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned();
    (text, answer["usage"]["prompt_tokens_details"]["blended_tokens"].as_u64().unwrap_or(0))
}

/// Sends the same passages in other orders, until `is_enough`, which is told how many tokens of a prompt were blended.
async fn send_until(cluster: &Cluster, mut is_enough: impl AsyncFnMut(u64) -> bool) {
    let began = Instant::now();
    for nth in 0.. {
        assert!(began.elapsed() < PATIENCE, "{}", cluster.log("prefill-0"));
        let order = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]][nth % 3];
        let (_, num_blended) = answer(cluster, &chat(&order, json!("auto"), "remote", "a")).await;
        if is_enough(num_blended).await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn documents_in_another_order_are_blended_and_change_only_the_time() {
    let cluster = Cluster::new().worker_flags(BLENDING).start().await;
    let (_, num_blended) = answer(&cluster, &chat(&[0, 1, 2], json!(0.3), "remote", "a")).await;
    assert_eq!(num_blended, 0, "all passages are new");
    let (remote, num_blended) = answer(&cluster, &chat(&[2, 0, 1], json!(0.3), "remote", "a")).await;
    assert!(num_blended > 50, "{num_blended}");
    let (local, num_local) = answer(&cluster, &chat(&[2, 0, 1], json!(0.3), "local", "b")).await;
    assert_eq!((local, num_local), (remote, 0), "another worker, which has no passages");

    let (whole, num_blended) = answer(&cluster, &chat(&[1, 2, 0], json!(1.0), "remote", "a")).await;
    let (full, num_full) = answer(&cluster, &chat(&[1, 2, 0], json!("off"), "remote", "a")).await;
    assert_eq!((whole, num_blended), (full, num_full), "all tokens are computed");

    let prefill = address_of(&cluster, "prefill-0").await;
    for (name, at_least) in [
        ("baton_blends_total", 3.0),
        ("baton_passages_found_total", 6.0),
        ("baton_blend_reused_tokens_total", 50.0),
        ("baton_passage_bytes", 1000.0),
    ] {
        let value = cluster.metric(&prefill, name, &[]).await;
        assert!(value >= at_least, "{name} is {value}");
    }
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn texts_that_earlier_prompts_had_are_found_without_marks_and_blended() {
    let cluster = Cluster::new().router_flags("--find-passages").worker_flags(BLENDING).start().await;
    let body = |order: &[usize], blend: Value, salt: &str| {
        let texts: Vec<String> = order.iter().map(|&idx| filler(idx, 220)).collect();
        let content = format!("{}\n\nWhat does the old house keep?", texts.join("\n\n"));
        json!({"messages": [{"role": "user", "content": content}], "blend": blend, "prefill_mode": "remote",
               "cache_salt": salt, "temperature": 0, "max_tokens": 24, "ignore_eos": true})
    };
    // First seen, then computed on their own, then reused.
    for order in [[0, 1, 2], [1, 2, 0]] {
        let (_, num_blended) = answer(&cluster, &body(&order, json!(0.3), "a")).await;
        assert_eq!(num_blended, 0, "{order:?}");
    }
    let (blended, num_blended) = answer(&cluster, &body(&[2, 1, 0], json!(0.3), "a")).await;
    assert!(num_blended > 100, "{num_blended}");
    let (again, _) = answer(&cluster, &body(&[2, 1, 0], json!(0.3), "a")).await;
    assert_eq!(again, blended);
    let (whole, _) = answer(&cluster, &body(&[0, 2, 1], json!(1.0), "a")).await;
    let (full, num_full) = answer(&cluster, &body(&[0, 2, 1], json!("off"), "a")).await;
    assert_eq!((whole, num_full), (full, 0));
    let (_, num_other) = answer(&cluster, &body(&[2, 1, 0], json!(0.3), "b")).await;
    assert_eq!(num_other, 0, "another salt has seen nothing");
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn a_worker_calibrates_with_the_passages_that_it_meets_and_then_blends_by_itself() {
    let cluster = Cluster::new().worker_flags(BLENDING).start().await;
    let began = Instant::now();
    let prefill = address_of(&cluster, "prefill-0").await;
    send_until(&cluster, async |num_blended| num_blended > 0).await;
    assert!(cluster.metric(&prefill, "baton_blends_refused_total", &["uncalibrated"]).await >= 1.0);
    assert!(cluster.log("prefill-0").contains("are blended from now on"));
    // The audit is work of low priority, after the answer.
    while cluster.metric(&prefill, "baton_blend_audit_kl_count", &[]).await < 1.0 {
        assert!(began.elapsed() < PATIENCE, "no audit");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_model_that_no_ratio_keeps_near_is_never_blended_and_its_worker_says_so() {
    const NEARER_THAN_ANY: &str = "--blend auto --blend-max-kl 1e-12";
    let cluster = Cluster::new().worker_flags(NEARER_THAN_ANY).start().await;
    let prefill = address_of(&cluster, "prefill-0").await;
    send_until(&cluster, async |num_blended| {
        assert_eq!(num_blended, 0);
        cluster.metric(&prefill, "baton_blends_refused_total", &["closed"]).await >= 1.0
    })
    .await;
    assert!(cluster.log("prefill-0").contains("no ratio keeps the divergence under --blend-max-kl"));
    let (_, num_blended) = answer(&cluster, &chat(&[1, 0, 2], json!(0.3), "remote", "a")).await;
    assert_eq!(num_blended, 0, "a client's own ratio does not open it");
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn workers_that_do_not_blend_compute_in_full_and_say_so() {
    let cluster = Cluster::new().start().await;
    let mut texts = Vec::new();
    for blend in [json!(0.3), json!("auto"), json!("off")] {
        let (text, num_blended) = answer(&cluster, &chat(&[0, 1], blend, "remote", "a")).await;
        assert_eq!(num_blended, 0);
        texts.push(text);
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let prefill = address_of(&cluster, "prefill-0").await;
    assert_eq!(cluster.metric(&prefill, "baton_blends_refused_total", &["off"]).await, 2.0);
}

#[tokio::test]
async fn a_blended_stream_whose_workers_are_killed_goes_on_with_the_same_tokens() {
    let mut cluster = Cluster::new().prefill(2).decode(2).worker_flags(BLENDING).start().await;
    let body = |salt: &str| {
        let mut body = chat(&[3, 1, 0], json!(0.2), "remote", salt);
        body["max_tokens"] = json!(500);
        body["stream"] = json!(true);
        body
    };
    let mut calm = Stream::begin(&cluster, &body("a")).await;
    calm.read_to_end().await;
    let mut disturbed = Stream::begin(&cluster, &body("b")).await;
    disturbed.read_to(20).await;
    let decodes = |worker: &WorkerLoad| {
        worker.role == "decode" && worker.load.as_ref().is_some_and(|load| load.num_running > 0)
    };
    let loads = cluster.loads().await;
    let busy = loads.iter().find(|worker| decodes(worker)).map_or("decode-0", |worker| &worker.worker_id);
    // One of each role stays.
    for name in [busy, "prefill-0"] {
        cluster.kill(name);
    }
    disturbed.read_to_end().await;
    assert_eq!(disturbed.text, calm.text);
    let mut again = Stream::begin(&cluster, &body("b")).await;
    again.read_to_end().await;
    assert_eq!(again.text, calm.text, "on the workers that are left");
}

/// A streamed chat.
struct Stream {
    events: Events,
    text: String,
}

impl Stream {
    async fn begin(cluster: &Cluster, body: &Value) -> Stream {
        let events = cluster.http.stream("/v1/chat/completions", body).await.expect("the stream begins");
        Stream { events, text: String::new() }
    }

    async fn read_to(&mut self, num_bytes: usize) {
        while self.text.len() < num_bytes {
            let Some(event) = self.events.next().await.expect("the stream goes on") else { return };
            self.text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
        }
    }

    async fn read_to_end(&mut self) {
        self.read_to(usize::MAX).await;
    }
}

#[tokio::test]
async fn bad_marks_are_refused_by_name() {
    let cluster = Cluster::new().start().await;
    let good = chat(&[0, 1], json!(0.3), "auto", "");
    for (field, value, message) in [
        ("blend", json!(1.5), "blend: 1.5 is not between 0 and 1"),
        ("blend", json!("on"), "blend: expected \"off\", \"auto\" or a ratio between 0 and 1"),
        ("documents", json!([{"title": "t"}]), "documents[0].text: expected a string"),
        ("documents", json!("text"), "documents"),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "text", "text": "t", "passage": 1}]}]),
            "messages[0].content[0].passage: expected a boolean",
        ),
    ] {
        let mut body = good.clone();
        body[field] = value;
        let answer = cluster.http.post("/v1/chat/completions", &body).await.expect("the router answers");
        assert_eq!(answer.status, 400, "{}", answer.text);
        assert!(
            answer.text.contains(&message.replace('"', "\\\"")),
            "{} does not say {message}",
            answer.text
        );
    }
}
