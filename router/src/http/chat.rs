//! `POST /v1/chat/completions`.

use std::{sync::Arc, time::Instant};

use axum::{
    extract::{Request, State},
    response::Response,
};
use baton_planner::PrefillMode;
use baton_proto::v1::KvWire;
use baton_request::SpeculationMode;
use baton_tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    body::{json, read_json},
    error::ApiError,
    messages,
    params::{self, request_body},
    shape::{ChatLogprob, Head, UsageBody},
    sse::{self, Chunks, Frame},
};
use crate::core::{ChatInput, ClientRequest, Core, Event, Events, FieldNames, PromptInput, TokenOut, Usage};

request_body! {
    /// The request.
    ChatRequest {
        messages: Vec<Value>,
        tools: Option<Vec<Value>>,
        max_completion_tokens: Option<u32>,
        logprobs: Option<bool>,
        top_logprobs: Option<u32>,
        chat_template_kwargs: Option<Map<String, Value>>,
        add_generation_prompt: Option<bool>,
    }
}

/// Serves one chat completion.
pub(crate) async fn chat_completions(
    State(core): State<Arc<Core>>,
    request: Request,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let request: ChatRequest = read_json(&core.config, request).await?;
    let streamed = request.stream.unwrap_or(false);
    let include_usage = request.stream_options.and_then(|options| options.include_usage).unwrap_or(false);
    let with_logprobs = request.logprobs.unwrap_or(false);
    let input = request.into_input(started)?;
    let head = Head::new(input.id.clone(), core.model()?);
    let n = input.n;
    let request = core.prepare(input).await?;
    let events = core.generate(request)?;
    let logprobs = if with_logprobs { Some(core.model()?.tokenizer.clone()) } else { None };
    if streamed {
        let chunks = ChatChunks { head, include_usage, logprobs, begun: vec![false; n as usize] };
        return sse::stream(events, chunks, core.config.stream_keep_alive).await;
    }
    collect(head, logprobs, n, events).await
}

impl ChatRequest {
    fn into_input(self, started: Instant) -> Result<ClientRequest, ApiError> {
        params::refuse_unsupported(&self.rest)?;
        let mut sampling = self.sampling()?;
        let mut max_tokens = "max_tokens";
        if let Some(max) = self.max_completion_tokens {
            sampling.max_tokens = Some(max);
            max_tokens = "max_completion_tokens";
        }
        sampling.logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"));
            }
        };
        let mut extra = self.chat_template_kwargs.unwrap_or_default();
        if let Some(add) = self.add_generation_prompt {
            extra.insert("add_generation_prompt".to_owned(), Value::Bool(add));
        }
        let none = self.rest.get("tool_choice").is_some_and(|choice| choice == "none");
        let tools = self.tools.filter(|tools| !tools.is_empty() && !none).map(Value::Array);
        let chat = ChatInput { messages: messages::normalise(self.messages)?, tools, extra };
        Ok(ClientRequest {
            id: format!("chatcmpl-{}", uuid::Uuid::new_v4().simple()),
            endpoint: "/v1/chat/completions",
            model: self.model.unwrap_or_default(),
            prompts: vec![PromptInput::Chat(chat)],
            n: params::num_choices(self.n)?,
            stop: self.stop.map(|stop| stop.0).unwrap_or_default(),
            sampling,
            cache_salt: self.cache_salt.unwrap_or_default(),
            prefill: self.prefill_mode.map_or(PrefillMode::Auto, PrefillMode::from),
            speculation: self.speculation_mode.map(SpeculationMode::from).unwrap_or_default(),
            kv_wire: self.kv_wire.map(KvWire::from).unwrap_or_default(),
            names: FieldNames { prompt: "messages", max_tokens, logprobs: "top_logprobs" },
            started,
        })
    }
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<ChatLogprob>,
    refusal: Option<()>,
}

fn logprobs(tokenizer: Option<&Tokenizer>, tokens: &[TokenOut]) -> Option<Logprobs> {
    let tokenizer = tokenizer?;
    let content = tokens.iter().map(|token| ChatLogprob::new(tokenizer, token)).collect();
    Some(Logprobs { content, refusal: None })
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

/// Writes `chat.completion.chunk`s: the role, then pieces of content, then the finish reason.
struct ChatChunks {
    head: Head,
    include_usage: bool,
    /// Set when log-probabilities were asked for.
    logprobs: Option<Tokenizer>,
    /// Which choices have had their role chunk.
    begun: Vec<bool>,
}

impl ChatChunks {
    fn push(&self, choices: &[ChunkChoice<'_>], usage: Option<UsageBody>, out: &mut Frame) {
        let usage = self.include_usage.then_some(usage);
        out.push(&self.head.answer("chat.completion.chunk", choices, usage));
    }

    fn push_choice(
        &self,
        index: u32,
        delta: Delta<'_>,
        logprobs: Option<Logprobs>,
        finish_reason: Option<&'static str>,
        out: &mut Frame,
    ) {
        self.push(&[ChunkChoice { index, delta, logprobs, finish_reason }], None, out);
    }
}

impl Chunks for ChatChunks {
    fn write_event(&mut self, event: &Event, out: &mut Frame) {
        let index = event.index;
        if !std::mem::replace(&mut self.begun[index as usize], true) {
            let role = Delta { role: Some("assistant"), content: Some("") };
            self.push_choice(index, role, None, None, out);
        }
        let has_logprobs = self.logprobs.is_some() && !event.tokens.is_empty();
        if !event.text.is_empty() || has_logprobs {
            let content = Delta { role: None, content: Some(&event.text) };
            let logprobs = logprobs(self.logprobs.as_ref().filter(|_| has_logprobs), &event.tokens);
            self.push_choice(index, content, logprobs, None, out);
        }
        if let Some(finish) = &event.finish {
            self.push_choice(index, Delta::default(), None, Some(finish.reason.name()), out);
        }
    }

    fn write_end(&mut self, usage: Usage, out: &mut Frame) {
        if self.include_usage {
            self.push(&[], Some(usage.into()), out);
        }
    }
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    message: Message,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: Option<()>,
}

/// Answers in one piece.
async fn collect(
    head: Head,
    tokenizer: Option<Tokenizer>,
    n: u32,
    mut events: Events,
) -> Result<Response, ApiError> {
    let mut choices: Vec<Choice> = (0..n)
        .map(|index| Choice {
            index,
            message: Message { role: "assistant", content: String::new(), refusal: None },
            logprobs: logprobs(tokenizer.as_ref(), &[]),
            finish_reason: "abort",
        })
        .collect();
    while let Some(event) = events.next().await {
        let event = event?;
        let choice = &mut choices[event.index as usize];
        choice.message.content.push_str(&event.text);
        if let (Some(all), Some(tokenizer)) = (&mut choice.logprobs, &tokenizer) {
            all.content.extend(event.tokens.iter().map(|token| ChatLogprob::new(tokenizer, token)));
        }
        if let Some(finish) = event.finish {
            choice.finish_reason = finish.reason.name();
        }
    }
    Ok(json(&head.answer("chat.completion", &choices, Some(Some(events.usage().into())))))
}
