//! `POST /tokenize` and `/detokenize`, in vLLM's shapes.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use baton_request::check_tokens;
use baton_request_fields::Endpoint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    body::{json, read_json},
    error::ApiError,
    messages,
};
use baton_router_core::{
    ChatInput, Core, CoreError, PromptInput, Thinking, check_model, documents, tokenize,
};

/// The request.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Value>>,
    documents: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    return_token_strs: Option<bool>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: Map<String, Value>,
}

#[derive(Serialize)]
struct Tokenized {
    count: usize,
    /// Null while it is not known.
    max_model_len: Option<usize>,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

/// The token ids of a text or a chat.
pub(crate) async fn tokenize_text(
    State(core): State<Arc<Core>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (request, room) = read_json::<TokenizeRequest>(&core, request, None).await?;
    Endpoint::Tokenize.check(&request.rest, core.config.unknown_fields)?;
    check_model(core.model()?, &request.model.unwrap_or_default())?;
    let (prompt, param, num_bytes) = match (request.prompt, request.messages) {
        (Some(text), None) => {
            let num_bytes = text.len();
            (PromptInput::Text(text), "prompt", num_bytes)
        }
        (None, Some(messages)) => {
            let mut extra = Map::new();
            if let Some(add) = request.add_generation_prompt {
                extra.insert("add_generation_prompt".to_owned(), Value::Bool(add));
            }
            let tools = request.tools.filter(|tools| !tools.is_empty()).map(Value::Array);
            let normalise = move |_: &Core| Ok(messages::normalise(messages));
            let (messages, _) = core.offload(room.num_bytes(), normalise).await??;
            // A chat goes to the blocking thread, whatever its size: measuring it takes as long as tokenising.
            let continue_final = request.continue_final_message.unwrap_or(false);
            let documents = documents(request.documents.unwrap_or_default())?;
            let chat = ChatInput {
                messages,
                documents,
                tools,
                kept: Vec::new(),
                calls: None,
                continue_final,
                thinking: Thinking::default(),
                extra,
            };
            (PromptInput::Chat(chat), "messages", usize::MAX)
        }
        _ => return Err(ApiError::invalid("prompt", "either prompt or messages is needed, and not both")),
    };
    let add_special = request.add_special_tokens.unwrap_or(true);
    let with_texts = request.return_token_strs.unwrap_or(false);
    let tokenized = core
        .offload(num_bytes, move |core| {
            let model = core.model()?;
            let tokens = tokenize(model, prompt, param, add_special)?.ids;
            let text = |id: &u32| model.tokenizer.token_text(*id).unwrap_or_default();
            let token_strs = with_texts.then(|| tokens.iter().map(text).collect());
            Ok(Tokenized { count: tokens.len(), max_model_len: core.context_length(), tokens, token_strs })
        })
        .await?;
    Ok(json(&tokenized))
}

/// The request.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: Map<String, Value>,
}

#[derive(Serialize)]
struct Detokenized {
    prompt: String,
}

/// The text of token ids, special tokens included.
pub(crate) async fn detokenize(
    State(core): State<Arc<Core>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (request, _room) = read_json::<DetokenizeRequest>(&core, request, Some("tokens")).await?;
    Endpoint::Detokenize.check(&request.rest, core.config.unknown_fields)?;
    check_model(core.model()?, &request.model.unwrap_or_default())?;
    let detokenized = core
        .offload(request.tokens.len(), move |core| {
            let model = core.model()?;
            check_tokens("tokens", request.tokens.iter().copied(), model.vocab_size)
                .map_err(CoreError::from)?;
            Ok(Detokenized { prompt: model.tokenizer.decode(&request.tokens, false) })
        })
        .await?;
    Ok(json(&detokenized))
}
