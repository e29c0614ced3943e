//! The page and the events that it watches.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    client::Client,
    fake::{Step, say},
    harness::{Router, SOON},
};

/// The events of a stream, one after the other.
pub(crate) struct Stream {
    body: Incoming,
    text: String,
}

impl Stream {
    pub(crate) async fn open(router: &Router) -> Stream {
        Stream::open_as(&router.client).await
    }

    pub(crate) async fn open_as(client: &Client) -> Stream {
        let response = client.begin("GET", "/events", &[], bytes::Bytes::new()).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Stream { body: response.into_body(), text: String::new() }
    }

    /// The next event of this name; `None` when the stream has ended.
    pub(crate) async fn next(&mut self, name: &str) -> Option<Value> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let data = event.strip_prefix(&format!("event: {name}\ndata: ")).map(str::to_owned);
                self.text = rest.to_owned();
                match data {
                    Some(data) => return Some(serde_json::from_str(&data).expect("data is JSON")),
                    None => continue,
                }
            }
            let frame = timeout(SOON, self.body.frame()).await.expect("an event comes")?;
            let data = frame.expect("the stream is whole").into_data().expect("no trailers");
            self.text += std::str::from_utf8(&data).expect("events are text");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_loads_nothing_from_elsewhere() {
    let router = Router::start(|_| {}).await;
    for (path, kind) in [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")] {
        let answer = router.client.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        assert!(answer.header("content-type").starts_with(kind), "{path}");
        assert!(answer.header("content-security-policy").contains("default-src 'none'"), "{path}");
        let text = answer.text().replace("http://www.w3.org/2000/svg", "");
        assert!(!text.contains("://"), "{path} names another server");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_tell_of_workers_and_of_ended_requests() {
    let (router, worker) = Router::with_worker().await;
    let mut events = Stream::open(&router).await;
    let cluster = events.next("cluster").await.expect("a first picture");
    assert_eq!(cluster["model"], "bytes");
    assert_eq!(cluster["missing"], Value::Null);
    assert_eq!(cluster["workers"][0]["id"], "d0");
    assert_eq!(cluster["workers"][0]["role"], "decode");
    assert_eq!(cluster["workers"][0]["state"], "ready");

    worker.script(say("Hello"));
    let body = json!({"messages": [{"role": "user", "content": "Hi"}]}).to_string();
    let headers = [("content-type", "application/json"), ("x-request-id", "mine")];
    let answer = router.client.send("POST", "/v1/chat/completions", &headers, body.into()).await;
    assert_eq!(answer.status, 200);
    let request = events.next("request").await.expect("the request has ended");
    assert_eq!(request["id"], answer.json()["id"]);
    assert_eq!(request["x_request_id"], "mine");
    assert_eq!(request["endpoint"], "/v1/chat/completions");
    assert_eq!(request["outcome"], "ok");
    assert_eq!((&request["prompt_tokens"], &request["completion_tokens"]), (&json!(4), &json!(6)));
    assert_eq!(request["decode_worker"], "d0");
    let [tokenise, plan, ttft, e2e] = ["tokenise_ms", "plan_ms", "ttft_ms", "e2e_ms"]
        .map(|part| request[part].as_f64().unwrap_or_else(|| panic!("no {part} in {request}")));
    assert!(0.0 < tokenise && 0.0 < plan && tokenise + plan <= ttft && ttft <= e2e, "{request}");
    assert!(!request.to_string().contains("Hello"), "no text of a request: {request}");
    router.begin_shutdown();
    assert_eq!(events.next("request").await, None, "the stream ends with the router");
    router.ended().await.expect("a clean end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_is_told_of_too() {
    let (router, worker) = Router::with_worker().await;
    let mut events = Stream::open(&router).await;
    events.next("cluster").await.expect("a first picture");
    worker.script(|_| vec![Step::Silence]);
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let headers = [("content-type", "application/json"), ("x-request-id", "gone")];
    let request = router.client.begin("POST", "/v1/completions", &headers, body.into());
    assert!(timeout(Duration::from_millis(200), request).await.is_err(), "nothing comes");
    let request = events.next("request").await.expect("the request has ended");
    assert_eq!((&request["x_request_id"], &request["outcome"]), (&json!("gone"), &json!("cancelled")));
    assert_eq!(request["ttft_ms"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_events_are_bounded() {
    let router = Router::start(|_| {}).await;
    let mut open = Vec::new();
    for _ in 0..64 {
        open.push(Stream::open(&router).await);
    }
    let answer = router.client.get("/events").await;
    assert_eq!(answer.status, 429, "{}", answer.text());
    open.pop();
    let asking = async {
        while router.client.begin("GET", "/events", &[], bytes::Bytes::new()).await.status() != 200 {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, asking).await.expect("a stream that was closed makes room");
}
