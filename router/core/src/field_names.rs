//! The fields of requests in the words of their API, for errors.

use baton_request::{InvalidRequest, Problem};

use super::{ContextOverflow, CoreError};

/// What a client calls those fields of a [`Request`](baton_request::Request) that have other names in some APIs.
#[derive(Clone, Copy, Debug)]
pub struct FieldNames {
    /// The prompt.
    pub prompt: &'static str,
    /// Text at which generation ends.
    pub stop: &'static str,
    /// Most tokens to generate.
    pub max_tokens: &'static str,
    /// Log-probabilities of tokens.
    pub logprobs: &'static str,
    /// Log-probabilities of the prompt's tokens.
    pub prompt_logprobs: &'static str,
    /// Within a tool, the schema of its arguments.
    pub tool_schema: &'static str,
}

/// The names that most APIs have.
impl Default for FieldNames {
    fn default() -> FieldNames {
        FieldNames {
            prompt: "prompt",
            stop: "stop",
            max_tokens: "max_tokens",
            logprobs: "logprobs",
            prompt_logprobs: "prompt_logprobs",
            tool_schema: "function.parameters",
        }
    }
}

impl FieldNames {
    fn of(&self, field: &'static str) -> &'static str {
        match field {
            "prompt" => self.prompt,
            "max_tokens" => self.max_tokens,
            "logprobs" => self.logprobs,
            "prompt_logprobs" => self.prompt_logprobs,
            "blend.ratio" => "blend",
            "blend.passages" => "passages",
            field => field,
        }
    }

    /// The one validation's error, in the client's words.
    pub(crate) fn refusal(&self, error: InvalidRequest) -> CoreError {
        let param = self.of(error.field);
        match error.problem {
            Problem::ContextFull { num_tokens, context_length } => {
                let message = format!(
                    "this model's maximum context length is {context_length} tokens, but the prompt has \
                     {num_tokens}; shorten it to at most {}",
                    context_length.saturating_sub(1)
                );
                CoreError::too_long(param, message, ContextOverflow::new(num_tokens, None, context_length))
            }
            problem => CoreError::invalid(param, format!("{param}: {problem}")),
        }
    }
}
