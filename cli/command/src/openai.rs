//! A small client of OpenAI-style servers over HTTP/1.1.

use anyhow::{Context, bail, ensure};
use baton_tls::TlsClient;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::Value;

use crate::{
    dial::{ConnectError, Connector},
    sse,
};

/// Bytes of an answer that is not a stream; more than any error or model list has.
const MAX_BODY: usize = 4 << 20;

/// A server, and kept-alive connections to it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct OpenAi {
    client: Client<Connector, Full<Bytes>>,
    base: String,
    api_key: Option<String>,
}

/// A model as a server lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelEntry {
    /// What requests name it by.
    pub name: String,
    /// The server is Baton, which knows fields that other servers refuse.
    pub is_ours: bool,
}

/// Why a request got no whole answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The connection was refused, or lost before an answer.
    #[error("cannot reach the server: {0}")]
    Connect(String),
    /// Only one side uses TLS, or one side rejects the other's certificate.
    #[error("no TLS with the server: {0}")]
    Tls(String),
    /// An answer that is not a success.
    #[error("HTTP {code}: {message}")]
    Status {
        /// The HTTP status.
        code: u16,
        /// What the server says in the body.
        message: String,
    },
    /// The connection ended within the answer.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// The stream told of an error.
    #[error("the server failed: {0}")]
    Server(String),
    /// The answer is not what the API promises.
    #[error("the answer is malformed: {0}")]
    Malformed(String),
    /// It took too long.
    #[error("no answer in time")]
    Timeout,
}

impl RequestError {
    /// What failures are counted by.
    pub fn kind(&self) -> String {
        match self {
            Self::Connect(_) => "connect".to_owned(),
            Self::Tls(_) => "tls".to_owned(),
            Self::Status { code, .. } => format!("http_{code}"),
            Self::Broken(_) => "broken_stream".to_owned(),
            Self::Server(_) => "server_error".to_owned(),
            Self::Malformed(_) => "malformed".to_owned(),
            Self::Timeout => "timeout".to_owned(),
        }
    }
}

impl OpenAi {
    /// For the server at `url`, with or without `/v1` at its end; `tls` is for those at https://.
    pub fn new(url: &str, api_key: Option<String>, tls: Option<TlsClient>) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        let uri: Uri = base.parse().with_context(|| format!("{url:?} is not a URL"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => ensure!(
                tls.is_some(),
                "{url}: https needs --tls-ca, the authority that the server's certificate comes from"
            ),
            _ => bail!("{url:?} is not a URL such as http://127.0.0.1:8080"),
        }
        ensure!(uri.query().is_none(), "{url}: a base URL has no query");
        let client =
            Client::builder(TokioExecutor::new()).pool_max_idle_per_host(usize::MAX).build(Connector { tls });
        Ok(Self { client, base: base.to_owned(), api_key })
    }

    /// Where the server is.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The models that are served.
    pub async fn models(&self) -> Result<Vec<ModelEntry>, RequestError> {
        let response = self.send(Method::GET, "/v1/models", Bytes::new()).await?;
        let list = read_json(response).await?;
        let models = list["data"].as_array().into_iter().flatten();
        let entry = |model: &Value| {
            let name = model["id"].as_str()?.to_owned();
            Some(ModelEntry { name, is_ours: model["owned_by"] == "baton" })
        };
        Ok(models.filter_map(entry).collect())
    }

    /// Posts `body` and reads the whole answer.
    pub async fn post(&self, path: &str, body: Bytes) -> Result<Value, RequestError> {
        read_json(self.send(Method::POST, path, body).await?).await
    }

    /// Posts `body`, whose `stream` is true.
    pub async fn stream(&self, path: &str, body: Bytes) -> Result<EventStream, RequestError> {
        self.events(Method::POST, path, body).await
    }

    /// A stream of events that is there without a request. It breaks off when the server stops.
    pub async fn watch(&self, path: &str) -> Result<EventStream, RequestError> {
        self.events(Method::GET, path, Bytes::new()).await
    }

    async fn events(&self, method: Method, path: &str, body: Bytes) -> Result<EventStream, RequestError> {
        let response = self.send(method, path, body).await?;
        let content_type = response.headers().get(header::CONTENT_TYPE);
        if !content_type.is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream")) {
            let message = format!("expected a stream of events, not {content_type:?}");
            return Err(RequestError::Malformed(message));
        }
        Ok(EventStream { body: response.into_body(), parser: sse::Parser::default() })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<hyper::body::Incoming>, RequestError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::USER_AGENT, concat!("baton/", env!("CARGO_PKG_VERSION")));
        if let Some(key) = &self.api_key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request =
            request.body(Full::new(body)).map_err(|error| RequestError::Malformed(error.to_string()))?;
        let response = self.client.request(request).await.map_err(|error| unsent(&error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(match status_error(response.status(), response.into_body()).await {
            RequestError::Status { code: 400, message } if message.contains("this port speaks TLS") => {
                RequestError::Tls(format!("{}: write https://, and --tls-ca", message.trim()))
            }
            error => error,
        })
    }
}

/// The answer to a streamed request.
#[derive(Debug)]
pub struct EventStream {
    body: hyper::body::Incoming,
    parser: sse::Parser,
}

impl EventStream {
    /// The next chunk; `None` after the last. Dropping the stream cancels the request.
    pub async fn next(&mut self) -> Result<Option<Value>, RequestError> {
        loop {
            if let Some(event) = self.parser.next_event() {
                if event == "[DONE]" {
                    // Read to the very end, or the connection cannot be used again.
                    while let Some(Ok(_)) = self.body.frame().await {}
                    return Ok(None);
                }
                let chunk: Value = serde_json::from_str(&event)
                    .map_err(|error| RequestError::Malformed(format!("{error} in {event:?}")))?;
                return match chunk.get("error") {
                    Some(error) if !error.is_null() => Err(RequestError::Server(message_of(error))),
                    _ => Ok(Some(chunk)),
                };
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        self.parser.feed(&bytes);
                    }
                }
                Some(Err(error)) => return Err(RequestError::Broken(causes(&error))),
                None => return Err(RequestError::Broken("it ended without [DONE]".to_owned())),
            }
        }
    }
}

async fn read_json(response: Response<hyper::body::Incoming>) -> Result<Value, RequestError> {
    let bytes = read(response.into_body()).await.map_err(RequestError::Broken)?;
    serde_json::from_slice(&bytes).map_err(|error| RequestError::Malformed(error.to_string()))
}

async fn status_error(status: StatusCode, body: hyper::body::Incoming) -> RequestError {
    let code = status.as_u16();
    let Ok(bytes) = read(body).await else {
        return RequestError::Status { code, message: status.to_string() };
    };
    let message = match serde_json::from_slice::<Value>(&bytes) {
        Ok(answer) => message_of(answer.get("error").unwrap_or(&answer)),
        Err(_) => String::from_utf8_lossy(&bytes).trim().chars().take(300).collect(),
    };
    RequestError::Status { code, message }
}

async fn read(body: hyper::body::Incoming) -> Result<Bytes, String> {
    match Limited::new(body, MAX_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => Err(error.to_string()),
    }
}

/// Servers say `{"message": …}`, or just a text.
fn message_of(error: &Value) -> String {
    match error.get("message").unwrap_or(error) {
        Value::String(message) => message.clone(),
        other => other.to_string(),
    }
}

/// Why a request did not get through.
fn unsent(error: &(dyn std::error::Error + 'static)) -> RequestError {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(ConnectError::Tls(error)) = error.downcast_ref() {
            return RequestError::Tls(error.to_string());
        }
        cause = error.source();
    }
    RequestError::Connect(causes(error))
}

/// hyper's errors tell the reason only in their sources.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked() {
        for url in ["http://127.0.0.1:8080", "http://localhost:1/", "http://h:1/v1", "http://h/prefix/v1/"] {
            let server = OpenAi::new(url, None, None).unwrap();
            assert!(!server.base().ends_with("/v1") && !server.base().ends_with('/'), "{url}");
        }
        for (url, hint) in [("https://h", "https needs --tls-ca"), ("127.0.0.1:8080", "http://"), ("", "")] {
            let error = format!("{:#}", OpenAi::new(url, None, None).unwrap_err());
            assert!(error.contains(hint), "{error}");
        }
    }

    #[test]
    fn messages_are_found() {
        assert_eq!(message_of(&serde_json::json!({"message": "full", "type": "x"})), "full");
        assert_eq!(message_of(&serde_json::json!("full")), "full");
        assert_eq!(message_of(&serde_json::json!({"detail": 1})), "{\"detail\":1}");
    }
}
