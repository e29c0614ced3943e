use std::time::Duration;

use baton_cluster::{DiscoveryConfig, Role};
use baton_router::RouterConfig;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy, rt::TokioExecutor};
use prost::Message;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};
use tokio_util::sync::CancellationToken;

use crate::{
    fake::{FakeWorker, Step},
    grpc::{client, framed},
    harness::{Router, SOON},
};

const TEXT: &str = "/v1/completions";
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn streamed() -> Bytes {
    Bytes::from(json!({"prompt": "x", "stream": true}).to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_models_and_version_answer() {
    let (router, worker) = Router::with_worker().await;
    for path in ["/livez", "/readyz", "/startupz"] {
        let answer = router.client.get(path).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "ok\n"), "{path}");
    }
    let health = router.client.get("/health").await.json();
    assert_eq!(health["status"], "ok");
    assert_eq!(router.client.get("/version").await.json(), json!({"version": env!("CARGO_PKG_VERSION")}));
    let models = router.client.get("/v1/models").await.json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("bytes")));
    let model = router.client.get("/v1/models/bytes").await.json();
    assert_eq!((&model["object"], &model["max_model_len"]), (&json!("model"), &json!(512)));
    assert_eq!(router.client.get("/v1/models/a/b").await.status, 404);

    worker.set_draining();
    router.until("/readyz", 503).await;
    assert_eq!(router.client.get("/readyz").await.text(), "every decode worker is draining\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn request_ids_are_returned_or_generated() {
    let (router, _worker) = Router::with_worker().await;
    let given = router.client.get("/livez").await;
    assert_eq!(given.header("x-request-id").len(), 36);
    let own = router.client.send("GET", "/livez", &[("x-request-id", "mine-1")], Bytes::new()).await;
    assert_eq!(own.header("x-request-id"), "mine-1");
    let wrong = router.client.send("GET", "/livez", &[("x-request-id", "a b")], Bytes::new()).await;
    assert_eq!(wrong.header("x-request-id").len(), 36);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_requests_tokens_plans_and_moved_bytes() {
    let (router, _worker) = Router::with_worker().await;
    router.client.post(TEXT, &json!({"prompt": "abc"})).await;
    router.client.post(TEXT, &json!({"prompt": 1.5})).await;
    let answer = router.client.get("/metrics").await;
    assert!(answer.header("content-type").starts_with("application/openmetrics-text"));
    let text = answer.text();
    for line in [
        "baton_router_requests_total{endpoint=\"/v1/completions\",status=\"200\"} 1",
        "baton_router_requests_total{endpoint=\"/v1/completions\",status=\"400\"} 1",
        "baton_router_generations_total{endpoint=\"/v1/completions\",outcome=\"ok\"} 1",
        "baton_router_generations_total{endpoint=\"/v1/completions\",outcome=\"parked\"} 0",
        "baton_router_prompt_tokens_total 3",
        "baton_router_output_tokens_total 6",
        "baton_router_ttft_seconds_count 1",
        "baton_router_itl_seconds_count 5",
        "baton_router_plans_total{prefill=\"local\"} 1",
        "baton_router_requests_running 0",
        "baton_router_workers{role=\"decode\",state=\"ready\"} 1",
        "baton_router_worker_handoff_bytes{worker=\"d0\",transport=\"shm\"} 4096",
    ] {
        assert!(text.lines().any(|found| found == line), "no line {line:?} in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scrapes_at_once_do_not_disturb_each_other() {
    let (router, _worker) = Router::with_worker().await;
    router.client.post(TEXT, &json!({"prompt": "abc"})).await;
    for _ in 0..20 {
        let scrapes = (0..16).map(|_| router.client.get("/metrics"));
        for answer in futures_util::future::join_all(scrapes).await {
            let text = answer.text();
            for line in [
                "baton_router_workers{role=\"decode\",state=\"ready\"} 1",
                "baton_router_worker_handoff_bytes{worker=\"d0\",transport=\"shm\"} 4096",
            ] {
                assert!(text.lines().any(|found| found == line), "no line {line:?} in\n{text}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_is_spoken_on_the_same_port() {
    let (router, _worker) = Router::with_worker().await;
    let client: legacy::Client<_, Full<Bytes>> =
        legacy::Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let uri = format!("http://{}/version", router.address).parse().unwrap();
    let response = client.get(uri).await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, http::Version::HTTP_2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_origin_is_refused_in_the_shape_of_the_api() {
    let listed = "https://page.example";
    let list = |config: &mut RouterConfig| config.cors_origins = vec![listed.parse().unwrap()];
    let (router, worker) = Router::with_worker_and(list).await;
    let own = format!("http://{}", router.address);
    // No browser asks before it sends a form.
    let form = ("content-type", "application/x-www-form-urlencoded");
    let body = json!({"prompt": "x"}).to_string();
    for (origin, status) in [("https://evil.example", 403), ("null", 403), (&*own, 200), (listed, 200)] {
        let headers = [("origin", origin), form];
        let answer = router.client.send("POST", TEXT, &headers, Bytes::from(body.clone())).await;
        assert_eq!(answer.status, status, "{origin}: {}", answer.text());
    }
    assert_eq!(worker.requests().len(), 2, "no worker has seen the others");

    let foreign = ("origin", "https://evil.example");
    let answer = router.client.send("POST", TEXT, &[foreign, form], Bytes::new()).await;
    assert_eq!(answer.json()["error"]["code"], "permission_denied");
    assert!(answer.text().contains("--cors-origins"), "{}", answer.text());
    let answer = router.client.send("POST", "/v1/messages", &[foreign, form], Bytes::new()).await;
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (403, &json!("permission_error")));
    let grpc = ("content-type", "application/grpc");
    let answer =
        router.client.send("POST", "/baton.v1.Inference/Loads", &[foreign, grpc], Bytes::new()).await;
    assert_eq!((answer.status, answer.header("grpc-status")), (200, "7"));
    let image = [("sec-fetch-site", "cross-site"), ("sec-fetch-dest", "image")];
    assert_eq!(router.client.send("GET", "/events", &image, Bytes::new()).await.status, 403);
    let link = [("sec-fetch-site", "cross-site"), ("sec-fetch-dest", "document")];
    assert_eq!(router.client.send("GET", "/", &link, Bytes::new()).await.status, 200);

    let preflight = [("origin", listed), ("access-control-request-method", "POST")];
    let answer = router.client.send("OPTIONS", TEXT, &preflight, Bytes::new()).await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, listed));
    let all = Router::start(|config| config.cors_origins = vec!["*".parse().unwrap()]).await;
    assert_eq!(all.client.send("GET", "/version", &[foreign], Bytes::new()).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keyless_router_on_loopback_serves_no_other_name() {
    let router =
        Router::start(|config| config.cors_origins = vec!["http://me.example".parse().unwrap()]).await;
    for (host, status) in
        [("localhost", 200), ("[::1]:8080", 200), ("me.example", 200), ("evil.example", 403)]
    {
        let answer = router.client.send("GET", "/version", &[("host", host)], Bytes::new()).await;
        assert_eq!(answer.status, status, "{host}: {}", answer.text());
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_owned();
    let with_keys = Router::start(|config| config.api_keys = Some(path)).await;
    let named = [("host", "evil.example")];
    assert_eq!(with_keys.client.send("GET", "/health", &named, Bytes::new()).await.status, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_takes_no_other_content_type() {
    let router = Router::start(|_| {}).await;
    let worker = FakeWorker::start("d0", Role::Decode, 1).await;
    let record = baton_proto::worker::WorkerRecord::from(&worker.record);
    let body = framed(&record.encode_to_vec());
    for path in [
        "/baton.worker.v1.Registry/Register",
        "/baton.v1.Inference/Generate",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ] {
        for headers in [&[("content-type", "text/plain")][..], &[]] {
            let answer = router.client.send("POST", path, headers, body.clone()).await;
            assert_eq!(answer.status, 415, "{path} with {headers:?}");
        }
    }
    assert_eq!(router.client.get("/health").await.json()["workers"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_cancels_its_request() {
    let (router, worker) = Router::with_worker().await;
    // Before the first token.
    worker.script(|_| vec![Step::Hang]);
    let body = json!({"prompt": "x"}).to_string();
    let head = format!(
        "POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut connection = TcpStream::connect(router.address).await.unwrap();
    connection.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let id = worker.next_arrived().await;
    drop(connection);
    assert_eq!(worker.next_dropped().await, id);

    // Mid-stream.
    worker.script(|_| vec![Step::Token(97), Step::Hang]);
    let mut response = router.client.begin("POST", TEXT, &JSON, streamed()).await;
    response.body_mut().frame().await.unwrap().unwrap();
    let id = worker.next_arrived().await;
    drop(response);
    assert_eq!(worker.next_dropped().await, id);
    router.until_metric("baton_router_requests_running 0").await;
    router
        .until_metric("baton_router_generations_total{endpoint=\"/v1/completions\",outcome=\"cancelled\"} 2")
        .await;
}

/// Its request would hold its place for ever: hyper waits for room in the socket without a limit.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_ends_with_its_request() {
    let (router, worker) =
        Router::with_worker_and(|config| config.unread_timeout = Duration::from_millis(500)).await;
    // More than the client's socket holds.
    worker.script(|_| [vec![Step::Token(97); 400], vec![Step::Silence]].concat());
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let head = format!(
        "POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(1 << 10).unwrap();
    let mut connection = socket.connect(router.address).await.unwrap();
    connection.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let ends = async { (worker.next_arrived().await, worker.next_dropped().await) };
    let (arrived, dropped) = tokio::time::timeout(SOON, ends).await.expect("the router ends it");
    assert_eq!(arrived, dropped);
    router.until_metric("baton_router_requests_running 0").await;
    drop(connection);
}

/// Sends bytes, then nothing, and reads until the router closes the connection.
async fn dawdle(router: &Router, bytes: &[u8]) -> String {
    let mut connection = TcpStream::connect(router.address).await.unwrap();
    connection.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    let closed = tokio::time::timeout(SOON, connection.read_to_end(&mut answer)).await;
    let _ = closed.expect("the router closes the connection");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incomplete_request_is_closed_after_a_while() {
    let (router, _worker) = Router::with_worker_and(|config| {
        config.header_timeout = Duration::from_millis(300);
        config.body_timeout = Duration::from_millis(300);
    })
    .await;
    for head in [
        "",
        "P",
        "PRI * HTTP/2.0\r\n",
        "POST /v1/comp",
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n",
    ] {
        let answer = dawdle(&router, head.as_bytes()).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{head:?}: {answer:?}");
    }
    let half = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                content-length: 100\r\n\r\n{\"prompt\":";
    let answer = dawdle(&router, half.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(answer.contains("did not arrive within 300ms"), "{answer}");
    router.until_metric("baton_router_requests_running 0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_bodies_together_have_a_bound() {
    let (router, _worker) = Router::with_worker_and(|config| config.max_bodies_bytes = 1000).await;
    let mut slow = TcpStream::connect(router.address).await.unwrap();
    let half = format!("POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{:800}", "");
    slow.write_all(half.as_bytes()).await.unwrap();
    router.until_metric("baton_router_body_bytes 800").await;

    let longer = json!({"prompt": "x".repeat(200)});
    let refused = router.client.post(TEXT, &longer).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"), "{}", refused.text());
    assert_eq!(refused.json()["error"]["code"], "rate_limit_exceeded");
    let prompt = baton_proto::v1::generate_request::Prompt::Text("x".repeat(200));
    let call = baton_proto::v1::GenerateRequest { prompt: Some(prompt), ..Default::default() };
    let refused = client(&router).await.generate(call).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
    assert_eq!(router.client.post(TEXT, &json!({"prompt": "x"})).await.status, 200);

    // What was refused, prepared or broken off holds nothing.
    router.until_metric("baton_router_body_bytes 800").await;
    drop(slow);
    router.until_metric("baton_router_body_bytes 0").await;
    assert_eq!(router.client.post(TEXT, &longer).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn values_of_bodies_count_as_what_they_take() {
    const CHAT: &str = "/v1/chat/completions";
    const RESPONSES: &str = "/v1/responses";
    let (router, _worker) = Router::with_worker_and(|config| config.max_bodies_bytes = 100_000).await;
    let list = |num: usize| json!(vec![json!({"": 0}); num]);
    let call = |arguments: &str| {
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        json!({"messages": [{"role": "assistant", "content": "x".repeat(512), "tool_calls": [call]}]})
    };
    let arguments = |num: usize| json!({"a": list(num)}).to_string();
    let escaped = call(&arguments(150)).to_string().replace(r#"{\"\":"#, r#"\u007b\"\":"#);
    for (path, body, status, reason) in [
        (CHAT, json!({"messages": list(150)}).to_string(), 413, "at most 50000 are possible"),
        (CHAT, json!({"messages": list(60)}).to_string(), 400, "messages[0].role"),
        (RESPONSES, json!({"metadata": {"a": list(150)}}).to_string(), 413, "bytes of memory"),
        (CHAT, call(&arguments(150)).to_string(), 413, "bytes of memory"),
        (CHAT, escaped, 413, "bytes of memory"),
        (CHAT, call(&arguments(60)).to_string(), 400, "maximum context length"),
        // Text takes its bytes alone, and token ids little.
        (CHAT, call(&"x, {y}".repeat(1000)).to_string(), 400, "maximum context length"),
        (TEXT, json!({"prompt": vec![1; 6000]}).to_string(), 400, "maximum context length"),
        (TEXT, json!({"prompt": "x", "stop_token_ids": vec![1; 6000]}).to_string(), 413, "bytes of memory"),
        ("/detokenize", json!({"tokens": vec![97; 6000]}).to_string(), 200, "aaa"),
    ] {
        let answer = router.client.post_text(path, &body).await;
        let text = answer.text();
        assert_eq!(answer.status, status, "{path} {}: {text}", &body[..body.len().min(100)]);
        assert!(text.contains(reason), "{path} {}: {text}", &body[..body.len().min(100)]);
    }
    router.until_metric("baton_router_body_bytes 0").await;

    let mut slow = TcpStream::connect(router.address).await.unwrap();
    let head = format!("POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90000\r\n\r\n");
    slow.write_all(&[head.into_bytes(), vec![b' '; 80_000]].concat()).await.unwrap();
    router.until_metric("baton_router_body_bytes 80000").await;
    let refused = router.client.post(CHAT, &json!({"messages": list(60)})).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"), "{}", refused.text());
    router.until_metric("baton_router_body_bytes 80000").await;
}

/// Also when that is found just as the server looks whether it is to end.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_cannot_be_loaded_ends_the_router_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    for _ in 0..100 {
        let discovery = DiscoveryConfig::Embedded { router: "http://127.0.0.1:1".into(), key: None };
        let mut config = RouterConfig::new(dir.path().to_owned(), "broken".to_owned(), discovery);
        config.listen.set_port(0);
        let error = baton_router::run(config, CancellationToken::new()).await.unwrap_err();
        assert!(format!("{error:#}").contains("tokenizer.json is not valid"), "{error:#}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_lets_running_requests_end() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| {
        vec![Step::Token(97), Step::Token(98), Step::Finish(baton_proto::v1::FinishReason::Length)]
    });
    let response = router.client.begin("POST", TEXT, &JSON, streamed()).await;
    router.begin_shutdown();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));
    router.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_end_with_an_error_when_the_shutdown_timeout_passes() {
    let (router, worker) =
        Router::with_worker_and(|config| config.drain_timeout = Duration::from_millis(100)).await;
    worker.script(|_| vec![Step::Token(97), Step::Hang]);
    let response = router.client.begin("POST", TEXT, &JSON, streamed()).await;
    router.begin_shutdown();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(body.to_vec()).unwrap();
    assert!(text.contains("the router is shutting down"), "{text}");
    worker.next_dropped().await;
    router.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_without_a_tokenizer_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let discovery =
        baton_cluster::DiscoveryConfig::Embedded { router: "http://127.0.0.1:1".into(), key: None };
    let config = baton_router::RouterConfig::new(dir.path().to_owned(), "x".into(), discovery);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let running = baton_router::run_on(listener, config, Default::default());
    let error = tokio::time::timeout(SOON, running).await.unwrap().unwrap_err();
    assert!(format!("{error:#}").contains("tokenizer.json"), "{error:#}");
}
