//! From what a client asks to a [`Generation`]: validated, templated, tokenised.

use std::time::Instant;

use baton_proto::{
    v1::{KvWire, SpeculationMode},
    worker::Sampling,
};
use baton_tokenizer::{TemplateError, TokenizerError};
use serde_json::{Map, Value};

use super::{CoreError, SamplingInput, sampling::check_token};
use crate::{model::Model, plan::PrefillMode, workers::Contexts};

const MAX_STOPS: usize = 16;
const MAX_ID_CHARS: usize = 128;

/// A request as an edge hands it in.
#[derive(Debug)]
pub(crate) struct GenerationInput {
    /// Chosen by the client or by the edge.
    pub(crate) id: String,
    /// For metrics: which endpoint.
    pub(crate) endpoint: &'static str,
    /// Empty: the one that is served.
    pub(crate) model: String,
    pub(crate) prompts: Vec<PromptInput>,
    /// What the client calls its prompt, for errors.
    pub(crate) prompt_param: &'static str,
    pub(crate) n: u32,
    pub(crate) stop: Vec<String>,
    pub(crate) sampling: SamplingInput,
    pub(crate) cache_salt: String,
    pub(crate) prefill: PrefillMode,
    pub(crate) speculation: SpeculationMode,
    pub(crate) kv_wire: KvWire,
    /// When the request arrived.
    pub(crate) started: Instant,
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

/// A request that can be served: nothing in it is missing or wrong.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) id: String,
    pub(crate) endpoint: &'static str,
    pub(crate) prompts: Vec<Prompt>,
    /// Choices per prompt.
    pub(crate) n: u32,
    pub(crate) stop: Vec<String>,
    /// Of the first choice; choice `i` of a prompt has `seed + i`, and the prompt's `max_tokens`.
    pub(crate) sampling: Sampling,
    pub(crate) cache_salt: String,
    pub(crate) prefill: PrefillMode,
    pub(crate) speculation: SpeculationMode,
    pub(crate) kv_wire: KvWire,
    pub(crate) started: Instant,
}

/// A tokenised prompt.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) max_tokens: u32,
}

impl GenerationInput {
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

    /// Validates, applies the chat template, tokenises. Takes time with the length of the prompt.
    pub(crate) fn prepare(
        self,
        model: &Model,
        contexts: Contexts,
        max_choices: usize,
    ) -> Result<Generation, CoreError> {
        check_model(model, &self.model)?;
        if self.id.chars().count() > MAX_ID_CHARS {
            let message = format!("request_id has more than {MAX_ID_CHARS} characters");
            return Err(CoreError::invalid("request_id", message));
        }
        if self.prompts.is_empty() {
            return Err(CoreError::invalid(self.prompt_param, format!("{} is empty", self.prompt_param)));
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
        let sampling = self.sampling.resolve(model)?;
        let mut prompts = Vec::with_capacity(self.prompts.len());
        for prompt in self.prompts {
            let tokens = tokenize(model, prompt, self.prompt_param, true)?;
            if tokens.is_empty() {
                let message = format!("{} has no tokens", self.prompt_param);
                return Err(CoreError::invalid(self.prompt_param, message));
            }
            let max_tokens =
                self.sampling.max_tokens(model, tokens.len(), contexts).map_err(|error| match error {
                    CoreError::Invalid { message, param, code } if param.as_deref() == Some("prompt") => {
                        CoreError::Invalid { message, param: Some(self.prompt_param.to_owned()), code }
                    }
                    other => other,
                })?;
            prompts.push(Prompt { tokens, max_tokens });
        }
        // Rounding stays in the cache: who asks for a form shall find no other, nor be found by others.
        let cache_salt = match self.kv_wire {
            KvWire::Unspecified => self.cache_salt,
            form => format!("{}\0{}", self.cache_salt, form.as_str_name()),
        };
        Ok(Generation {
            id: self.id,
            endpoint: self.endpoint,
            prompts,
            n: self.n,
            stop: self.stop,
            sampling,
            cache_salt,
            prefill: self.prefill,
            speculation: self.speculation,
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
        PromptInput::Tokens(tokens) => {
            tokens.iter().try_for_each(|id| check_token(model, param, *id))?;
            Ok(tokens)
        }
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
