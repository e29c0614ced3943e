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

impl CoreError {
    /// A word for traces.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            CoreError::Invalid { .. } => "invalid",
            CoreError::NotFound { .. } => "not_found",
            CoreError::Duplicate { .. } => "duplicate",
            CoreError::Full { .. } => "full",
            CoreError::Unavailable { .. } => "unavailable",
            CoreError::Internal { .. } => "internal",
        }
    }

    /// The field `param` is wrong.
    pub fn invalid(param: &str, message: impl Into<String>) -> CoreError {
        CoreError::Invalid { message: message.into(), param: Some(param.to_owned()), code: None }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> CoreError {
        CoreError::Unavailable { message: message.into() }
    }

    /// The sequence would be longer than any worker's context.
    pub(crate) fn too_long(param: Option<&str>, message: String) -> CoreError {
        CoreError::Invalid { message, param: param.map(str::to_owned), code: Some("context_length_exceeded") }
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
            NoPlan::DecodeTooSmall { .. } => CoreError::too_long(None, no_plan.to_string()),
            _ => CoreError::unavailable(no_plan.to_string()),
        }
    }
}
