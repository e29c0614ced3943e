//! From what a client asks to a [`PreparedRequest`]: templated, tokenised, validated.

use std::time::Instant;

use baton_planner::PrefillMode;
use baton_proto::v1::KvWire;
use baton_request::{InvalidRequest, Problem, Request, SpeculationMode};
use baton_tokenizer::{TemplateError, TokenizerError};
use serde_json::{Map, Value};

use super::{ClientSampling, CoreError};
use crate::{model::Model, workers::Contexts};

const MAX_STOPS: usize = 16;
const MAX_ID_CHARS: usize = 128;

/// A request as a client wrote it, in the words of no API.
#[derive(Debug)]
pub(crate) struct ClientRequest {
    /// Chosen by the client or by the edge.
    pub(crate) id: String,
    /// For metrics: which endpoint.
    pub(crate) endpoint: &'static str,
    /// Empty: the one that is served.
    pub(crate) model: String,
    pub(crate) prompts: Vec<PromptInput>,
    pub(crate) n: u32,
    pub(crate) stop: Vec<String>,
    pub(crate) sampling: ClientSampling,
    pub(crate) cache_salt: String,
    pub(crate) prefill: PrefillMode,
    pub(crate) speculation: SpeculationMode,
    pub(crate) kv_wire: KvWire,
    /// What this API calls the fields, for errors.
    pub(crate) names: FieldNames,
    /// When the request arrived.
    pub(crate) started: Instant,
}

/// What a client calls those fields of a [`Request`] that have other names in some APIs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldNames {
    pub(crate) prompt: &'static str,
    pub(crate) max_tokens: &'static str,
    pub(crate) logprobs: &'static str,
}

/// One prompt, in whichever form.
#[derive(Debug)]
pub(crate) enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
    Chat(ChatInput),
}

/// A conversation for the chat template.
#[derive(Debug)]
pub(crate) struct ChatInput {
    /// An array of OpenAI-shaped messages.
    pub(crate) messages: Value,
    pub(crate) tools: Option<Value>,
    /// Further variables of the template.
    pub(crate) extra: Map<String, Value>,
}

/// A request that can be served: it is complete, and every value in it is possible.
#[derive(Debug)]
pub(crate) struct PreparedRequest {
    pub(crate) id: String,
    pub(crate) endpoint: &'static str,
    /// One for each prompt, as its first choice has it; choice `i` of a prompt has `seed + i`. Choices share the tokens.
    pub(crate) prompts: Vec<Request>,
    /// Choices per prompt.
    pub(crate) n: u32,
    pub(crate) stop: Vec<String>,
    pub(crate) prefill: PrefillMode,
    pub(crate) kv_wire: KvWire,
    pub(crate) started: Instant,
}

impl FieldNames {
    fn of(&self, field: &'static str) -> &'static str {
        match field {
            "prompt" => self.prompt,
            "max_tokens" => self.max_tokens,
            "logprobs" => self.logprobs,
            field => field,
        }
    }

    /// The one validation's error, in the client's words.
    fn refusal(&self, error: InvalidRequest) -> CoreError {
        let param = self.of(error.field);
        match error.problem {
            Problem::ContextFull { num_tokens, context_length } => {
                let message = format!(
                    "this model's maximum context length is {context_length} tokens, but the prompt has \
                     {num_tokens}; shorten it to at most {}",
                    context_length.saturating_sub(1)
                );
                CoreError::too_long(Some(param), message)
            }
            problem => CoreError::invalid(param, format!("{param}: {problem}")),
        }
    }
}

impl ClientRequest {
    /// About how much text must be worked through.
    pub(crate) fn num_bytes(&self) -> usize {
        let bytes = |prompt: &PromptInput| match prompt {
            PromptInput::Text(text) => text.len(),
            PromptInput::Tokens(tokens) => tokens.len() / 16,
            PromptInput::Chat(chat) => {
                value_bytes(&chat.messages) + chat.tools.as_ref().map_or(0, value_bytes)
            }
        };
        self.prompts.iter().map(bytes).sum()
    }

    /// Applies the chat template, tokenises, fills in defaults, validates. Takes time with the length of the prompt.
    pub(crate) fn prepare(
        self,
        model: &Model,
        contexts: Contexts,
        max_choices: usize,
    ) -> Result<PreparedRequest, CoreError> {
        let names = self.names;
        check_model(model, &self.model)?;
        if self.id.chars().count() > MAX_ID_CHARS {
            let message = format!("request_id has more than {MAX_ID_CHARS} characters");
            return Err(CoreError::invalid("request_id", message));
        }
        if self.prompts.is_empty() {
            return Err(CoreError::invalid(names.prompt, format!("{} is empty", names.prompt)));
        }
        let num_choices = self.prompts.len().saturating_mul(self.n as usize);
        if num_choices > max_choices {
            let message = format!("{num_choices} choices were requested, at most {max_choices} are possible");
            return Err(CoreError::invalid("n", message));
        }
        if self.stop.len() > MAX_STOPS {
            let message = format!("stop has {} strings, at most {MAX_STOPS} are possible", self.stop.len());
            return Err(CoreError::invalid("stop", message));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(CoreError::invalid("stop", "stop must not contain an empty string"));
        }
        let sampling = self.sampling.with_defaults(model);
        // Again with each prompt; but a wrong number is not worth tokenising for.
        sampling.validate(model.vocab_size).map_err(|error| names.refusal(error))?;
        // Rounding stays in the cache: a request for one form must find no other.
        let cache_salt = match self.kv_wire {
            KvWire::Unspecified => self.cache_salt,
            form => format!("{}\0{}", self.cache_salt, form.as_str_name()),
        };
        let mut prompts = Vec::with_capacity(self.prompts.len());
        for prompt in self.prompts {
            let mut request = Request {
                id: self.id.clone(),
                prompt: tokenize(model, prompt, names.prompt, true)?.into(),
                output: Vec::new(),
                sampling: sampling.clone(),
                cache_salt: cache_salt.clone(),
                speculation: self.speculation,
            };
            request.sampling.max_tokens =
                self.sampling.max_tokens(model, request.prompt.len(), contexts, names.max_tokens)?;
            request.validate(model.vocab_size, contexts.longest).map_err(|error| names.refusal(error))?;
            prompts.push(request);
        }
        Ok(PreparedRequest {
            id: self.id,
            endpoint: self.endpoint,
            prompts,
            n: self.n,
            stop: self.stop,
            prefill: self.prefill,
            kv_wire: self.kv_wire,
            started: self.started,
        })
    }
}

/// Refuses another model's name; an empty one is the model that is served.
pub(crate) fn check_model(model: &Model, name: &str) -> Result<(), CoreError> {
    if name.is_empty() || name == model.name {
        return Ok(());
    }
    Err(CoreError::NotFound {
        message: format!("the model {name:?} does not exist; this server has {:?}", model.name),
        param: Some("model".to_owned()),
        code: Some("model_not_found"),
    })
}

/// The token ids of a prompt. `add_special` applies to bare text only: chat templates write their own.
pub(crate) fn tokenize(
    model: &Model,
    prompt: PromptInput,
    param: &str,
    add_special: bool,
) -> Result<Vec<u32>, CoreError> {
    let refused = |error: TokenizerError| CoreError::invalid(param, error.to_string());
    match prompt {
        PromptInput::Tokens(tokens) => Ok(tokens),
        PromptInput::Text(text) => model.tokenizer.encode(&text, add_special).map_err(refused),
        PromptInput::Chat(chat) => {
            let prompt = model
                .tokenizer
                .chat_prompt(&chat.messages, chat.tools.as_ref(), &chat.extra)
                .map_err(|error: TemplateError| CoreError::invalid(param, error.to_string()))?;
            model.tokenizer.encode(&prompt, false).map_err(refused)
        }
    }
}

fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(fields) => fields.values().map(value_bytes).sum(),
        _ => 8,
    }
}
