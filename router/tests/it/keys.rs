//! Keys, quotas and tenants.

use std::{collections::BTreeSet, path::Path, time::Duration};

use baton_cluster::Role;
use baton_keys::ApiKey;
use baton_proto::v1::{
    AbortRequest, FinishReason, GenerateRequest, GenerateResponse, ResumeRequest, generate_request::Prompt,
};
use baton_request::FailureKind;
use baton_router::{JournalConfig, RouterConfig};
use bytes::Bytes;
use prost::Message;
use serde_json::json;
use tempfile::NamedTempFile;
use tonic::Code;

use crate::{
    client::{Answer, Client},
    fake::{FakeWorker, Step, say},
    grpc,
    harness::{Router, SOON},
    page::Stream,
};

const ACME: u8 = 1;
const OTHER: u8 = 2;
const OPERATOR: u8 = 3;
const WORKER: u8 = 4;
const REVOKED: u8 = 5;

fn secret(number: u8) -> String {
    ApiKey::from_random([number; 32]).secret().to_owned()
}

fn entry(number: u8, fields: &str) -> String {
    let hash = ApiKey::from_random([number; 32]).hash();
    format!("[[key]]\nname = \"k{number}\"\nhash = \"{hash}\"\n{fields}\n")
}

fn entries(quotas: &str) -> String {
    [
        entry(ACME, &format!("tenant = \"acme\"\n{quotas}")),
        entry(OTHER, "tenant = \"other\""),
        entry(OPERATOR, "tenant = \"ops\"\nrole = \"operator\""),
        entry(WORKER, "role = \"worker\""),
    ]
    .concat()
}

/// A router with these keys and a decode worker, and the file.
async fn start(text: &str) -> (Router, FakeWorker, NamedTempFile) {
    start_with(text, |_| {}).await
}

async fn start_with(
    text: &str,
    configure: impl FnOnce(&mut RouterConfig),
) -> (Router, FakeWorker, NamedTempFile) {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_owned();
    let with_keys = |config: &mut RouterConfig| {
        config.api_keys = Some(path);
        configure(config);
    };
    let mut router = Router::start(with_keys).await;
    router.client.key = Some(secret(ACME));
    router.worker_key = Some(secret(WORKER));
    let worker = FakeWorker::start("d0", Role::Decode, 1).await;
    router.register(&worker).await;
    worker.script(say("Hello"));
    (router, worker, file)
}

fn client(router: &Router, key: Option<String>) -> Client {
    let mut client = Client::new(router.address);
    client.key = key;
    client
}

async fn until(client: &Client, path: &str, status: u16) {
    let asking = async {
        while client.begin("GET", path, &[], Bytes::new()).await.status() != status {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, asking).await.unwrap_or_else(|_| panic!("{path} never answers {status}"));
}

/// Each route with its method, from the source.
fn routes() -> Vec<(&'static str, &'static str)> {
    let sources = [include_str!("../../src/http/mod.rs"), include_str!("../../src/http/page/mod.rs")];
    let routes = sources.into_iter().flat_map(|source| source.split(".route(").skip(1)).map(|route| {
        let path = route.split('"').nth(1).expect("a path");
        let is_post = route
            .split_once(path)
            .expect("it is there")
            .1
            .trim_start_matches("\",")
            .trim()
            .starts_with("post");
        (if is_post { "POST" } else { "GET" }, path)
    });
    routes.collect()
}

/// Each method of each service that this program has, and those of gRPC itself.
fn methods() -> Vec<String> {
    let mut methods: Vec<String> = ["grpc.reflection.v1", "grpc.reflection.v1alpha"]
        .map(|version| format!("/{version}.ServerReflection/ServerReflectionInfo"))
        .into();
    for set in [baton_proto::DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET] {
        for file in prost_types::FileDescriptorSet::decode(set).unwrap().file {
            for service in &file.service {
                let name = format!("/{}.{}/", file.package(), service.name());
                methods.extend(service.method.iter().map(|method| name.clone() + method.name()));
            }
        }
    }
    methods
}

async fn call(client: &Client, path: &str) -> String {
    let headers = [("content-type", "application/grpc")];
    let response = client.begin("POST", path, &headers, Bytes::from_static(&[0; 5])).await;
    response.headers().get("grpc-status").map_or("", |status| status.to_str().unwrap()).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_and_method_but_probes_needs_a_valid_key() {
    let text = entries("");
    let expired = entry(6, "tenant = \"acme\"\nexpires = 2020-01-01");
    let (router, _worker, file) =
        start(&format!("{text}{}{expired}", entry(REVOKED, "tenant = \"acme\""))).await;
    let revoked = client(&router, Some(secret(REVOKED)));
    let mut events = revoked.begin("GET", "/events", &[], Bytes::new()).await.into_body();
    std::fs::write(file.path(), text).unwrap();
    until(&revoked, "/v1/models", 401).await;
    let rest = http_body_util::BodyExt::collect(&mut events);
    tokio::time::timeout(SOON, rest).await.expect("a stream without an end ends with its key").unwrap();

    let wrong = ["baton_", "sk-0", "-"].map(|key| Some(key.to_owned()));
    let keys = [None, Some(secret(9)), Some(secret(REVOKED)), Some(secret(6))];
    let open = ["/", "/page.css", "/page.js", "/health", "/livez", "/readyz", "/startupz"];
    let open_methods = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"];
    let (routes, methods) = (routes(), methods());
    assert!(routes.len() >= 21 && methods.len() >= 15, "{routes:?} {methods:?}");
    for key in keys.into_iter().chain(wrong) {
        let client = client(&router, key.clone());
        let mut refused = BTreeSet::new();
        for &(method, path) in &routes {
            let answer = client.send(method, &path.replace("{*id}", "bytes"), &[], Bytes::new()).await;
            assert_eq!(answer.status != 401, open.contains(&path), "{method} {path} with {key:?}");
            refused.extend((answer.status == 401).then_some(path));
        }
        assert_eq!(refused.len(), routes.len() - open.len());
        for path in &methods {
            let is_refused = call(&client, path).await == (Code::Unauthenticated as i32).to_string();
            assert_eq!(!is_refused, open_methods.contains(&&path[..]), "{path} with {key:?}");
        }
        for (method, path) in [("GET", "/v1/nothing"), ("PUT", "/v1/models"), ("OPTIONS", "/v1/models")] {
            assert_eq!(client.send(method, path, &[], Bytes::new()).await.status, 401, "{method} {path}");
        }
        assert_eq!(client.get("/health").await.json(), json!({"status": "ok"}));
        assert_eq!(client.get("/readyz").await.text(), "ok\n");
    }
    for &(method, path) in routes.iter().filter(|(_, path)| *path != "/events") {
        let answer = router.client.send(method, &path.replace("{*id}", "bytes"), &[], Bytes::new()).await;
        assert_ne!(answer.status, 401, "{method} {path} with a key");
    }
    assert_eq!(router.client.get("/health").await.json()["workers"][0]["id"], "d0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_has_the_shape_of_its_api() {
    let (router, _worker, _file) = start(&entries("")).await;
    let client = client(&router, None);
    let answer = client.get("/v1/models").await;
    assert_eq!((answer.status, answer.header("www-authenticate")), (401, "Bearer"));
    let error = &answer.json()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("invalid_request_error"), &json!("invalid_api_key"))
    );

    let body = json!({"model": "bytes", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]});
    let answer = client.post("/v1/messages", &body).await;
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (401, &json!("authentication_error")));
    let key = secret(ACME);
    let headers = [("content-type", "application/json"), ("x-api-key", &*key)];
    let answer = client.send("POST", "/v1/messages", &headers, body.to_string().into()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());

    let headers = [("content-type", "application/grpc")];
    let answer = client.send("POST", "/baton.v1.Inference/Loads", &headers, Bytes::new()).await;
    assert_eq!((answer.status, answer.header("grpc-status")), (200, "16"));
    assert!(answer.header("grpc-message").contains("needs%20an%20API%20key"), "{answer:?}");
    assert_eq!(answer.header("baton-code"), "invalid_api_key");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_opens_what_its_role_needs() {
    let (router, _worker, _file) = start(&entries("")).await;
    for number in [ACME, OPERATOR] {
        let status = call(&client(&router, Some(secret(number))), "/baton.worker.v1.Registry/Register").await;
        assert_eq!(status, (Code::PermissionDenied as i32).to_string(), "{number} registers no worker");
    }
    let worker = client(&router, Some(secret(WORKER)));
    let answer = worker.get("/v1/models").await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (403, &json!("permission_denied")));
    assert_eq!(
        call(&worker, "/baton.v1.Inference/Generate").await,
        (Code::PermissionDenied as i32).to_string()
    );
    assert_eq!(worker.get("/health").await.json()["workers"][0]["id"], "d0");
}

/// Lower ones come first, before those of all other tenants.
#[tokio::test(flavor = "multi_thread")]
async fn a_priority_below_0_needs_the_role_operator() {
    let (router, worker, _file) = start(&entries("")).await;
    let operator = client(&router, Some(secret(OPERATOR)));
    let bodies = [
        ("/v1/completions", json!({"prompt": "Hi"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}]})),
        ("/v1/responses", json!({"input": "Hi"})),
    ];
    for (path, mut body) in bodies {
        for (priority, status) in [(-1, 400), (0, 200), (5, 200)] {
            body["priority"] = json!(priority);
            let answer = router.client.post(path, &body).await;
            assert_eq!(answer.status, status, "{path} {priority}: {}", answer.text());
            if status == 400 {
                let error = &answer.json()["error"];
                assert_eq!(error["param"], "priority", "{error}");
                assert!(error["message"].as_str().unwrap().contains("role operator"), "{error}");
            }
            assert_eq!(operator.post(path, &body).await.status, 200, "{path} {priority}");
        }
    }
    let priorities: Vec<_> = worker.requests().into_iter().map(|request| request.priority).collect();
    assert_eq!(priorities, [-1, 0, 0, 5, 5].repeat(3));

    let request = baton_proto::v1::GenerateRequest {
        prompt: Some(Prompt::Text("Hi".into())),
        priority: -1,
        ..Default::default()
    };
    let refused = grpc::client_with(&router, &secret(ACME)).await.generate(request.clone()).await;
    let refused = refused.err().unwrap();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().starts_with("priority is -1"), "{refused}");
    grpc::client_with(&router, &secret(OPERATOR)).await.generate(request).await.unwrap();
}

async fn complete(client: &Client, prompt: &str, max_tokens: u32) -> Answer {
    client.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": max_tokens})).await
}

/// Asserts a 429, and returns the seconds after which to come again.
fn exceeded(answer: &Answer, quota: &str) -> u64 {
    assert_eq!(answer.status, 429, "{}", answer.text());
    let error = &answer.json()["error"];
    assert!(error["message"].as_str().unwrap().contains(quota), "{error}");
    assert_eq!(error["code"], "rate_limit_exceeded");
    answer.header("retry-after").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_and_tokens_are_limited_by_the_minute() {
    let (router, worker, file) = start(&entries("requests-per-minute = 3")).await;
    let answer = complete(&router.client, "Hi", 4).await;
    assert_eq!((answer.status, answer.header("x-ratelimit-limit-requests")), (200, "3"));
    assert_eq!(answer.header("x-ratelimit-remaining-requests"), "2");
    complete(&router.client, "Hi", 4).await;
    complete(&router.client, "Hi", 4).await;
    let refused = router.client.get("/v1/models").await;
    let wait = exceeded(&refused, "3 requests a minute");
    assert_eq!(refused.header("x-ratelimit-limit-requests"), "3");
    assert_eq!(refused.header("x-ratelimit-remaining-requests"), "0");
    assert!((1..=20).contains(&wait), "{wait}");
    assert_eq!(client(&router, Some(secret(OTHER))).get("/v1/models").await.status, 200);
    // Probes take nothing, and have no quota.
    assert_eq!(router.client.get("/health").await.status, 200);

    // A prompt of 100 bytes is 100 tokens; the answer has 4.
    std::fs::write(file.path(), entries("tokens-per-minute = 110")).unwrap();
    until(&router.client, "/v1/models", 200).await;
    let prompt = "x".repeat(100);
    let answer = complete(&router.client, &prompt, 4).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let num_requests = worker.requests().len();
    let wait = exceeded(&complete(&router.client, &prompt, 4).await, "110 tokens a minute");
    // 94 are lacking, at 110 a minute.
    assert!((50..=52).contains(&wait), "{wait}");
    let body = json!({"model": "bytes", "max_tokens": 9, "messages": [{"role": "user", "content": prompt}]});
    let answer = router.client.post("/v1/messages", &body).await;
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (429, &json!("rate_limit_error")));
    let request =
        baton_proto::v1::GenerateRequest { prompt: Some(Prompt::Text(prompt)), ..Default::default() };
    let refused = grpc::client_with(&router, &secret(ACME)).await.generate(request).await.err().unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    let wait: u64 = refused.metadata().get("retry-after").unwrap().to_str().unwrap().parse().unwrap();
    assert!((50..=52).contains(&wait), "{wait}");
    assert_eq!(worker.requests().len(), num_requests, "no worker has seen them");
    assert_eq!(router.client.get("/v1/models").await.status, 200, "which has no tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_every_worker_refuses_costs_no_tokens() {
    let (router, worker, _file) = start(&entries("tokens-per-minute = 110")).await;
    worker.script(|_| vec![Step::Refuse(FailureKind::Full)]);
    let prompt = "x".repeat(100);
    for _ in 0..2 {
        let answer = complete(&router.client, &prompt, 4).await;
        assert_eq!(answer.status, 429);
        assert!(!answer.text().contains("tokens a minute"), "{}", answer.text());
    }
    worker.script(say("Hello"));
    assert_eq!(complete(&router.client, &prompt, 4).await.status, 200);
    exceeded(&complete(&router.client, &prompt, 4).await, "110 tokens a minute");
}

/// Workers generate something all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_alone_costs_no_tokens_of_output() {
    let (router, worker, _file) = start(&entries("tokens-per-minute = 20")).await;
    worker.script(|_| {
        // More than one token, so that a charge for them would last for minutes.
        let tokens = std::iter::repeat_n(Step::Token(120), 200);
        tokens.chain([Step::Finish(FinishReason::Stop)]).collect()
    });
    let asked = json!({"prompt": "Hi", "max_tokens": 0, "echo": true});
    for _ in 0..2 {
        let answer = router.client.post("/v1/completions", &asked).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let body = answer.json();
        let (choice, usage) = (&body["choices"][0], &body["usage"]);
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("Hi"), &json!("length")));
        assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(2), &json!(0)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_at_a_time_are_limited_until_they_end() {
    let (router, worker, _file) = start(&entries("streams = 1")).await;
    worker.script(|_| vec![Step::Hang]);
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let headers = [("content-type", "application/json")];
    let first = router.client.begin("POST", "/v1/completions", &headers, body.into());
    let second = async {
        worker.next_arrived().await;
        let wait = exceeded(&router.client.get("/v1/models").await, "1 streams at a time");
        assert_eq!(wait, 1);
        worker.release(Step::Finish(FinishReason::Stop));
    };
    let (first, ()) = tokio::join!(first, second);
    assert_eq!(first.status(), 200);
    drop(first);
    until(&router.client, "/v1/models", 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_share_no_salt_no_ids_and_no_events() {
    let (router, worker, _file) = start(&entries("")).await;
    let other = client(&router, Some(secret(OTHER)));
    let mut events = Vec::new();
    for number in [OTHER, OPERATOR] {
        events.push(Stream::open_as(&client(&router, Some(secret(number)))).await);
    }
    let salts = [json!({}), json!({"cache_salt": "s"}), json!({"cache_salt": "s", "kv_wire": "int4"})];
    for client in [&router.client, &other] {
        for salt in &salts {
            let mut body = json!({"prompt": "Hi"});
            body.as_object_mut().unwrap().extend(salt.as_object().unwrap().clone());
            assert_eq!(client.post("/v1/completions", &body).await.status, 200);
        }
    }
    let salts: Vec<_> = worker.requests().into_iter().map(|request| request.cache_salt).collect();
    let expected =
        ["acme\0", "acme\0s", "acme\0s\0KV_WIRE_INT4", "other\0", "other\0s", "other\0s\0KV_WIRE_INT4"];
    assert_eq!(salts, expected);

    let seen = events[0].next("request").await.unwrap();
    assert_eq!((&seen["tenant"], &seen["key"]), (&json!("other"), &json!("k2")), "of its own tenant alone");
    let seen = events[1].next("request").await.unwrap();
    assert_eq!((&seen["tenant"], &seen["key"]), (&json!("acme"), &json!("k1")), "an operator sees all");

    // Both run a request of the same id, and each aborts its own.
    worker.script(|_| vec![Step::Silence]);
    let mut streams = Vec::new();
    for number in [ACME, OTHER] {
        let request = baton_proto::v1::GenerateRequest {
            prompt: Some(Prompt::Text("x".into())),
            request_id: "mine".into(),
            ..Default::default()
        };
        let mut caller = grpc::client_with(&router, &secret(number)).await;
        streams.push(caller.generate(request).await.unwrap().into_inner());
        // Those of before come first.
        let id = format!("{}/mine-0", if number == ACME { "acme" } else { "other" });
        while worker.next_arrived().await != id {}
    }
    let mut caller = grpc::client_with(&router, &secret(OPERATOR)).await;
    let abort = AbortRequest { request_id: "mine".into() };
    assert_eq!(caller.abort(abort.clone()).await.unwrap_err().code(), Code::NotFound);
    let mut caller = grpc::client_with(&router, &secret(OTHER)).await;
    caller.abort(abort.clone()).await.unwrap();
    assert_eq!(caller.abort(abort).await.err().map(|status| status.code()), Some(Code::NotFound));
    assert_eq!(worker.next_dropped().await, "other/mine-0");
    assert!(streams[1].message().await.unwrap().is_some(), "it ends with a last event");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_an_operator_end_when_its_key_is_demoted() {
    let (router, _worker, file) = start(&entries("")).await;
    let operator = client(&router, Some(secret(OPERATOR)));
    let mut events = Stream::open_as(&operator).await;
    std::fs::write(file.path(), entries("").replace("role = \"operator\"", "role = \"client\"")).unwrap();
    let ended = async { while events.next("request").await.is_some() {} };
    tokio::time::timeout(SOON, ended).await.expect("the stream ends with the role");
    assert_eq!(operator.get("/v1/models").await.status, 200, "the key is still valid");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_leaves_streams_of_events_to_others() {
    let second = entry(6, "tenant = \"acme\"");
    let (router, _worker, _file) = start(&format!("{}{second}", entries(""))).await;
    let same = client(&router, Some(secret(6)));
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(Stream::open_as(&router.client).await);
        open.push(Stream::open_as(&same).await);
    }
    for client in [&router.client, &same] {
        let answer = client.get("/events").await;
        assert_eq!(answer.status, 429);
        assert!(answer.text().contains("8 of this tenant are open already"), "{}", answer.text());
    }
    let operator = client(&router, Some(secret(OPERATOR)));
    for _ in 0..9 {
        open.push(Stream::open_as(&operator).await);
    }
    open.push(Stream::open_as(&client(&router, Some(secret(OTHER)))).await);
    drop(open.remove(0));
    until(&same, "/events", 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_resumes_only_its_own_streams() {
    let dir = tempfile::tempdir().unwrap();
    let (path, ttl) = (dir.path().join("journal"), Duration::from_secs(60));
    let durable = |config: &mut RouterConfig| {
        config.durable = Some(JournalConfig { dir: path, max_bytes: 1 << 20, ttl });
    };
    let (router, _worker, _file) = start_with(&entries(""), durable).await;
    let other = client(&router, Some(secret(OTHER)));
    let whole = router.client.post("/v1/completions", &json!({"prompt": "Hi", "stream": true})).await;
    let text = whole.text();
    let id = text.strip_prefix("id: ").and_then(|text| Some(text.split_once(":0\n")?.0)).unwrap();
    let stream = format!("/v1/streams/{id}");
    assert_eq!(router.client.get(&stream).await.text(), text);
    assert_eq!(other.get(&stream).await.status, 404);
    let last_event = format!("{id}:0");
    let headers = [("last-event-id", last_event.as_str())];
    let stolen = other.send("POST", "/v1/completions", &headers, Bytes::new()).await;
    assert_eq!(stolen.status, 404);
    assert!(stolen.text().contains("is in the journal"), "{}", stolen.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_are_delivered_again_are_not_charged_again() {
    let dir = tempfile::tempdir().unwrap();
    let (path, ttl) = (dir.path().join("journal"), Duration::from_secs(60));
    let durable = |config: &mut RouterConfig| {
        config.stream_keep_alive = Duration::from_millis(50);
        config.durable = Some(JournalConfig { dir: path, max_bytes: 1 << 20, ttl });
    };
    // A token costs three seconds.
    let (router, worker, _file) = start_with(&entries("tokens-per-minute = 20"), durable).await;
    // 200 tokens, of which the second half comes only when the stream is resumed.
    worker.script(|request| {
        let steps = say(&"x".repeat(199))(request);
        match request.output_token_ids.len() {
            0 => steps.into_iter().take(100).chain([Step::Silence]).collect(),
            _ => steps,
        }
    });
    let body = json!({"prompt": "Hi", "stream": true, "max_tokens": 300}).to_string();
    let headers = [("content-type", "application/json")];
    let mut cut = router.client.begin("POST", "/v1/completions", &headers, body.into()).await.into_body();
    let mut text = String::new();
    while !text.ends_with("keep-alive\n\n") || !text.contains("data: ") {
        let frame = http_body_util::BodyExt::frame(&mut cut).await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(&frame.into_data().unwrap()).unwrap());
    }
    let id = text.split_once("id: ").and_then(|(_, text)| Some(text.split_once(":0\n")?.0)).unwrap();
    for _ in 0..3 {
        let whole = router.client.get(&format!("/v1/streams/{id}")).await;
        assert_eq!((whole.status, whole.text().matches("\"text\":\"x\"").count()), (200, 199));
        let answer = router.client.get("/v1/models").await;
        let reset: f64 = answer.header("x-ratelimit-reset-tokens").trim_end_matches('s').parse().unwrap();
        // The prompt's 2 tokens and 200, less what came back since.
        assert!((500.0..=606.0).contains(&reset), "{reset}");
    }
}

/// A router with a journal in this directory.
fn durable(dir: &Path) -> impl FnOnce(&mut RouterConfig) + use<> {
    let (dir, ttl) = (dir.join("journal"), Duration::from_secs(60));
    move |config: &mut RouterConfig| config.durable = Some(JournalConfig { dir, max_bytes: 1 << 20, ttl })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_the_id_of_a_parked_stream_is_told_that_it_is_parked() {
    let dir = tempfile::tempdir().unwrap();
    let (router, worker, _file) = start_with(&entries(""), durable(dir.path())).await;
    worker.script(|_| vec![Step::Silence]);
    let mut caller = grpc::client_with(&router, &secret(ACME)).await;
    drop(caller.generate(named("mine", 2)).await.unwrap());
    router.until_metric("baton_journal_parked 1").await;
    // The request itself ends a moment later.
    let refused = loop {
        let refused = caller.generate(named("mine", 2)).await.err().unwrap();
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
        if !refused.message().contains("running already") {
            break refused;
        }
    };
    let message = "the stream of a request with the id \"mine\" is parked: resume it or abort it";
    assert_eq!(refused.message(), message);
    caller.abort(AbortRequest { request_id: "mine".into() }).await.unwrap();
    drop(caller.generate(named("mine", 2)).await.expect("the id is free"));
}

/// A call by gRPC whose client has chosen this id.
fn named(id: &str, num_prompt_tokens: usize) -> GenerateRequest {
    let prompt = Some(Prompt::Text("x".repeat(num_prompt_tokens)));
    GenerateRequest { prompt, request_id: id.into(), ..Default::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_beyond_its_quota_changes_nothing_in_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let (router, _worker, _file) = start_with(&entries("tokens-per-minute = 20"), durable(dir.path())).await;
    let mut caller = grpc::client_with(&router, &secret(ACME)).await;
    let count = async |mut responses: tonic::Streaming<GenerateResponse>| {
        let mut num_responses = 0;
        while responses.message().await.unwrap().is_some() {
            num_responses += 1;
        }
        num_responses
    };
    // With the answer's six tokens that is all.
    let whole = count(caller.generate(named("mine", 15)).await.unwrap().into_inner()).await;
    assert!(whole > 1, "{whole}");
    router.until_metric("baton_journal_ended 1").await;
    let body = json!({"prompt": "x".repeat(15), "stream": true});
    exceeded(&router.client.post("/v1/completions", &body).await, "20 tokens a minute");
    let refused = caller.generate(named("mine", 15)).await.err().unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    let metrics = router.client.get("/metrics").await.text();
    assert!(metrics.lines().any(|line| line == "baton_journal_ended 1"), "{metrics}");
    let resume = ResumeRequest { request_id: "mine".into(), next_token_idx: 0 };
    assert_eq!(count(caller.resume(resume).await.unwrap().into_inner()).await, whole);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_is_computed_again_for_a_stream_without_tokens_is_charged_again() {
    let dir = tempfile::tempdir().unwrap();
    let (router, worker, _file) = start_with(&entries("tokens-per-minute = 20"), durable(dir.path())).await;
    worker.script(|_| vec![Step::Silence]);
    let mut caller = grpc::client_with(&router, &secret(ACME)).await;
    drop(caller.generate(named("mine", 10)).await.unwrap());
    for _ in 0..5 {
        let resume = ResumeRequest { request_id: "mine".into(), next_token_idx: 0 };
        drop(caller.resume(resume).await.expect("a resume is not refused"));
    }
    let answer = router.client.get("/v1/models").await;
    assert_eq!(answer.header("x-ratelimit-remaining-tokens"), "0");
    let reset: f64 = answer.header("x-ratelimit-reset-tokens").trim_end_matches('s').parse().unwrap();
    // Six times 10 tokens of three seconds each, less what came back since.
    assert!((120.0..=180.0).contains(&reset), "{reset}");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_public_by_choice_and_preflights_need_no_key() {
    let file = NamedTempFile::new().unwrap();
    let path = file.path().to_owned();
    let router = Router::start(|config| {
        config.api_keys = Some(path);
        config.has_public_metrics = true;
        config.cors_origins = vec!["https://page.example".parse().unwrap()];
    })
    .await;
    assert_eq!(router.client.get("/metrics").await.status, 200);
    assert_eq!(router.client.get("/v1/models").await.status, 401);
    let headers = [("origin", "https://page.example"), ("access-control-request-method", "POST")];
    let answer = router.client.send("OPTIONS", "/v1/chat/completions", &headers, Bytes::new()).await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, "https://page.example"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_does_not_start_with_a_file_that_is_wrong() {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[[key]]\nname = 1\n").unwrap();
    let discovery = baton_cluster::DiscoveryConfig::Embedded { router: String::new(), key: None };
    let mut config = baton_router::RouterConfig::new("/nowhere".into(), "bytes".into(), discovery);
    config.listen = ([127, 0, 0, 1], 0).into();
    config.api_keys = Some(file.path().to_owned());
    let error = format!("{:#}", baton_router::run(config, Default::default()).await.unwrap_err());
    let names = ["key file /", "of --api-keys (BATON_API_KEYS): ", "line 2: "];
    assert!(names.into_iter().all(|name| error.contains(name)), "{error}");
}
