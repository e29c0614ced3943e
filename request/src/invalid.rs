//! Why a request is invalid: the field and the problem.

/// A request that no engine of this model serves. The field's name is that of OpenAI's `param` and of the field in
/// gRPC messages.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidRequest {
    /// The first bad field.
    pub field: &'static str,
    /// Its problem.
    pub problem: Problem,
}

/// The problem of a field.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Problem {
    /// A prompt without tokens.
    #[error("has no tokens")]
    Empty,
    /// A token id that the model does not have.
    #[error("token id {token} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Ids are below this.
        vocab_size: usize,
    },
    /// The context has no room for one more token.
    #[error("{num_tokens} tokens leave no room in a context of {context_length}")]
    ContextFull {
        /// Tokens of prompt and delivered output.
        num_tokens: usize,
        /// Tokens of the longest sequence, prompt and output together.
        context_length: usize,
    },
    /// A number outside its range.
    #[error("{value} is not {expected}")]
    OutOfRange {
        /// The number.
        value: f64,
        /// Its range.
        expected: &'static str,
    },
    /// `min_tokens` is larger than `max_tokens`.
    #[error("{min_tokens} exceeds max_tokens, which is {max_tokens}")]
    ExceedsMaxTokens {
        /// Tokens before which the sequence may not end.
        min_tokens: u32,
        /// Tokens after which it ends.
        max_tokens: u32,
    },
    /// Earlier attempts have delivered every output token.
    #[error("{num_output_tokens} tokens are delivered of max_tokens {max_tokens}")]
    NothingLeft {
        /// Tokens that earlier attempts delivered.
        num_output_tokens: usize,
        /// The limit.
        max_tokens: u32,
    },
    /// Every token ends the sequence, and it may not end before `min_tokens`.
    #[error("all of the vocabulary of {vocab_size}, so no token may follow before min_tokens")]
    NothingAllowed {
        /// Tokens of the model.
        vocab_size: usize,
    },
}

impl InvalidRequest {
    /// This field has this problem.
    pub fn new(field: &'static str, problem: Problem) -> InvalidRequest {
        InvalidRequest { field, problem }
    }
}

/// Checks that the model has every one of these tokens.
///
/// # Errors
/// Names the first token that the model does not have.
pub fn check_tokens(
    field: &'static str,
    tokens: impl IntoIterator<Item = u32>,
    vocab_size: usize,
) -> Result<(), InvalidRequest> {
    match tokens.into_iter().find(|&token| token as usize >= vocab_size) {
        Some(token) => Err(InvalidRequest::new(field, Problem::UnknownToken { token, vocab_size })),
        None => Ok(()),
    }
}
