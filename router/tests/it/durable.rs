//! Streams that are cut off after any token, in every API: with the events that its client has, a resumed stream is the
//! undisturbed one. What was delivered before costs its key nothing.

use std::time::Duration;

use baton_proto::{
    v1::{self, generate_request::Prompt},
    worker::GenerateRequest,
};
use baton_request::FailureKind;
use baton_router::{JournalConfig, RouterConfig, ToolFormat};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    client::Client,
    fake::{FakeWorker, Step, say},
    grpc,
    harness::{Router, SOON},
    model::{MODEL, ids},
};

/// Reasoning, text with a character of two tokens, and a call. A token is a byte.
const ANSWER: &str =
    "<think>1 é?</think>Well.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";

/// Streams at a time.
const WAVE: usize = 32;

/// The calls of one API.
#[derive(Clone, Copy)]
struct Api {
    path: &'static str,
    /// Says `prompt`.
    body: fn(&str) -> Value,
}

const APIS: [Api; 4] = [
    Api { path: "/v1/completions", body: |prompt| json!({"prompt": prompt, "stop": ["never"]}) },
    Api {
        path: "/v1/chat/completions",
        body: |prompt| {
            json!({"messages": [{"role": "user", "content": prompt}], "stream_options": {"include_usage": true},
                   "tools": [{"type": "function", "function": {"name": "add", "parameters": parameters()}}]})
        },
    },
    Api {
        path: "/v1/responses",
        body: |prompt| {
            let tool = json!({"type": "function", "name": "add", "parameters": parameters()});
            json!({"input": prompt, "tools": [tool], "metadata": {"a": "b"}})
        },
    },
    Api {
        path: "/v1/messages",
        body: |prompt| {
            json!({"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": prompt}],
                   "tools": [{"name": "add", "input_schema": parameters()}]})
        },
    },
];

fn parameters() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "integer"}}})
}

/// A call whose answer falls silent after so many tokens, until it is asked for the next ones.
fn call(api: Api, num_tokens: usize) -> Value {
    let mut body = (api.body)(&format!("[{num_tokens:03}]"));
    body["stream"] = json!(true);
    body
}

/// What such a call says.
fn script(request: &GenerateRequest) -> Vec<Step> {
    let mut steps = say(ANSWER)(request);
    let prompt: Vec<u8> = request.prompt_token_ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
    let number = String::from_utf8(prompt).expect("text").split(['[', ']']).nth(1).map(str::parse);
    let num_tokens: usize = number.expect("each call has a number").expect("a number");
    if request.output_token_ids.is_empty() && num_tokens < steps.len() {
        steps.truncate(num_tokens);
        steps.push(Step::Silence);
    }
    steps
}

/// A router that knows the marks of reasoning and of calls, with a journal.
fn durable(dir: &std::path::Path) -> impl FnOnce(&mut RouterConfig) + use<> {
    let dir = dir.to_owned();
    move |config| {
        let file = config.model.join("tokenizer_config.json");
        let text = std::fs::read_to_string(&file).expect("the model has a template");
        let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
        let template = tokenizer["chat_template"].as_str().expect("a template").to_owned();
        tokenizer["chat_template"] = json!(template + "{# <think></think> #}");
        std::fs::write(&file, tokenizer.to_string()).expect("the directory is writable");
        config.tool_format = Some(ToolFormat::Hermes);
        config.stream_keep_alive = Duration::from_millis(50);
        config.drain_timeout = Duration::ZERO;
        config.durable = Some(JournalConfig { dir, max_bytes: 1 << 24, ttl: SOON });
    }
}

async fn register(router: &mut Router) -> FakeWorker {
    let worker = FakeWorker::start("d0", baton_cluster::Role::Decode, 1).await;
    router.register(&worker).await;
    worker.script(script);
    worker
}

/// An event of a stream: its id, and its name and data.
#[derive(Clone, Debug, PartialEq)]
struct Event {
    id: String,
    said: String,
}

/// A stream as far as its client has it.
#[derive(Default)]
struct Reader {
    events: Vec<Event>,
}

impl Reader {
    /// Reads a stream to its end, or until it is silent after an event. The connection stays, as one that broke unseen.
    async fn read(&mut self, response: &mut http::Response<hyper::body::Incoming>) {
        assert_eq!(response.status(), 200);
        let mut text = String::new();
        while !(text.ends_with(": keep-alive\n\n") && text.contains("data: ")) {
            let frame = tokio::time::timeout(SOON, response.body_mut().frame()).await.expect("it goes on");
            let Some(frame) = frame else { break };
            let data = frame.expect("it is not cut off").into_data().expect("data");
            text.push_str(std::str::from_utf8(&data).expect("whole events"));
        }
        for event in text.split_terminator("\n\n").filter(|event| !event.starts_with(':')) {
            let (id, said) =
                event.strip_prefix("id: ").and_then(|event| event.split_once('\n')).expect("an id");
            assert!(id.ends_with(&format!(":{}", self.events.len())), "{id} after {:?}", self.events.last());
            self.events.push(Event { id: id.to_owned(), said: said.to_owned() });
        }
    }

    fn answer_id(&self) -> &str {
        self.events[0].id.rsplit_once(':').expect("an answer and a number").0
    }

    /// What was said, without what differs between equal answers.
    fn said(&self) -> Vec<String> {
        let id = self.answer_id();
        let unique = id.split_once(['-', '_']).expect("a kind and a number").1;
        let plain = |event: &Event| {
            let (name, data) = event.said.split_once("data: ").expect("an event has data");
            let Ok(mut data) = serde_json::from_str::<Value>(data) else { return event.said.clone() };
            for time in ["/created", "/response/created_at"] {
                if let Some(time) = data.pointer_mut(time) {
                    time.take();
                }
            }
            name.to_owned() + &data.to_string().replace(unique, "")
        };
        self.events.iter().map(plain).collect()
    }

    /// Goes on after its first events, with the same call or with `GET`.
    async fn resume(&mut self, client: &Client, api: Api, num_events: usize, body: Option<&Value>) {
        self.events.truncate(num_events);
        let last = self.events[num_events - 1].id.clone();
        let headers = [("content-type", "application/json"), ("last-event-id", &*last)];
        let stream = format!("/v1/streams/{}", self.answer_id());
        let (method, path) = if body.is_some() { ("POST", api.path) } else { ("GET", &*stream) };
        let body = body.map(Value::to_string).unwrap_or_default();
        let mut response = client.begin(method, path, &headers, body.into()).await;
        // The stream had ended with its last event.
        if response.status() != 204 {
            self.read(&mut response).await;
        }
    }
}

/// A stream that falls silent after so many tokens, and its connection.
async fn begin(client: &Client, api: Api, num_tokens: usize) -> (Reader, impl Sized + use<>) {
    let headers = [("content-type", "application/json")];
    let body = call(api, num_tokens).to_string();
    let mut response = client.begin("POST", api.path, &headers, Bytes::from(body)).await;
    let mut reader = Reader::default();
    reader.read(&mut response).await;
    (reader, response)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_cut_off_after_any_token_goes_on_with_the_same_events() {
    let dir = tempfile::tempdir().unwrap();
    let mut router = Router::start(durable(dir.path())).await;
    let _worker = register(&mut router).await;
    let client = &router.client;
    for api in APIS {
        let whole = begin(client, api, 999).await.0.said();
        if api.path != "/v1/completions" {
            let said = whole.concat();
            assert!(said.contains('é') && said.contains("\"name\":\"add\""), "{said}");
            assert!(!said.contains("think>") && !said.contains("<tool_call>"), "{said}");
        }
        let num_tokens = ids(ANSWER).len() + 1;
        let cuts = stream::iter(1..=num_tokens).map(async |num_tokens| {
            let (mut reader, _connection) = begin(client, api, num_tokens).await;
            let (num_events, body) = (reader.events.len(), call(api, num_tokens));
            reader.resume(client, api, num_events, Some(&body)).await;
            assert_eq!(reader.said(), whole, "{} after {num_tokens} tokens", api.path);
            // From anywhere in the whole stream, too.
            reader.resume(client, api, 1 + num_tokens % (whole.len() - 1), None).await;
            assert_eq!(reader.said(), whole, "{} again, {num_tokens}", api.path);
            // After its last event, `EventSource` must be told not to ask again.
            let last = [("last-event-id", &*reader.events[whole.len() - 1].id)];
            let path = format!("/v1/streams/{}", reader.answer_id());
            assert_eq!(client.send("GET", &path, &last, Bytes::new()).await.status, 204, "{}", api.path);
        });
        cuts.buffer_unordered(WAVE).for_each(async |()| {}).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_with_the_same_events_at_another_router() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Router::start(durable(dir.path())).await;
    let worker = register(&mut first).await;
    // In the middle of a call's arguments.
    let num_tokens = ANSWER.find(": 1}").expect("an argument");
    let mut cut = Vec::new();
    for api in APIS {
        let whole = begin(&first.client, api, 999).await.0.said();
        cut.push((api, whole, begin(&first.client, api, num_tokens).await));
    }
    first.begin_shutdown();
    first.ended().await.unwrap();
    drop(worker);
    let mut second = Router::start(durable(dir.path())).await;
    let _worker = register(&mut second).await;
    for (api, whole, (mut reader, _connection)) in cut {
        let num_events = reader.events.len();
        reader.resume(&second.client, api, num_events, None).await;
        assert_eq!(reader.said(), whole, "{}", api.path);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_events_that_are_made_otherwise_now_are_refused_and_those_of_tokens_are_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut first = Router::start(durable(dir.path())).await;
    let worker = register(&mut first).await;
    let mut cut = Vec::new();
    for api in APIS {
        cut.push((api, begin(&first.client, api, 20).await));
    }
    let request = v1::GenerateRequest {
        prompt: Some(Prompt::Text("[020]".into())),
        request_id: "mine".into(),
        ..Default::default()
    };
    let mut client = grpc::client(&first).await;
    let mut silent = client.generate(request).await.expect("it begins").into_inner();
    silent.message().await.expect("it goes on").expect("a token");
    drop((silent, client));
    first.begin_shutdown();
    first.ended().await.unwrap();
    drop(worker);
    let configure = durable(dir.path());
    let mut second = Router::start(|config| {
        configure(config);
        config.tool_format = Some(ToolFormat::Mistral);
    })
    .await;
    let _worker = register(&mut second).await;
    for (api, (reader, _connection)) in &cut {
        let last = [("content-type", "application/json"), ("last-event-id", &*reader.events[0].id)];
        let path = format!("/v1/streams/{}", reader.answer_id());
        for (method, path) in [("GET", &*path), ("POST", api.path)] {
            let answer = second.client.send(method, path, &last, Bytes::new()).await;
            assert_eq!(answer.status, 400, "{method} {path}: {}", answer.text());
            let said = if method == "GET" { "stream_changed" } else { "from its first event" };
            assert!(answer.text().contains(said), "{}", answer.text());
        }
    }
    let (completions, (reader, _connection)) = &cut[0];
    let stream = format!("/v1/streams/{}", reader.answer_id());
    let mut again = Reader::default();
    again.read(&mut second.client.begin("GET", &stream, &[], Bytes::new()).await).await;
    assert_eq!(again.said(), begin(&second.client, *completions, 999).await.0.said());
    let resume = v1::ResumeRequest { request_id: "mine".into(), next_token_idx: 1 };
    let mut client = grpc::client(&second).await;
    let mut rest = client.resume(resume).await.expect("tokens have their numbers").into_inner();
    assert!(rest.message().await.expect("it goes on").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_another_model_waits_for_a_router_of_its_own() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut first = Router::start(durable(dir.path())).await;
    let worker = register(&mut first).await;
    let mut client = grpc::client(&first).await;
    let prompt = Some(Prompt::Text("[003]".into()));
    let request = v1::GenerateRequest { prompt, request_id: "mine".into(), ..Default::default() };
    let mut silent = client.generate(request).await.expect("it begins").into_inner();
    silent.message().await.expect("it goes on").expect("a token");
    drop((silent, client));
    first.begin_shutdown();
    first.ended().await.unwrap();
    drop(worker);
    let configure = durable(dir.path());
    let second = Router::start(|config| {
        configure(config);
        config.model_name = "other".into();
    })
    .await;
    let resume = v1::ResumeRequest { request_id: "mine".into(), next_token_idx: 1 };
    let refused = grpc::client(&second).await.resume(resume).await.expect_err("it is of another model");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused}");
    let answer = second.client.get("/v1/streams/mine").await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (400, &json!("model_mismatch")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_after_more_than_an_answer_has_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut router = Router::start(durable(dir.path())).await;
    let _worker = register(&mut router).await;
    for api in APIS {
        let (reader, _connection) = begin(&router.client, api, 999).await;
        let (id, num_events) = (reader.answer_id(), reader.events.len());
        let path = format!("/v1/streams/{id}");
        for (method, path, number, status) in [
            ("GET", &*path, num_events - 1, 204),
            ("GET", &*path, num_events, 400),
            ("POST", api.path, num_events - 1, 200),
            ("POST", api.path, num_events + 7, 400),
        ] {
            let last = format!("{id}:{number}");
            let headers = [("content-type", "application/json"), ("last-event-id", &*last)];
            let answer = router.client.send(method, path, &headers, Bytes::new()).await;
            assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
            assert_eq!(answer.text().contains("Last-Event-ID"), status == 400, "{}", answer.text());
        }
    }

    let mut client = grpc::client(&router).await;
    let request = |id: &str, prompt: &str| v1::GenerateRequest {
        prompt: Some(Prompt::Text(prompt.into())),
        request_id: id.into(),
        sampling: Some(v1::SamplingParams { max_tokens: Some(200), ..Default::default() }),
        ..Default::default()
    };
    let mut whole = client.generate(request("whole", "[999]")).await.expect("it begins").into_inner();
    while whole.message().await.expect("it goes on").is_some() {}
    let mut silent = client.generate(request("silent", "[003]")).await.expect("it begins").into_inner();
    silent.message().await.expect("it goes on").expect("a token");
    // The end is a token, too.
    let num_tokens = ids(ANSWER).len() as u32 + 1;
    for (id, next_token_idx, most) in [("whole", num_tokens + 1, num_tokens), ("silent", 201, 200)] {
        let resume = v1::ResumeRequest { request_id: id.into(), next_token_idx };
        let refusal = client.resume(resume).await.expect_err("it has fewer tokens");
        assert_eq!(refusal.code(), tonic::Code::InvalidArgument, "{refusal}");
        assert!(refusal.message().ends_with(&format!("at most {most} tokens")), "{refusal}");
    }
    router.until_metric("baton_journal_running 1").await;
    let resume = v1::ResumeRequest { request_id: "whole".into(), next_token_idx: num_tokens };
    let mut rest = client.resume(resume).await.expect("it is there").into_inner();
    assert!(rest.message().await.expect("its end comes").is_some());
}

/// The ids of the calls in the rest of a stream.
async fn ids_of_calls(mut stream: tonic::Streaming<v1::GenerateResponse>) -> Vec<String> {
    use v1::{answer_part::Part, generate_response::Event};
    let mut ids = Vec::new();
    while let Some(response) = stream.message().await.expect("it goes on") {
        let Some(Event::Output(output)) = response.event else { continue };
        let calls = output.parts.into_iter().filter_map(|part| match part.part {
            Some(Part::Call(call)) => Some(call.id),
            _ => None,
        });
        ids.extend(calls);
    }
    ids
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_have_the_same_ids_in_a_stream_that_is_resumed_over_grpc() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut router = Router::start(durable(dir.path())).await;
    let worker = register(&mut router).await;
    let called = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n";
    worker.script(say(&called.repeat(2)));
    // So long that the call is read on another thread.
    let description = "Adds. ".repeat(5_000);
    let parameters = parameters().to_string();
    let tool = v1::Tool { name: "add".into(), description, parameters, strict: None };
    let message = v1::ChatMessage { role: "user".into(), content: "1 + 1".into(), ..Default::default() };
    let chat = v1::ChatMessages { messages: vec![message], tools: vec![tool], ..Default::default() };
    let request = |id: &str| v1::GenerateRequest {
        prompt: Some(Prompt::Chat(chat.clone())),
        request_id: id.into(),
        ..Default::default()
    };
    let mut client = grpc::client(&router).await;
    let whole = ids_of_calls(client.generate(request("mine")).await.expect("it begins").into_inner()).await;
    assert!(whole.len() == 2 && whole[0] != whole[1], "{whole:?}");
    // A token is a byte: from the first one, and after the first call.
    for (next_token_idx, expected) in [(0, &whole[..]), (called.len() as u32, &whole[1..])] {
        let resume = v1::ResumeRequest { request_id: "mine".into(), next_token_idx };
        let rest = client.resume(resume).await.expect("it is there").into_inner();
        assert_eq!(ids_of_calls(rest).await, expected, "from token {next_token_idx} on");
    }
    let other = ids_of_calls(client.generate(request("other")).await.expect("it begins").into_inner()).await;
    assert!(other.len() == 2 && other.iter().all(|id| !whole.contains(id)), "{other:?} after {whole:?}");
}

/// A router that runs one request at a time.
async fn start_with_room_for_one(dir: &std::path::Path) -> Router {
    let configure = durable(dir);
    Router::start(|config| {
        configure(config);
        config.max_requests = 1;
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_was_refused_is_not_parked_and_may_be_asked_for_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut router = start_with_room_for_one(dir.path()).await;
    let worker = register(&mut router).await;
    worker.script(|_| vec![Step::Hang]);
    let router = std::sync::Arc::new(router);
    let send = |id: &'static str| {
        let router = router.clone();
        let body = json!({"prompt": "[999]", "stream": true, "request_id": id});
        tokio::spawn(async move { router.client.post("/v1/completions", &body).await.status })
    };
    let running = send("first");
    worker.next_arrived().await;
    assert_eq!(send("second").await.expect("no panic"), 429);
    worker.script(script);
    worker.release(Step::Finish(v1::FinishReason::Stop));
    assert_eq!(running.await.expect("no panic"), 200);
    assert_eq!(send("second").await.expect("no panic"), 200);
    // Refused by every worker.
    worker.script(|_| vec![Step::Refuse(FailureKind::Full)]);
    assert_eq!(send("third").await.expect("no panic"), 429);
    router.until_metric("baton_journal_parked 0").await;
    worker.script(script);
    assert_eq!(send("third").await.expect("no panic"), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_that_is_refused_takes_nothing_from_the_client_that_reads() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut router = start_with_room_for_one(dir.path()).await;
    let _worker = register(&mut router).await;
    let [completions, chat, ..] = APIS;
    let (reader, _connection) = begin(&router.client, completions, 3).await;
    let (same, other) = (call(completions, 3).to_string(), call(completions, 4).to_string());
    // Another body, another endpoint, and no room.
    for (path, body, status) in
        [(completions.path, &*other, 400), (chat.path, "", 400), (completions.path, &*same, 429)]
    {
        let headers = [("content-type", "application/json"), ("last-event-id", &*reader.events[0].id)];
        let answer = router.client.send("POST", path, &headers, Bytes::from(body.to_owned())).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        let metrics = router.client.get("/metrics").await.text();
        assert!(metrics.lines().any(|line| line == "baton_journal_running 1"), "{status}: {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_read_only_if_there_is_room_for_all_of_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let configure = durable(dir.path());
    let mut router = Router::start(|config| {
        configure(config);
        config.max_bodies_bytes = 150_000;
    })
    .await;
    let _worker = register(&mut router).await;
    let path = APIS[0].path;
    let whole = router.client.post_text(path, &format!("{:30000}{}", "", call(APIS[0], 999))).await;
    let text = whole.text();
    let id = text.split_once("id: ").and_then(|(_, text)| Some(text.split_once(":0\n")?.0)).expect("an id");
    router.until_metric("baton_router_body_bytes 0").await;
    // Beside it there is room for the body alone, and not for what is read and made of it.
    let mut slow = TcpStream::connect(router.address).await.expect("it listens");
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 110000\r\n\r\n");
    slow.write_all(&[head.into_bytes(), vec![b' '; 100_000]].concat()).await.expect("it is read");
    router.until_metric("baton_router_body_bytes 100000").await;
    let stream = format!("/v1/streams/{id}");
    let refused = router.client.get(&stream).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"), "{}", refused.text());
    router.until_metric("baton_router_body_bytes 100000").await;
    drop(slow);
    router.until_metric("baton_router_body_bytes 0").await;
    let again = router.client.get(&stream).await;
    assert!(again.status == 200 && again.text().contains("[DONE]"), "{again:?}");
    router.until_metric("baton_router_body_bytes 0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_without_events_is_parked_only_if_its_client_knows_the_id() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut router = Router::start(durable(dir.path())).await;
    let worker = register(&mut router).await;
    worker.script(|_| vec![Step::Silence]);
    let headers = [("content-type", "application/json")];
    let body = call(APIS[0], 999).to_string();
    let response = router.client.begin("POST", APIS[0].path, &headers, body.into()).await;
    assert_eq!(response.status(), 200);
    drop(response);
    router.until_metric("baton_journal_ended 1").await;

    let mut client = grpc::client(&router).await;
    let prompt = Some(Prompt::Text("[999]".into()));
    let request = v1::GenerateRequest { prompt, request_id: "mine".into(), ..Default::default() };
    drop(client.generate(request).await.expect("it begins"));
    router.until_metric("baton_journal_parked 1").await;
    worker.script(script);
    let resume = v1::ResumeRequest { request_id: "mine".into(), next_token_idx: 0 };
    let mut events = client.resume(resume).await.expect("it is parked").into_inner();
    assert!(events.message().await.expect("it goes on").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_another_connection_resumes_is_no_error_and_its_prompt_counts_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut router = Router::start(durable(dir.path())).await;
    let _worker = register(&mut router).await;
    let (mut reader, _connection) = begin(&router.client, APIS[0], 3).await;
    reader.resume(&router.client, APIS[0], 1, Some(&call(APIS[0], 3))).await;
    for (outcome, num) in [("resumed", 1), ("ok", 1), ("error", 0), ("parked", 0)] {
        let labels = format!("endpoint=\"/v1/completions\",outcome=\"{outcome}\"");
        router.until_metric(&format!("baton_router_generations_total{{{labels}}} {num}")).await;
    }
    router.until_metric("baton_router_prompt_tokens_total 5").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_another_connection_resumes_does_not_tell_its_client_to_come_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut router = Router::start(durable(dir.path())).await;
    let _worker = register(&mut router).await;
    let mut client = grpc::client(&router).await;
    let prompt = Some(Prompt::Text("[003]".into()));
    let request = v1::GenerateRequest { prompt, request_id: "mine".into(), ..Default::default() };
    let mut first = client.generate(request).await.expect("it begins").into_inner();
    first.message().await.expect("it goes on").expect("a token");
    let resume = v1::ResumeRequest { request_id: "mine".into(), next_token_idx: 0 };
    let _second = client.resume(resume).await.expect("it is there").into_inner();
    let end = loop {
        match first.message().await {
            Ok(response) => assert!(response.is_some(), "it ends with an error"),
            Err(end) => break end,
        }
    };
    assert_eq!(end.code(), tonic::Code::Aborted, "{end}");
    assert!(end.message().contains("in another connection"), "{end}");
    assert_eq!(end.metadata().get("baton-code").expect("it has a code"), "stream_replaced");
    assert!(end.metadata().get("retry-after").is_none(), "{end:?}");
}
