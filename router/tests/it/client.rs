//! A plain HTTP client.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request, header};
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy, rt::TokioExecutor};
use serde_json::Value;

use crate::harness::SOON;

pub struct Client {
    address: SocketAddr,
    /// Shown with every request.
    pub key: Option<String>,
    http: legacy::Client<legacy::connect::HttpConnector, Full<Bytes>>,
}

/// A complete response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        Client { address, key: None, http: legacy::Client::builder(TokioExecutor::new()).build_http() }
    }

    /// Whether the address takes connections.
    pub async fn try_connect(&self) -> bool {
        tokio::net::TcpStream::connect(self.address).await.is_ok()
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, &body.to_string()).await
    }

    pub async fn post_text(&self, path: &str, body: &str) -> Answer {
        let headers = [("content-type", "application/json")];
        self.send("POST", path, &headers, Bytes::from(body.to_owned())).await
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Answer {
        let response = self.begin(method, path, headers, body).await;
        let (parts, body) = response.into_parts();
        let body = tokio::time::timeout(SOON, body.collect()).await.expect("the body ends");
        let body = body.expect("the body is whole").to_bytes();
        Answer { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    /// Sends a request. The caller reads the body.
    pub async fn begin(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> http::Response<hyper::body::Incoming> {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Full::new(body)).expect("a valid request");
        tokio::time::timeout(SOON, self.http.request(request))
            .await
            .expect("it answers")
            .expect("it answers whole")
    }
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).expect("text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.body))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    /// The JSON of every SSE event; asserts that the stream ends with `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.headers[header::CONTENT_TYPE], "text/event-stream; charset=utf-8");
        let text = self.text();
        let mut events: Vec<_> = text.split_terminator("\n\n").collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
        let parse = |event: &str| {
            let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?} is no event"));
            serde_json::from_str(data).unwrap_or_else(|error| panic!("{error} in {data:?}"))
        };
        events.into_iter().map(parse).collect()
    }
}

/// The JSON of every SSE event of a stream whose events have names: those are their types.
pub fn named_events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.headers[header::CONTENT_TYPE], "text/event-stream; charset=utf-8");
    let text = answer.text();
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name, format!("event: {}", data["type"].as_str().expect("a type")));
        data
    });
    events.collect()
}

/// The text of a chat stream's choice.
pub fn content(events: &[Value], index: u64) -> String {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().expect("a list").clone());
    let of_index = choices.filter(|choice| choice["index"] == index);
    of_index.filter_map(|choice| choice["delta"]["content"].as_str().map(str::to_owned)).collect()
}
