//! Why a request's response format or tools are refused.

/// A field that cannot be honoured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{param}: {message}")]
pub struct OutputRefusal {
    /// The field, with the path inside it.
    pub param: String,
    /// What is wrong.
    pub message: String,
}

impl OutputRefusal {
    pub(crate) fn new(param: impl Into<String>, message: impl Into<String>) -> OutputRefusal {
        OutputRefusal { param: param.into(), message: message.into() }
    }
}
