//! What can go wrong while loading and encoding. Templates have their own
//! [`TemplateError`](crate::TemplateError).

use std::path::PathBuf;

/// A tokenizer could not be loaded, or refused a text.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file is missing or unreadable.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{} is not valid: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The text cannot be tokenised exactly: the caller should reject it.
    #[error("the text cannot be tokenised: {0}")]
    Encode(String),
}
