//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    extract::{Extension, Request, State},
    response::Response,
};
use baton_request_fields::Endpoint;
use baton_tokenizer::Tokenizer;
use baton_tools::{AnswerPart, CallIds, ChatAnswer, ChatDelta, ChatMessage, ToolRequest};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    body::{json, read_json},
    error::ApiError,
    messages,
    params::{self, request_body},
    shape::{ChatLogprob, Head, PromptLogprobs, ids_of},
    sse::{self, Chunks, Frame},
};
use baton_router_core::{
    ChatInput, ClientRequest, Core, Echo, Event, Events, Extras, FieldNames, PromptInput, RequestArrival,
    Serving, Thinking, TokenOut, Usage, documents,
};

request_body! {
    /// The request.
    ChatRequest {
        messages: Vec<Value>,
        documents: Option<Vec<Value>>,
        blend: Option<params::BlendName>,
        tools: Option<Vec<Value>>,
        tool_choice: Option<Value>,
        parallel_tool_calls: Option<bool>,
        max_completion_tokens: Option<u32>,
        logprobs: Option<bool>,
        top_logprobs: Option<u32>,
        chat_template_kwargs: Option<Map<String, Value>>,
        add_generation_prompt: Option<bool>,
        continue_final_message: Option<bool>,
    }
}

/// Serves one chat completion.
pub(crate) async fn chat_completions(
    State(core): State<Arc<Core>>,
    Extension(arrival): Extension<RequestArrival>,
    request: Request,
) -> Result<Response, ApiError> {
    let (request, room) = read_json::<ChatRequest>(&core, request, None).await?;
    request.check_fields(Endpoint::Chat, core.config.unknown_fields)?;
    let streamed = request.stream.unwrap_or(false);
    let include_usage =
        request.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false);
    let with_logprobs = request.logprobs.unwrap_or(false);
    let with_ids = request.return_token_ids.unwrap_or(false);
    let num_prompt_top = request.prompt_logprobs;
    let input = core.offload(room.num_bytes(), move |_| Ok(request.into_input(arrival))).await??;
    let head = Head::new(&input, core.model()?);
    let n = input.n;
    let request = core.prepare(input, room).await?;
    let call_ids = CallIds::new("call_", &head.id);
    let answers = vec![ChatAnswer::new(request.reader.clone(), call_ids); n as usize];
    let prompt = if with_ids { request.prompts.first().map(|request| request.prompt.clone()) } else { None };
    let events = if streamed { core.stream(request).await? } else { core.generate(request)? };
    let tokenizer = core.model()?.tokenizer.clone();
    let logprobs = with_logprobs.then(|| tokenizer.clone());
    if streamed {
        let begun = vec![false; n as usize];
        let chunks = ChatChunks { head, include_usage, logprobs, with_ids, prompt, begun, answers };
        return sse::stream(events, chunks, core.config.stream_keep_alive).await;
    }
    let scored = num_prompt_top.map(|num_top| (tokenizer, num_top));
    collect(&core, head, logprobs, scored, prompt, answers, events).await
}

impl ChatRequest {
    fn into_input(self, arrival: RequestArrival) -> Result<ClientRequest, ApiError> {
        let mut sampling = self.sampling()?;
        let blend = self.blend.map(|blend| blend.0).unwrap_or_default();
        let serving = Serving { priority: self.priority.unwrap_or(0), blend, ..self.serving()? };
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
        if self.continue_final_message == Some(true) && self.add_generation_prompt == Some(true) {
            let param = "continue_final_message";
            return Err(ApiError::invalid(
                param,
                format!("{param}: add_generation_prompt begins another message"),
            ));
        }
        let calls = ToolRequest::parse(
            self.tools.as_deref(),
            self.tool_choice.as_ref(),
            self.parallel_tool_calls,
            ToolRequest::MAX_TOOLS,
        )?;
        let tools = self.tools.filter(|_| calls.is_some()).map(Value::Array);
        let (messages, kept) = messages::normalise(self.messages)?;
        let chat = ChatInput {
            messages,
            kept,
            documents: documents(self.documents.unwrap_or_default())?,
            tools,
            calls: calls.map(Box::new),
            continue_final: self.continue_final_message.unwrap_or(false),
            thinking: Thinking::default(),
            extra,
        };
        Ok(ClientRequest {
            id: arrival.answer_id("chatcmpl-"),
            endpoint: "/v1/chat/completions",
            model: self.model.unwrap_or_default(),
            prompts: vec![PromptInput::Chat(chat)],
            n: params::num_choices(self.n)?,
            echo: Echo::Off,
            stop: self.stop.map(|stop| stop.0).unwrap_or_default(),
            sampling,
            serving,
            names: FieldNames {
                prompt: "messages",
                max_tokens,
                logprobs: "top_logprobs",
                ..FieldNames::default()
            },
            arrival,
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
struct ChunkChoice {
    index: u32,
    delta: ChatDelta,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

impl ChunkChoice {
    fn new(index: u32, delta: ChatDelta) -> ChunkChoice {
        ChunkChoice { index, delta, logprobs: None, finish_reason: None, token_ids: None }
    }
}

/// Writes `chat.completion.chunk`s: the role, then pieces of content, then the finish reason.
struct ChatChunks {
    head: Head,
    include_usage: bool,
    /// Set when log-probabilities were asked for.
    logprobs: Option<Tokenizer>,
    with_ids: bool,
    /// Until the first chunk, if its tokens were asked for.
    prompt: Option<Arc<[u32]>>,
    /// Which choices have had their role chunk.
    begun: Vec<bool>,
    /// Of each choice.
    answers: Vec<ChatAnswer>,
}

impl ChatChunks {
    fn push(&mut self, choice: ChunkChoice, out: &mut Frame) {
        let usage = self.include_usage.then_some(None);
        let (choices, prompt) = ([choice], self.prompt.take());
        let chunk = self.head.answer("chat.completion.chunk", &choices, usage);
        out.push(&chunk.with_prompt(prompt.as_deref()));
    }
}

impl Chunks for ChatChunks {
    fn write_event(&mut self, event: &Event, out: &mut Frame) {
        let index = event.index;
        if !std::mem::replace(&mut self.begun[index as usize], true) {
            self.push(ChunkChoice::new(index, ChatDelta::first()), out);
        }
        let has_logprobs = self.logprobs.is_some() && !event.tokens.is_empty();
        let mut logprobs = logprobs(self.logprobs.as_ref().filter(|_| has_logprobs), &event.tokens);
        let mut token_ids = ids_of(&event.tokens, self.with_ids).filter(|ids| !ids.is_empty());
        let mut parts = self.answers[index as usize].read(&event.text, event.finish.is_some());
        if parts.is_empty() && (has_logprobs || token_ids.is_some()) {
            parts.push(AnswerPart::Content(String::new()));
        }
        for part in parts {
            let delta = self.answers[index as usize].delta(part);
            let (logprobs, token_ids) = (logprobs.take(), token_ids.take());
            self.push(ChunkChoice { logprobs, token_ids, ..ChunkChoice::new(index, delta) }, out);
        }
        if let Some(finish) = &event.finish {
            let finish_reason = Some(self.answers[index as usize].finish_reason(finish.reason));
            self.push(ChunkChoice { finish_reason, ..ChunkChoice::new(index, ChatDelta::default()) }, out);
        }
    }

    fn write_end(&mut self, usage: Usage, extras: Extras, out: &mut Frame) {
        if self.include_usage || !extras.is_empty() {
            let usage = self.include_usage.then(|| Some(usage.into()));
            let end = self.head.answer::<ChunkChoice>("chat.completion.chunk", &[], usage);
            out.push(&end.with(extras));
        }
        out.push_done();
    }
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    message: ChatMessage,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// Answers in one piece, which is made on another thread if it is long.
async fn collect(
    core: &Arc<Core>,
    head: Head,
    tokenizer: Option<Tokenizer>,
    scored: Option<(Tokenizer, u32)>,
    prompt: Option<Arc<[u32]>>,
    mut answers: Vec<ChatAnswer>,
    mut events: Events,
) -> Result<Response, ApiError> {
    let mut choices: Vec<Choice> = (0..answers.len() as u32)
        .map(|index| Choice {
            index,
            message: ChatMessage::default(),
            logprobs: logprobs(tokenizer.as_ref(), &[]),
            finish_reason: "abort",
            token_ids: ids_of(&[], prompt.is_some()),
        })
        .collect();
    let mut prompt_scores = Vec::new();
    let mut num_bytes = prompt.as_ref().map_or(0, |prompt| prompt.len());
    while let Some(event) = events.next().await {
        let event = event?;
        num_bytes += event.num_bytes();
        prompt_scores.extend(event.scored);
        let (choice, answer) = (&mut choices[event.index as usize], &mut answers[event.index as usize]);
        for part in answer.read(&event.text, event.finish.is_some()) {
            choice.message.add(answer, part);
        }
        if let (Some(all), Some(tokenizer)) = (&mut choice.logprobs, &tokenizer) {
            all.content.extend(event.tokens.iter().map(|token| ChatLogprob::new(tokenizer, token)));
        }
        if let Some(ids) = &mut choice.token_ids {
            ids.extend(event.tokens.iter().map(|token| token.id));
        }
        if let Some(finish) = event.finish {
            choice.message.finish();
            choice.finish_reason = answer.finish_reason(finish.reason);
        }
    }
    let (usage, extras) = (events.usage(), events.extras());
    let write = move |_: &Core| {
        let scored =
            scored.map(|(tokenizer, num_top)| PromptLogprobs::new(&tokenizer, &prompt_scores, num_top));
        let answer = head.answer("chat.completion", &choices, Some(Some(usage.into())));
        let answer = answer.with_prompt(prompt.as_deref()).with_prompt_logprobs(scored.as_ref());
        Ok(json(&answer.with(extras)))
    };
    Ok(core.offload(num_bytes, write).await?)
}
