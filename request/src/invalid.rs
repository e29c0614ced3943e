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
    /// A grammar alone decides where the output may end.
    #[error("cannot be combined with a grammar, which decides where the output may end")]
    WithGrammar,
    /// The text of a grammar is too long.
    #[error("{num_bytes} bytes; at most {max_bytes} are possible")]
    TooLong {
        /// Bytes of the text.
        num_bytes: usize,
        /// The limit.
        max_bytes: usize,
    },
    /// Another worker computes the prompt, and keeps its logits to itself.
    #[error("the worker that generates the answer must compute the prompt (prefill_mode: auto or local)")]
    PromptElsewhere,
    /// A passage without tokens.
    #[error("the passage from {start_idx} to {end_idx} has no tokens")]
    EmptyPassage {
        /// Its first position.
        start_idx: usize,
        /// The position after its last one.
        end_idx: usize,
    },
    /// There are too many passages.
    #[error("{num} passages in a prompt of {num_tokens} tokens, which may have {max}")]
    TooManyPassages {
        /// So many.
        num: usize,
        /// So many may be.
        max: usize,
        /// Tokens of the prompt.
        num_tokens: usize,
    },
    /// Passages overlap or are not in order.
    #[error("a passage begins at {start_idx}, and the one before it ends at {before_idx}")]
    PassageOverlap {
        /// The first position of a passage.
        start_idx: usize,
        /// The position after the passage before it.
        before_idx: usize,
    },
    /// No token of the prompt follows a passage.
    #[error(
        "a passage ends at {end_idx} in a prompt of {num_tokens} tokens, whose last token must follow it"
    )]
    PassageTooLate {
        /// The position after the passage.
        end_idx: usize,
        /// Tokens of the prompt.
        num_tokens: usize,
    },
    /// A grammar that cannot be compiled, or a model without what grammars need.
    #[error("{reason}")]
    Grammar {
        /// Why.
        reason: String,
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
