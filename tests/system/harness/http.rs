//! A small HTTP client: JSON calls and streamed completions.

use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

/// Keeps connections open between calls. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Http {
    client: Client<HttpConnector, Full<Bytes>>,
    base: String,
    /// Shown with every call.
    key: Option<String>,
}

/// An answer that was read whole.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error} in {}", self.text))
    }
}

impl Http {
    pub(crate) fn new(base: String) -> Http {
        Http { client: Client::builder(TokioExecutor::new()).build_http(), base, key: None }
    }

    /// The same for the holder of a key.
    pub(crate) fn with_key(&self, key: &str) -> Http {
        Http { key: Some(key.to_owned()), ..self.clone() }
    }

    pub(crate) async fn get(&self, path: &str) -> anyhow::Result<Answer> {
        let request = Request::get(format!("{}{path}", self.base)).body(Full::default())?;
        self.call(request).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Answer> {
        self.call(self.json_request(path, body)).await
    }

    async fn call(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Answer> {
        let response = self.send(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        Ok(Answer { status, text: String::from_utf8(body.into())? })
    }

    async fn send(&self, mut request: Request<Full<Bytes>>) -> anyhow::Result<Response<Incoming>> {
        if let Some(key) = &self.key {
            request.headers_mut().insert(header::AUTHORIZATION, format!("Bearer {key}").try_into()?);
        }
        Ok(self.client.request(request).await?)
    }

    fn json_request(&self, path: &str, body: &Value) -> Request<Full<Bytes>> {
        Request::post(format!("{}{path}", self.base))
            .header("content-type", "application/json")
            .body(Full::from(body.to_string()))
            .expect("a request of fixed parts is well-formed")
    }

    /// Begins a streamed completion. `body` has `"stream": true`.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> anyhow::Result<Events> {
        self.events(self.json_request(path, body)).await
    }

    /// Goes on with a stream after the event of this id: with the same call, or with `GET` when there is no `body`.
    pub(crate) async fn resume(
        &self,
        path: &str,
        last_event_id: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Events> {
        let mut request = match body {
            Some(body) => self.json_request(path, body),
            None => Request::get(format!("{}{path}", self.base)).body(Full::default())?,
        };
        request.headers_mut().insert("last-event-id", last_event_id.parse()?);
        self.events(request).await
    }

    async fn events(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Events> {
        let response = self.send(request).await?;
        let status = response.status();
        let body = response.into_body();
        if !status.is_success() {
            let text = body.collect().await?.to_bytes();
            anyhow::bail!("{status}: {}", String::from_utf8_lossy(&text));
        }
        Ok(Events { body, buffer: BytesMut::new() })
    }
}

/// The events of a stream. Dropping it closes the connection, as a client that leaves does.
pub(crate) struct Events {
    body: hyper::body::Incoming,
    buffer: BytesMut,
}

impl Events {
    /// The next event's JSON; `None` after `[DONE]`.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<Value>> {
        let (_, data) = self.next_event().await?;
        if data == "[DONE]" {
            return Ok(None);
        }
        let value: Value = serde_json::from_str(&data)?;
        anyhow::ensure!(value.get("error").is_none(), "the stream failed: {value}");
        Ok(Some(value))
    }

    /// The next event's id and data, whatever they are.
    pub(crate) async fn next_event(&mut self) -> anyhow::Result<(Option<String>, String)> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|window| window == b"\n\n") {
                let event = self.buffer.split_to(end + 2);
                let event = std::str::from_utf8(&event[..end])?;
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
                let Some(data) = field("data: ") else { continue };
                return Ok((field("id: ").map(str::to_owned), data.to_owned()));
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                None => anyhow::bail!("the stream ended without [DONE]"),
            }
        }
    }
}
