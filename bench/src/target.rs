//! The targets of the load, and the arrival times of their answers.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use baton_cluster::Dialer;
use baton_command::openai::{OpenAi, RequestError};
use baton_proto::worker::{self, decode_client::DecodeClient, generate_event::Event};
use bytes::Bytes;
use serde_json::{Map, Value, json};
use tonic::{Code, Status, transport::Channel};

use super::workload::Prompt;

/// Where requests are sent.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // one or two values a run
pub(crate) enum Target {
    OpenAi(OpenAiTarget),
    Worker(WorkerTarget),
}

/// An OpenAI endpoint, and the fields of every request to it.
#[derive(Clone, Debug)]
pub(crate) struct OpenAiTarget {
    pub(crate) server: OpenAi,
    pub(crate) chat: bool,
    pub(crate) model: String,
    pub(crate) temperature: f64,
    pub(crate) ignore_eos: bool,
    /// Added to every body; replaces existing fields.
    pub(crate) extra: Map<String, Value>,
}

/// A decode worker without a router. It prefills by itself.
#[derive(Clone, Debug)]
pub(crate) struct WorkerTarget {
    pub(crate) address: String,
    pub(crate) client: DecodeClient<Channel>,
    pub(crate) temperature: f64,
    /// Tells the requests of this run from those of others.
    pub(crate) run: u64,
}

/// The arrival times of an answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    /// One per piece of text (OpenAI) or token (worker).
    pub(crate) arrivals: Vec<Instant>,
    pub(crate) finished: Option<Instant>,
    /// As the server counts; `None` if it does not say.
    pub(crate) input_tokens: Option<u64>,
    pub(crate) output_tokens: Option<u64>,
    pub(crate) cached_tokens: Option<u64>,
    /// Tokens that were drafted, and of those accepted; 0 if the server does not say.
    pub(crate) drafted_tokens: u64,
    pub(crate) accepted_tokens: u64,
}

/// A request that is ready to be sent, so that no work delays it.
#[derive(Clone, Debug)]
pub(crate) enum Prepared {
    Http(Bytes),
    Grpc(Box<worker::GenerateRequest>),
}

impl Target {
    /// What it is called in reports.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::OpenAi(target) if target.extra.is_empty() => {
                format!("{}{}", target.server.base(), target.path())
            }
            Self::OpenAi(target) => {
                format!("{}{} {}", target.server.base(), target.path(), Value::Object(target.extra.clone()))
            }
            Self::Worker(target) => format!("worker {}", target.address),
        }
    }

    pub(crate) fn prepare(&self, prompt: Prompt, output_tokens: usize, id: u64) -> anyhow::Result<Prepared> {
        match self {
            Self::OpenAi(target) => target.body(&prompt, output_tokens, true).map(Prepared::Http),
            Self::Worker(target) => {
                Ok(Prepared::Grpc(Box::new(target.request(prompt, output_tokens, id)?)))
            }
        }
    }

    /// Sends and listens to the end. Dropping the future cancels the request.
    pub(crate) async fn send(&self, prepared: Prepared) -> Result<Answer, RequestError> {
        match (self, prepared) {
            (Self::OpenAi(target), Prepared::Http(body)) => target.send(body).await,
            (Self::Worker(target), Prepared::Grpc(request)) => target.send(*request).await,
            _ => Err(RequestError::Malformed("the request was prepared for another target".to_owned())),
        }
    }
}

impl OpenAiTarget {
    fn path(&self) -> &'static str {
        if self.chat { "/v1/chat/completions" } else { "/v1/completions" }
    }

    fn body(&self, prompt: &Prompt, output_tokens: usize, stream: bool) -> anyhow::Result<Bytes> {
        let mut body = Map::new();
        body.insert("model".into(), json!(self.model));
        match (prompt, self.chat) {
            (Prompt::Text(text), true) => {
                body.insert("messages".into(), json!([{"role": "user", "content": text}]));
            }
            (Prompt::Ids(_), true) => bail!("a chat is made of text: use --prompt text"),
            (Prompt::Text(text), false) => drop(body.insert("prompt".into(), json!(text))),
            (Prompt::Ids(ids), false) => drop(body.insert("prompt".into(), json!(ids))),
        }
        body.insert("max_tokens".into(), json!(output_tokens));
        body.insert("temperature".into(), json!(self.temperature));
        if self.ignore_eos {
            body.insert("ignore_eos".into(), json!(true));
        }
        if stream {
            body.insert("stream".into(), json!(true));
            body.insert("stream_options".into(), json!({"include_usage": true}));
        }
        body.extend(self.extra.clone());
        Ok(serde_json::to_vec(&body).context("the request is not JSON")?.into())
    }

    /// How many tokens the server counts in a prompt of this text; `None` if it does not say.
    pub(crate) async fn count_tokens(&self, text: String) -> anyhow::Result<Option<u64>> {
        let answer = self.server.post(self.path(), self.body(&Prompt::Text(text), 1, false)?).await?;
        Ok(answer["usage"]["prompt_tokens"].as_u64())
    }

    async fn send(&self, body: Bytes) -> Result<Answer, RequestError> {
        let mut stream = self.server.stream(self.path(), body).await?;
        let mut answer = Answer::default();
        while let Some(chunk) = stream.next().await? {
            let now = Instant::now();
            answer.read_chunk(&chunk, now);
        }
        answer.finish()
    }
}

impl Answer {
    fn read_chunk(&mut self, chunk: &Value, now: Instant) {
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            if says_something(choice) {
                self.arrivals.push(now);
            }
            self.finished = Some(now);
        }
        let usage = &chunk["usage"];
        let count = |value: &Value| value.as_u64();
        self.input_tokens = count(&usage["prompt_tokens"]).or(self.input_tokens);
        self.output_tokens = count(&usage["completion_tokens"]).or(self.output_tokens);
        self.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]).or(self.cached_tokens);
        let details = &usage["completion_tokens_details"];
        let accepted = count(&details["accepted_prediction_tokens"]).unwrap_or(0);
        self.accepted_tokens += accepted;
        self.drafted_tokens += accepted + count(&details["rejected_prediction_tokens"]).unwrap_or(0);
    }

    /// The first arrival of an answer without text is its end.
    fn finish(mut self) -> Result<Self, RequestError> {
        let Some(finished) = self.finished else {
            return Err(RequestError::Malformed("the stream held no choice".to_owned()));
        };
        if self.arrivals.is_empty() {
            self.arrivals.push(finished);
        }
        Ok(self)
    }
}

/// A completion's chunk does with every token, even one that completes no character; a chat's first
/// chunk only announces the role, and its last only the reason for the end.
fn says_something(choice: &Value) -> bool {
    let has_text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
    match choice.get("delta") {
        Some(delta) => {
            ["content", "reasoning_content", "reasoning", "refusal"].iter().any(|key| has_text(&delta[*key]))
                || delta["tool_calls"].is_array()
        }
        None => has_text(&choice["text"]) || choice["finish_reason"].is_null(),
    }
}

impl WorkerTarget {
    /// Connects on first use.
    pub(crate) fn new(dialer: &Dialer, address: &str, temperature: f64, run: u64) -> anyhow::Result<Self> {
        let endpoint = dialer.endpoint(address)?.tcp_nodelay(true).connect_timeout(Duration::from_secs(10));
        let client = DecodeClient::new(dialer.dial(endpoint).channel);
        Ok(Self { address: address.to_owned(), client, temperature, run })
    }

    pub(crate) fn request(
        &self,
        prompt: Prompt,
        output_tokens: usize,
        id: u64,
    ) -> anyhow::Result<worker::GenerateRequest> {
        let Prompt::Ids(prompt_token_ids) = prompt else {
            bail!("a worker reads token ids: use --prompt ids");
        };
        let output_tokens = output_tokens as u32;
        Ok(worker::GenerateRequest {
            request_id: format!("bench-{:08x}-{id}", self.run as u32),
            prompt_token_ids,
            sampling: Some(worker::Sampling {
                max_tokens: output_tokens,
                temperature: self.temperature as f32,
                top_p: 1.0,
                repetition_penalty: 1.0,
                seed: id,
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    pub(crate) async fn send(&self, request: worker::GenerateRequest) -> Result<Answer, RequestError> {
        let input_tokens = request.prompt_token_ids.len() as u64;
        let mut client = self.client.clone();
        let mut stream = client.generate(request).await.map_err(of_status)?.into_inner();
        let mut answer = Answer { input_tokens: Some(input_tokens), ..Answer::default() };
        while let Some(event) = stream.message().await.map_err(of_status)? {
            let now = Instant::now();
            match event.event {
                Some(Event::Token(token)) => {
                    answer.arrivals.push(now);
                    answer.cached_tokens = token.cached_tokens.map(u64::from).or(answer.cached_tokens);
                    answer.drafted_tokens += u64::from(token.drafted_tokens);
                    answer.accepted_tokens += u64::from(token.accepted_tokens);
                }
                Some(Event::Finished(_)) => {
                    answer.output_tokens = Some(answer.arrivals.len() as u64);
                    answer.finished = Some(now);
                }
                Some(Event::Failed(failed)) => {
                    let kind = failed.kind().as_str_name();
                    return Err(RequestError::Server(format!("{kind}: {}", failed.message)));
                }
                Some(Event::Leaving(_) | Event::Progress(_) | Event::Scored(_)) | None => {}
            }
        }
        if answer.finished.is_none() {
            return Err(RequestError::Broken("the stream ended without a last event".to_owned()));
        }
        answer.finish()
    }
}

/// Counted like the same errors over HTTP.
fn of_status(status: Status) -> RequestError {
    let message = status.message().to_owned();
    match status.code() {
        Code::Unavailable => RequestError::Connect(message),
        Code::DeadlineExceeded => RequestError::Timeout,
        Code::ResourceExhausted => RequestError::Status { code: 429, message },
        Code::InvalidArgument | Code::OutOfRange => RequestError::Status { code: 400, message },
        code => RequestError::Server(format!("{code:?}: {message}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(chunks: &[Value]) -> Result<Answer, RequestError> {
        let mut answer = Answer::default();
        for chunk in chunks {
            answer.read_chunk(chunk, Instant::now());
        }
        answer.finish()
    }

    #[test]
    fn chat_counts_text_and_usage() {
        let chunk =
            |delta: Value, reason: Value| json!({"choices": [{"delta": delta, "finish_reason": reason}]});
        let got = answer(&[
            chunk(json!({"role": "assistant", "content": ""}), Value::Null),
            chunk(json!({"content": "a"}), Value::Null),
            chunk(json!({"content": "b"}), Value::Null),
            chunk(json!({}), json!("stop")),
            json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3,
                   "prompt_tokens_details": {"cached_tokens": 4},
                   "completion_tokens_details": {"accepted_prediction_tokens": 2,
                                                 "rejected_prediction_tokens": 5}}}),
        ])
        .unwrap();
        assert_eq!((got.drafted_tokens, got.accepted_tokens), (7, 2));
        assert_eq!(got.arrivals.len(), 2);
        assert_eq!((got.input_tokens, got.output_tokens, got.cached_tokens), (Some(9), Some(3), Some(4)));
    }

    #[test]
    fn completions_count_every_token() {
        let chunk = |text: &str, reason: Value| json!({"choices": [{"text": text, "finish_reason": reason}]});
        let got = answer(&[
            chunk("a", Value::Null),
            chunk("", Value::Null), // the first half of a character
            chunk("é", Value::Null),
            chunk("", json!("length")),
        ])
        .unwrap();
        assert_eq!(got.arrivals.len(), 3);
        assert_eq!(got.output_tokens, None);
    }

    #[test]
    fn answers_without_text_are_answers_and_empty_streams_are_not() {
        let end = json!({"choices": [{"text": "", "finish_reason": "stop"}]});
        assert_eq!(answer(&[end]).unwrap().arrivals.len(), 1);
        assert!(matches!(answer(&[]), Err(RequestError::Malformed(_))));
    }

    #[tokio::test]
    async fn bodies_say_what_was_asked() {
        let target = |chat| OpenAiTarget {
            server: OpenAi::new("http://h:1", None, None).unwrap(),
            chat,
            model: "m".into(),
            temperature: 0.0,
            ignore_eos: true,
            extra: json!({"prefill_mode": "local", "temperature": 1}).as_object().unwrap().clone(),
        };
        let body = target(false).body(&Prompt::Ids(vec![1, 2]), 5, true).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let expected = json!({"model": "m", "prompt": [1, 2], "max_tokens": 5, "temperature": 1,
            "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}, "prefill_mode": "local"});
        assert_eq!(body, expected);
        assert!(target(true).body(&Prompt::Ids(vec![1]), 5, true).is_err());
        let worker = WorkerTarget::new(&Dialer::default(), "http://127.0.0.1:1", 0.0, 1).unwrap();
        assert!(worker.request(Prompt::Text("a".into()), 1, 0).is_err());
        assert!(WorkerTarget::new(&Dialer::default(), "127.0.0.1:1", 0.0, 1).is_err());
    }
}
