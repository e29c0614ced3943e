//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API. A request is translated into a chat; its answer is a
//! list of blocks.

mod error;
mod input;
mod output;

use std::sync::Arc;

use axum::{
    extract::{Extension, Request, State},
    response::Response,
};
use baton_request_fields::Endpoint;
use baton_router_core::{
    ChatInput, ClientRequest, ClientSampling, Core, Echo, FieldNames, PromptInput, RequestArrival,
    ServedModel, check_model, tokenize,
};
use baton_tools::{AnswerForm, CallIds, ToolRequest};
use http::HeaderMap;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    blocks::Blocks,
    body::{json, read_json},
    error::ApiError,
    messages,
    params::{self, request_body},
    sse,
};
use error::MessagesError;
pub(super) use error::write_error;
use output::MessageChunks;

/// Most tools of a request. Anthropic's API tells no limit; clients with many servers of tools send hundreds.
const MAX_TOOLS: usize = 1024;

request_body! { @served
    /// The request.
    MessagesRequest {
        messages: Vec<Value>,
        max_tokens: u32,
        system: Option<Value>,
        stop_sequences: Option<Vec<String>>,
        tools: Option<Vec<Value>>,
        tool_choice: Option<Value>,
        output_config: Option<Map<String, Value>>,
        thinking: Option<Map<String, Value>>,
    }
}

/// Serves one message.
pub(crate) async fn create(
    State(core): State<Arc<Core>>,
    Extension(arrival): Extension<RequestArrival>,
    request: Request,
) -> Result<Response, MessagesError> {
    let (request, room) = read_json::<MessagesRequest>(&core, request, None).await?;
    Endpoint::Messages.check(&request.rest, core.config.unknown_fields)?;
    let streamed = request.stream.unwrap_or(false);
    let x_request_id = arrival.x_request_id.clone();
    let &ServedModel { ref name, form, .. } = core.model()?;
    let input = core.offload(room.num_bytes(), move |_| Ok(request.into_input(arrival, form))).await??;
    let (id, model) = (input.id.clone(), name.clone());
    let request = core.prepare(input, room).await?;
    let blocks = Blocks::new(request.reader.clone(), CallIds::new("toolu_", &id));
    let mut events = if streamed { core.stream(request).await? } else { core.generate(request)? };
    let mut chunks = MessageChunks::new(id, x_request_id, model, blocks, events.usage());
    if streamed {
        return sse::stream(events, chunks, core.config.stream_keep_alive).await.map_err(MessagesError);
    }
    while let Some(event) = events.next().await {
        chunks.read(&event?);
    }
    Ok(json(&chunks.whole(events.usage(), &events.extras())))
}

/// A conversation for the chat template.
struct Conversation<'a> {
    system: Option<&'a Value>,
    messages: &'a [Value],
    tools: Option<&'a [Value]>,
    tool_choice: Option<&'a Value>,
    thinking: Option<&'a Map<String, Value>>,
    output_config: Option<&'a Map<String, Value>>,
}

impl Conversation<'_> {
    fn into_chat(self, form: AnswerForm) -> Result<ChatInput, ApiError> {
        let tools = input::tools(self.tools)?;
        let (choice, is_parallel) = input::tool_choice(self.tool_choice)?;
        let calls = ToolRequest::parse(Some(&tools), choice.as_ref(), Some(is_parallel), MAX_TOOLS);
        let place =
            |text: &str| text.replace(".function.parameters", ".input_schema").replace("].function", "]");
        let calls =
            calls.map_err(|refusal| ApiError::invalid(place(&refusal.param), place(&refusal.to_string())))?;
        let (messages, mut kept) = input::messages(self.system, self.messages, form)?;
        let (messages, _) = messages::normalise(messages)?;
        kept.splice(0..0, input::kept_tools(self.tools, &messages[0])?);
        let last = messages.as_array().and_then(|messages| messages.last());
        Ok(ChatInput {
            // An answer continues what the assistant has begun.
            continue_final: last.is_some_and(|last| last["role"] == "assistant"),
            tools: (!tools.is_empty() && calls.is_some()).then_some(Value::Array(tools)),
            calls: calls.map(Box::new),
            messages,
            kept,
            documents: Vec::new(),
            thinking: input::thinking(self.thinking, self.output_config)?,
            extra: Map::new(),
        })
    }
}

impl MessagesRequest {
    fn into_input(self, arrival: RequestArrival, form: AnswerForm) -> Result<ClientRequest, ApiError> {
        let serving = self.serving()?;
        let sampling = ClientSampling {
            max_tokens: Some(self.max_tokens),
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: params::top_k(self.top_k)?,
            seed: self.seed.map(|seed| seed as u64),
            grammar: input::format(self.output_config.as_ref())?,
            ..ClientSampling::default()
        };
        let conversation = Conversation {
            system: self.system.as_ref(),
            messages: &self.messages,
            tools: self.tools.as_deref(),
            tool_choice: self.tool_choice.as_ref(),
            thinking: self.thinking.as_ref(),
            output_config: self.output_config.as_ref(),
        };
        Ok(ClientRequest {
            id: arrival.answer_id("msg_"),
            endpoint: "/v1/messages",
            prompts: vec![PromptInput::Chat(conversation.into_chat(form)?)],
            model: self.model.unwrap_or_default(),
            n: 1,
            echo: Echo::Off,
            stop: self.stop_sequences.unwrap_or_default(),
            sampling,
            serving,
            names: FieldNames {
                prompt: "messages",
                stop: "stop_sequences",
                tool_schema: "input_schema",
                ..FieldNames::default()
            },
            arrival,
        })
    }
}

/// The request.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct CountRequest {
    model: Option<String>,
    messages: Vec<Value>,
    system: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    thinking: Option<Map<String, Value>>,
    output_config: Option<Map<String, Value>>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: Map<String, Value>,
}

/// The number of tokens of a prompt.
pub(crate) async fn count_tokens(
    State(core): State<Arc<Core>>,
    request: Request,
) -> Result<Response, MessagesError> {
    let (request, _room) = read_json::<CountRequest>(&core, request, None).await?;
    Endpoint::CountTokens.check(&request.rest, core.config.unknown_fields)?;
    let model = core.model()?;
    check_model(model, request.model.as_deref().unwrap_or_default())?;
    // On the blocking thread, whatever its size: measuring it takes as long as tokenising.
    let count = move |core: &Core| {
        let model = core.model()?;
        let conversation = Conversation {
            system: request.system.as_ref(),
            messages: &request.messages,
            tools: request.tools.as_deref(),
            tool_choice: request.tool_choice.as_ref(),
            thinking: request.thinking.as_ref(),
            output_config: request.output_config.as_ref(),
        };
        let count = |chat| Ok(tokenize(model, PromptInput::Chat(chat), "messages", false)?.ids.len());
        Ok(conversation.into_chat(model.form).and_then(count))
    };
    let num_tokens = core.offload(usize::MAX, count).await??;
    Ok(json(&json!({"input_tokens": num_tokens})))
}

/// Whether a call is one of this API. The paths of models are OpenAI's, too.
pub(super) fn is_called(path: &str, headers: &HeaderMap) -> bool {
    let is_below =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    is_below("/v1/messages") || is_below("/v1/models") && tells_version(headers)
}

/// Whether a call tells the version of this API, as its clients do.
pub(super) fn tells_version(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}
