//! Streams that survive their client, their router and their workers.

use std::{path::Path, time::Duration};

use baton_proto::v1::{
    AbortRequest, FinishReason, GenerateRequest, GenerateResponse, ResumeRequest, SamplingParams, TokenIds,
    generate_request::Prompt, generate_response::Event, inference_client::InferenceClient,
};
use futures_util::future::try_join_all;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use crate::{
    harness::{Cluster, Events, Http, eventually, sum_metric},
    prefix::{BLOCK_SIZE, PATIENT, address_of, answer, computed},
};
use baton_proto::v1::PrefillMode;

const PATH: &str = "/v1/completions";
const NUM_BLOCKS: usize = 30;
/// The last token of a prompt is always computed.
const NUM_TOKENS: usize = NUM_BLOCKS * BLOCK_SIZE + 1;
/// Long enough to be cut off in the middle.
const NUM_NEXT: usize = 1000;
/// A frozen worker sends nothing: when no event has come for so long, all that it sent is in the journal, and its client has it.
const QUIET: Duration = Duration::from_millis(500);

fn prompt(nth: usize) -> Vec<u32> {
    (0..NUM_TOKENS).map(|at| 100 + ((at * 37 + nth * 101) % 1900) as u32).collect()
}

fn call(nth: usize, num_next: usize, salt: &str) -> Value {
    json!({
        "prompt": prompt(nth), "stream": true, "stream_options": {"include_usage": true}, "max_tokens": num_next,
        "temperature": 0.8, "seed": nth, "ignore_eos": true, "return_token_ids": true, "cache_salt": salt,
    })
}

/// So many completions, and a stream of each other API.
fn calls(num_streams: usize, salt: &str) -> Vec<(&'static str, Value)> {
    let completions = (0..num_streams).map(|nth| (PATH, call(nth, NUM_NEXT, salt)));
    let others = ["/v1/chat/completions", "/v1/responses", "/v1/messages"];
    completions.chain(others.map(|path| (path, formatted(path, salt)))).collect()
}

/// The call of another API. Its answer has to match a schema, and would be longer than it may be.
fn formatted(path: &str, salt: &str) -> Value {
    let (text, field) = (json!({"type": "string", "minLength": 5000}), "text");
    let schema = json!({"type": "object", "properties": {field: text}, "required": [field]});
    let messages = json!([{"role": "user", "content": "Describe the old house as JSON, please."}]);
    let mut body = match path {
        "/v1/chat/completions" => {
            let format = json!({"type": "json_schema", "json_schema": {"name": "house", "schema": schema}});
            json!({"messages": messages, "response_format": format, "max_tokens": NUM_NEXT})
        }
        "/v1/responses" => {
            let format = json!({"type": "json_schema", "name": "house", "schema": schema});
            json!({"input": messages, "text": {"format": format}, "max_output_tokens": NUM_NEXT})
        }
        _ => {
            let format = json!({"type": "json_schema", "schema": schema});
            json!({"messages": messages, "output_config": {"format": format}, "max_tokens": NUM_NEXT})
        }
    };
    for (field, value) in [("stream", json!(true)), ("temperature", json!(0)), ("cache_salt", json!(salt))] {
        body[field] = value;
    }
    body
}

/// Whether an event ends its stream.
fn is_last(data: &str) -> bool {
    let ends = ["\"message_stop\"", "\"response.completed\"", "\"response.incomplete\""];
    data == "[DONE]" || ends.iter().any(|end| data.contains(&format!("\"type\":{end}")))
}

/// A stream as far as its client has read it.
struct Reader {
    path: &'static str,
    events: Events,
    /// Of the newest event.
    last_id: String,
    /// Of each event, without what differs between equal answers.
    data: Vec<String>,
}

impl Reader {
    async fn begin(http: &Http, body: &Value) -> anyhow::Result<Reader> {
        Reader::begin_at(PATH, http, body).await
    }

    async fn begin_at(path: &'static str, http: &Http, body: &Value) -> anyhow::Result<Reader> {
        Ok(Reader { path, events: http.stream(path, body).await?, last_id: String::new(), data: Vec::new() })
    }

    /// Reads up to so many events; whether the stream goes on.
    async fn read(&mut self, num_events: usize) -> anyhow::Result<bool> {
        while self.data.len() < num_events {
            let (id, data) = self.events.next_event().await?;
            let id = id.ok_or_else(|| anyhow::anyhow!("an event without an id: {data}"))?;
            let (answer_id, number) = id.rsplit_once(':').expect("an answer and a number");
            anyhow::ensure!(number == self.data.len().to_string(), "{id} after {}", self.last_id);
            let is_same = self.last_id.is_empty() || self.last_id.starts_with(answer_id);
            anyhow::ensure!(is_same, "{id} after {}", self.last_id);
            self.last_id = id;
            anyhow::ensure!(!data.starts_with("{\"error\""), "{data}");
            let is_last = is_last(&data);
            self.data.push(plain(&self.last_id, data));
            if is_last {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn finish(mut self) -> anyhow::Result<Vec<String>> {
        while self.read(usize::MAX).await? {}
        Ok(self.data)
    }

    /// Goes on with the same call, or with `GET`.
    async fn resume(self, http: &Http, body: Option<&Value>) -> anyhow::Result<Reader> {
        let (answer_id, _) = self.last_id.rsplit_once(':').expect("an answer and a number");
        let stream = format!("/v1/streams/{answer_id}");
        let path = if body.is_some() { self.path } else { &stream };
        Ok(Reader { events: http.resume(path, &self.last_id, body).await?, ..self })
    }
}

/// The data of an event, without what differs between equal answers.
fn plain(id: &str, data: String) -> String {
    let Ok(mut event) = serde_json::from_str::<Value>(&data) else { return data };
    for time in ["/created", "/response/created_at"] {
        event.pointer_mut(time).map(Value::take);
    }
    // What was cached differs with what ran before.
    for usage in ["/usage", "/message/usage", "/response/usage"] {
        if let Some(usage) = event.pointer_mut(usage).and_then(Value::as_object_mut) {
            usage.retain(|name, _| matches!(name.as_str(), "completion_tokens" | "output_tokens"));
        }
    }
    // Ids of parts of an answer begin with its own.
    let unique = id.rsplit_once(':').and_then(|(id, _)| id.split_once(['-', '_'])).map_or("", |(_, id)| id);
    event.to_string().replace(unique, "")
}

fn flags(dir: &Path, name: &str, size: &str) -> String {
    // All streams run at the same time.
    format!(
        "--max-running 256 --disk-kv {} --disk-kv-size {size} --kv-memory {size} {PATIENT}",
        dir.join(name).display()
    )
}

async fn start(dir: &Path, size: &str) -> Cluster {
    Cluster::new()
        .router_flags(&format!("--durable {}", dir.join("journal").display()))
        .flags_of("prefill-0", &flags(dir, "prefill-0", size))
        .flags_of("decode-0", &flags(dir, "decode-0", size))
        .start()
        .await
}

async fn journal(cluster: &Cluster, count: &str) -> f64 {
    let text = cluster.http.get("/metrics").await.expect("metrics are served").text;
    sum_metric(&text, &format!("baton_journal_{count}"), &[])
}

/// Kills everything under so many completions and a stream of each other API, starts it again and resumes them all.
async fn survive(num_streams: usize, size: &str) {
    let dir = tempfile::tempdir().expect("a directory");
    let mut cluster = start(dir.path(), size).await;
    let begin = |(path, body): (&'static str, Value)| {
        let http = cluster.http.clone();
        async move { Reader::begin_at(path, &http, &body).await }
    };
    let undisturbed = try_join_all(calls(num_streams, "undisturbed").into_iter().map(|call| {
        let begun = begin(call);
        async move { begun.await?.finish().await }
    }));
    let undisturbed = undisturbed.await.expect("nothing disturbs them");

    let saved_before = num_saved(&cluster).await;
    let readers = try_join_all(calls(num_streams, "cut").into_iter().enumerate().map(|(nth, call)| {
        let begun = begin(call);
        async move {
            let mut reader = begun.await?;
            reader.read(5 + nth % 7).await?;
            anyhow::Ok(reader)
        }
    }));
    let mut readers = readers.await.expect("they begin");
    eventually("prompts that are saved", Duration::from_secs(60), async || {
        (num_saved(&cluster).await - saved_before >= (num_streams * NUM_BLOCKS) as f64).then_some(())
    })
    .await;
    for name in ["router", "prefill-0", "decode-0"] {
        cluster.kill(name);
    }
    for name in ["router", "prefill-0", "decode-0"] {
        cluster.start_again(name);
    }
    cluster.wait_for_workers(1, 1).await;
    let num_cut = readers.len() as f64;
    assert_eq!(journal(&cluster, "parked").await + journal(&cluster, "ended").await, 2.0 * num_cut);
    assert_eq!(journal(&cluster, "parked").await, num_cut, "all were cut off in the middle");

    let began = Instant::now();
    let formatted = readers.split_off(num_streams);
    let resume = async |readers: Vec<Reader>, first: usize| {
        let calls = calls(num_streams, "cut").into_iter().skip(first);
        let resumed =
            try_join_all(readers.into_iter().zip(calls).enumerate().map(|(nth, (reader, (_, body)))| {
                let http = cluster.http.clone();
                async move { reader.resume(&http, (nth % 2 == 0).then_some(&body)).await?.finish().await }
            }));
        for (resumed, undisturbed) in resumed.await.expect("all go on").iter().zip(&undisturbed[first..]) {
            assert_eq!(resumed, undisturbed);
        }
    };
    resume(readers, 0).await;
    let num_computed = computed(&cluster, "prefill-0").await + computed(&cluster, "decode-0").await;
    let num_recomputed = num_computed - (num_streams * (NUM_NEXT - 1)) as f64;
    let part = num_recomputed / (num_streams * NUM_TOKENS) as f64;
    println!(
        "{num_streams} streams went on in {:?}; {:.2} % of prompt tokens were computed again",
        began.elapsed(),
        100.0 * part
    );
    assert!(part <= 0.01, "{part}");
    resume(formatted, num_streams).await;
    assert_eq!(journal(&cluster, "resumed_total").await, num_cut);
    assert_eq!(journal(&cluster, "damaged_total").await, 0.0);
    cluster.assert_all_blocks_free().await;
}

/// Blocks that were ever written to disk by the decode worker.
async fn num_saved(cluster: &Cluster) -> f64 {
    let address = address_of(cluster, "decode-0").await;
    cluster.metric(&address, "baton_kv_tier_blocks", &["tier=\"disk\""]).await
}

#[tokio::test]
async fn every_stream_survives_the_death_of_every_process() {
    survive(8, "64M").await;
}

/// `cargo test --release -p baton-tests --test system -- --ignored --nocapture durable::two_hundred`
#[tokio::test]
#[ignore = "takes minutes"]
async fn two_hundred_streams_survive_the_death_of_every_process() {
    survive(200, "2G").await;
}

#[tokio::test]
async fn clients_that_leave_come_back_and_others_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let cluster = start(dir.path(), "64M").await;
    let http = &cluster.http;
    // Long: it still runs when the router hears that the connection broke.
    let body = call(0, NUM_NEXT, "");
    let undisturbed = Reader::begin(http, &body).await.unwrap().finish().await.unwrap();

    // The connection breaks.
    let mut reader = Reader::begin(http, &body).await.unwrap();
    reader.read(9).await.unwrap();
    let last_id = reader.last_id.clone();
    let (answer_id, _) = last_id.rsplit_once(':').unwrap();
    reader.events = Reader::begin(http, &call(1, 1, "")).await.unwrap().events;
    eventually("a parked stream", Duration::from_secs(60), async || {
        (journal(&cluster, "parked").await == 1.0).then_some(())
    })
    .await;
    // Another connection takes the stream from one that still reads it.
    let mut first = reader.resume(http, Some(&body)).await.unwrap();
    first.read(20).await.unwrap();
    let first_events =
        std::mem::replace(&mut first.events, http.resume(PATH, &first.last_id, Some(&body)).await.unwrap());
    assert_eq!(first.finish().await.unwrap(), undisturbed);
    let mut replaced = Reader { path: PATH, events: first_events, last_id: String::new(), data: Vec::new() };
    let mut end = String::new();
    while let Ok((_, data)) = replaced.events.next_event().await {
        end = data;
    }
    assert!(end.contains("goes on in another connection") || end == "[DONE]", "{end}");
    // A stream that is complete can be read again, from its beginning, too.
    let again =
        http.resume(&format!("/v1/streams/{answer_id}"), &format!("{answer_id}:0"), None).await.unwrap();
    let again = Reader {
        path: PATH,
        events: again,
        last_id: format!("{answer_id}:0"),
        data: vec![undisturbed[0].clone()],
    };
    assert_eq!(again.finish().await.unwrap(), undisturbed);

    // What does not fit is refused.
    for (id, body, status) in [
        ("cmpl-none:3", Some(&body), "404"),
        (last_id.as_str(), Some(&call(1, NUM_NEXT, "")), "400"),
        ("17", Some(&body), "400"),
    ] {
        let refusal = http.resume(PATH, id, body).await.err().expect("it is refused").to_string();
        assert!(refusal.starts_with(status), "{id}: {refusal}");
    }
    // Several choices have no order, so their events have no ids.
    let mut several = call(0, 3, "");
    several["n"] = 2.into();
    let (id, _) = http.stream(PATH, &several).await.unwrap().next_event().await.unwrap();
    assert_eq!(id, None);

    over_grpc(&cluster).await;

    let args = format!(
        "router --listen 127.0.0.1:0 --discovery static --workers http://127.0.0.1:1 --durable {}",
        dir.path().join("journal").display()
    );
    let args: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
    let mut second = cluster.start_beside("second", &args);
    let status =
        eventually("the end of the second", Duration::from_secs(60), async || second.exit_status()).await;
    assert!(!status.success());
    assert!(second.log().contains("another router uses the journal"), "{}", second.log());
}

async fn over_grpc(cluster: &Cluster) {
    let expected = answer(cluster, &prompt(3), 100, PrefillMode::Unspecified, "").await;
    let request = GenerateRequest {
        request_id: "mine".into(),
        prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt(3), passages: Vec::new() })),
        sampling: Some(SamplingParams {
            max_tokens: Some(100),
            temperature: Some(0.0),
            ignore_eos: true,
            ..SamplingParams::default()
        }),
        ..GenerateRequest::default()
    };
    let mut client = InferenceClient::connect(cluster.base.clone()).await.expect("the router listens");
    let mut events = client.generate(request.clone()).await.expect("it begins").into_inner();
    let mut tokens = Vec::new();
    while tokens.len() < 7 {
        tokens.extend(output(&events.message().await.expect("it goes on").expect("it goes on")));
    }
    drop(events);
    let resume = ResumeRequest { request_id: "mine".into(), next_token_idx: 7 };
    let mut events = client.resume(resume).await.expect("it goes on").into_inner();
    let mut finish = None;
    while let Some(response) = events.message().await.expect("it goes on") {
        tokens.extend(output(&response));
        if let Some(Event::Finished(finished)) = response.event {
            finish = Some(finished);
        }
    }
    assert_eq!(tokens, expected);
    let finish = finish.expect("the end comes");
    assert_eq!((finish.reason(), finish.usage.unwrap().completion_tokens), (FinishReason::Length, 100));

    // A parked request can be aborted.
    let other = GenerateRequest { request_id: "other".into(), ..request };
    drop(client.generate(other).await.expect("it begins").into_inner().message().await);
    eventually("a parked stream", Duration::from_secs(60), async || {
        client.abort(AbortRequest { request_id: "other".into() }).await.ok()
    })
    .await;
    let resume = ResumeRequest { request_id: "none".into(), next_token_idx: 0 };
    let refusal = client.resume(resume).await.expect_err("there is none");
    assert_eq!(refusal.code(), tonic::Code::NotFound);
}

fn output(response: &GenerateResponse) -> Vec<u32> {
    match &response.event {
        Some(Event::Output(output)) => output.token_ids.clone(),
        _ => Vec::new(),
    }
}

/// The turn that follows a stream of which these events were read.
fn next_turn(nth: usize, data: &[String]) -> Value {
    let outputs = data.iter().flat_map(|data| {
        let event: Value = serde_json::from_str(data).expect("an event");
        event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default()
    });
    let known: Vec<Value> = prompt(nth).into_iter().map(Value::from).chain(outputs).collect();
    let mut turn = call(nth, 32, "");
    turn["prompt"] = known.into();
    turn
}

/// Begins a stream, and parks it when its client has read every token that the journal has: the worker is frozen first. Its KV is
/// then on disk. Returns the newest event's id, and the events.
async fn park(cluster: &Cluster, nth: usize) -> (String, Vec<String>) {
    let num_saved_before = num_saved(cluster).await;
    let mut reader = Reader::begin(&cluster.http, &call(nth, NUM_NEXT, "")).await.unwrap();
    reader.read(32).await.unwrap();
    cluster.signal("decode-0", libc::SIGSTOP);
    loop {
        let next = reader.data.len() + 1;
        let Ok(goes_on) = timeout(QUIET, reader.read(next)).await else { break };
        assert!(goes_on.expect("the router lives"), "it has ended before");
    }
    drop(reader.events);
    let num_parked = (nth + 1) as f64;
    eventually("a parked stream", Duration::from_secs(60), async || {
        (journal(cluster, "parked").await == num_parked).then_some(())
    })
    .await;
    cluster.signal("decode-0", libc::SIGCONT);
    let num_known = next_turn(nth, &reader.data)["prompt"].as_array().map_or(0, Vec::len);
    // The last token is never computed.
    let num_blocks = ((num_known - 1) / BLOCK_SIZE) as f64;
    eventually("a stream that is saved", Duration::from_secs(60), async || {
        (num_saved(cluster).await - num_saved_before >= num_blocks).then_some(())
    })
    .await;
    (reader.last_id, reader.data)
}

/// Parks streams, kills every process and starts it again. Of two streams one is then resumed; the tokens of the other are sent as
/// the prompt of a new turn. Returns how long each took to its first token, which no journal has: it is computed.
///
/// So both find the same in the same place: a stream of about one length, whose blocks were saved when its request ended, and are
/// on disk and in no pool. Both compute the last, partial block. What differs is what is measured: the journal is read, and the
/// events are made again that the client has. A stream that was not parked but killed while it ran also computes what it had not
/// saved, up to 256 tokens. No turn does that, so it would compare unlike things.
async fn go_on_from_disk(num_pairs: usize, size: &str) -> (Vec<Duration>, Vec<Duration>) {
    let dir = tempfile::tempdir().expect("a directory");
    let mut cluster = start(dir.path(), size).await;
    let mut parked = Vec::new();
    for nth in 0..2 * num_pairs {
        parked.push(park(&cluster, nth).await);
    }
    for name in ["router", "prefill-0", "decode-0"] {
        cluster.kill(name);
    }
    for name in ["router", "prefill-0", "decode-0"] {
        cluster.start_again(name);
    }
    cluster.wait_for_workers(1, 1).await;

    let http = &cluster.http;
    let (mut resumed, mut warm, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    // Each kind is first every second time.
    for nth in (0..num_pairs).flat_map(|pair| [2 * pair + pair % 2, 2 * pair + (pair + 1) % 2]) {
        let (last_id, data) = parked[nth].clone();
        let (body, turn) = (call(nth, NUM_NEXT, ""), next_turn(nth, &data));
        let next = data.len() + 1;
        let began = Instant::now();
        if nth % 2 == 0 {
            let events = http.resume(PATH, &last_id, Some(&body)).await.unwrap();
            let mut reader = Reader { path: PATH, events, last_id, data };
            reader.read(next).await.unwrap();
            resumed.push(began.elapsed());
            answers.push(reader.finish().await.unwrap());
        } else {
            let mut reader = Reader::begin(http, &turn).await.unwrap();
            reader.read(1).await.unwrap();
            warm.push(began.elapsed());
            reader.finish().await.unwrap();
        }
    }
    let mut num_read = 0.0;
    for id in ["prefill-0", "decode-0"] {
        let address = address_of(&cluster, id).await;
        num_read += cluster.metric(&address, "baton_kv_tier_hits_total", &["tier=\"disk\""]).await;
    }
    println!("{num_read} blocks of {} streams were read from disk", parked.len());
    assert!(num_read >= NUM_BLOCKS as f64, "{num_read}");
    assert_eq!(journal(&cluster, "resumed_total").await, num_pairs as f64);

    let undisturbed = try_join_all((0..num_pairs).map(|pair| {
        let body = call(2 * pair, NUM_NEXT, "undisturbed");
        async move { Reader::begin(http, &body).await?.finish().await }
    }));
    assert_eq!(answers, undisturbed.await.expect("nothing disturbs them"));
    cluster.assert_all_blocks_free().await;
    (resumed, warm)
}

#[tokio::test]
async fn parked_streams_go_on_from_disk_after_the_death_of_every_process() {
    go_on_from_disk(2, "64M").await;
}

/// Prints both medians, and returns their ratio.
fn compare(what: &str, mut resumed: Vec<Duration>, mut warm: Vec<Duration>) -> f64 {
    resumed.sort_unstable();
    warm.sort_unstable();
    let num = resumed.len();
    let (resumed, warm) = (resumed[num / 2], warm[num / 2]);
    let ratio = resumed.as_secs_f64() / warm.as_secs_f64();
    println!("{what}, median of {num}: resumed {resumed:?}, warm turn {warm:?}: {ratio:.3}x");
    ratio
}

/// First a stream that its client left, of which the journal has more than the client: the next token comes from there. Then
/// streams of which the client has all: the next token is [computed](go_on_from_disk).
///
/// `cargo test --release -p baton-tests --test system -- --ignored --nocapture durable::resuming`
#[tokio::test]
#[ignore = "measures"]
async fn resuming_costs_what_a_warm_turn_costs() {
    const NUM_ROUNDS: usize = 40;
    let dir = tempfile::tempdir().expect("a directory");
    let cluster = start(dir.path(), "512M").await;
    let http = &cluster.http;
    let (mut resumed, mut warm) = (Vec::new(), Vec::new());
    for nth in 0..NUM_ROUNDS {
        let other = http.stream(PATH, &call(0, 1, "other")).await.unwrap();
        // Long enough not to end before its client leaves, which waits for nothing else.
        let body = call(nth, NUM_NEXT, "");
        let mut reader = Reader::begin(http, &body).await.unwrap();
        reader.read(32).await.unwrap();
        drop(std::mem::replace(&mut reader.events, other));
        eventually("a parked stream", Duration::from_secs(60), async || {
            (journal(&cluster, "parked").await > 0.0).then_some(())
        })
        .await;
        let turn = next_turn(nth, &reader.data);
        // Each is first every second time.
        let mut reader = Some(reader);
        for kind in [nth % 2, (nth + 1) % 2] {
            let began = Instant::now();
            if kind == 0 {
                let mut reader = reader.take().unwrap().resume(http, Some(&body)).await.unwrap();
                let next = reader.data.len() + 1;
                reader.read(next).await.unwrap();
                resumed.push(began.elapsed());
                reader.finish().await.unwrap();
            } else {
                let mut reader = Reader::begin(http, &turn).await.unwrap();
                reader.read(1).await.unwrap();
                warm.push(began.elapsed());
                reader.finish().await.unwrap();
            }
        }
    }
    compare("time to the next token, which the journal has, KV in the pool", resumed, warm);
    drop(cluster);

    let (resumed, warm) = go_on_from_disk(NUM_ROUNDS, "1G").await;
    let ratio =
        compare("time to the next token, which is computed, all processes killed, KV on disk", resumed, warm);
    assert!(ratio <= 1.06, "{ratio}");
}
