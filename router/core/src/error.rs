//! Why a request gets no answer, named for what the caller can do about it.

use std::time::Duration;

use baton_planner::{GiveUp, NoPlan};
use baton_request::InvalidRequest;

/// One error for both edges, HTTP and gRPC.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CoreError {
    /// The request is wrong: change it.
    #[error("{message}")]
    Invalid {
        /// What is wrong, for the client.
        message: String,
        /// The field at fault.
        param: Option<String>,
        /// OpenAI's code of this error, if it has one.
        code: Option<&'static str>,
    },
    /// The sequence would be longer than any worker's context: shorten the prompt, or ask for fewer tokens.
    #[error("{message}")]
    TooLong {
        /// What is too long, for the client.
        message: String,
        /// The field at fault.
        param: Option<String>,
        /// By how much, where that is known.
        overflow: Option<ContextOverflow>,
    },
    /// No such model, or other thing that was named.
    #[error("{message}")]
    NotFound {
        /// What was not found, for the client.
        message: String,
        /// The field that names it.
        param: Option<String>,
        /// OpenAI's code of this error, if it has one.
        code: Option<&'static str>,
    },
    /// A request of this id runs already: choose another.
    #[error("a request with the id {id:?} is running already")]
    Duplicate {
        /// The id.
        id: String,
    },
    /// A durable stream of this id waits for its client: resume or abort it, or choose another id.
    #[error("the stream of a request with the id {id:?} is parked: resume it or abort it")]
    Parked {
        /// The id, as the client chose it.
        id: String,
    },
    /// Another connection has the stream now. Its client would only take the stream back from that one.
    #[error("the stream goes on in another connection, which has resumed it")]
    Replaced,
    /// No room: come again.
    #[error("{message}")]
    Full {
        /// What is full, for the client.
        message: String,
        /// When to come again.
        retry_after: Duration,
    },
    /// No worker can serve it now: come again later.
    #[error("{message}")]
    Unavailable {
        /// What is missing, for the client.
        message: String,
    },
    /// Something broke here.
    #[error("{message}")]
    Internal {
        /// What broke.
        message: String,
    },
}

/// A sequence and the context that has no room for it. Counts above 2^32 are the greatest ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextOverflow {
    /// Tokens of the prompt.
    pub num_prompt: u32,
    /// Tokens of the answer; `None`: the prompt alone leaves no room.
    pub max_tokens: Option<u32>,
    /// Tokens of the context.
    pub context: u32,
}

impl ContextOverflow {
    pub(crate) fn new(num_prompt: usize, max_tokens: Option<u32>, context: usize) -> ContextOverflow {
        let tokens = |num: usize| u32::try_from(num).unwrap_or(u32::MAX);
        ContextOverflow { num_prompt: tokens(num_prompt), max_tokens, context: tokens(context) }
    }
}

impl CoreError {
    /// A word for traces.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            CoreError::Invalid { .. } | CoreError::TooLong { .. } => "invalid",
            CoreError::NotFound { .. } => "not_found",
            CoreError::Duplicate { .. } => "duplicate",
            CoreError::Parked { .. } => "parked",
            CoreError::Replaced => "replaced",
            CoreError::Full { .. } => "full",
            CoreError::Unavailable { .. } => "unavailable",
            CoreError::Internal { .. } => "internal",
        }
    }

    /// Whether the server failed: of a client's mistake its span has no failure, by OpenTelemetry's conventions.
    pub fn is_server_fault(&self) -> bool {
        matches!(self, CoreError::Unavailable { .. } | CoreError::Internal { .. })
    }

    /// When to come again, where that helps.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            CoreError::Full { retry_after, .. } => Some(*retry_after),
            CoreError::Unavailable { .. } => Some(Duration::from_secs(1)),
            _ => None,
        }
    }

    /// The field `param` is wrong.
    pub fn invalid(param: &str, message: impl Into<String>) -> CoreError {
        CoreError::Invalid { message: message.into(), param: Some(param.to_owned()), code: None }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> CoreError {
        CoreError::Unavailable { message: message.into() }
    }

    pub(crate) fn too_long(param: &str, message: String, overflow: ContextOverflow) -> CoreError {
        CoreError::TooLong { message, param: Some(param.to_owned()), overflow: Some(overflow) }
    }

    pub(crate) fn internal(message: impl Into<String>) -> CoreError {
        CoreError::Internal { message: message.into() }
    }

    pub(crate) fn full(message: impl Into<String>) -> CoreError {
        CoreError::Full { message: message.into(), retry_after: Duration::from_secs(1) }
    }
}

impl From<InvalidRequest> for CoreError {
    fn from(error: InvalidRequest) -> CoreError {
        CoreError::invalid(error.field, error.to_string())
    }
}

impl From<GiveUp> for CoreError {
    fn from(give_up: GiveUp) -> CoreError {
        let message = give_up.to_string();
        match &give_up {
            GiveUp::Invalid(_) => CoreError::Invalid { message, param: None, code: None },
            GiveUp::Full(_) => CoreError::full(message),
            GiveUp::Model(_) => CoreError::internal(message),
            GiveUp::Failed { .. } => CoreError::unavailable(message),
            GiveUp::NoPlan(no_plan) => no_plan.into(),
        }
    }
}

impl From<&NoPlan> for CoreError {
    fn from(no_plan: &NoPlan) -> CoreError {
        match no_plan {
            NoPlan::DecodeTooSmall { .. } => {
                CoreError::TooLong { message: no_plan.to_string(), param: None, overflow: None }
            }
            _ => CoreError::unavailable(no_plan.to_string()),
        }
    }
}
