//! Why a grammar cannot be used.

use std::time::Duration;

use baton_request::GrammarKind;

use crate::watch::GrammarTime;

/// Characters of a reason that are kept.
const MAX_REASON_CHARS: usize = 400;

/// Why a grammar cannot be used, or does not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The text is no grammar of its kind, or uses what is not supported.
    #[error("the {} cannot be compiled: {reason}", kind.name())]
    Invalid {
        /// Its kind.
        kind: GrammarKind,
        /// What is wrong with it.
        reason: String,
    },
    /// Compiling it took longer than it may.
    #[error("the {} is too complex: compiling it takes longer than {limit:?}", kind.name())]
    TooSlow {
        /// Its kind.
        kind: GrammarKind,
        /// The limit.
        limit: Duration,
    },
    /// Too many others are being compiled, or are waited for. Try again.
    #[error("too many grammars wait to be compiled: at most {max_compiling} are compiled at a time")]
    Busy {
        /// Grammars that are compiled at a time.
        max_compiling: usize,
    },
    /// The vocabulary cannot be constrained.
    #[error("this model's output cannot be constrained: {reason}")]
    Vocabulary {
        /// Why.
        reason: String,
    },
    /// A token was sampled that the grammar does not allow.
    #[error("token {token} does not follow in the grammar")]
    Refused {
        /// Its id.
        token: u32,
    },
    /// Computing the next tokens needs more than it may.
    #[error("the grammar became too complex: {reason}")]
    Exhausted {
        /// What was used up.
        reason: String,
    },
    /// Computing the next tokens took longer than it may.
    #[error(
        "the grammar takes longer than {:?} and {:?} for each token of the output: make it less ambiguous",
        time.ahead, time.per_token
    )]
    OutOfTime {
        /// The limit.
        time: GrammarTime,
    },
}

impl GrammarError {
    /// The vocabulary cannot be constrained, because of `reason`.
    pub fn vocabulary(reason: impl Into<String>) -> GrammarError {
        GrammarError::Vocabulary { reason: reason.into() }
    }

    pub(crate) fn invalid(kind: GrammarKind, reason: impl AsRef<str>) -> GrammarError {
        GrammarError::Invalid { kind, reason: shortened(reason.as_ref()) }
    }

    pub(crate) fn exhausted(reason: impl AsRef<str>) -> GrammarError {
        GrammarError::Exhausted { reason: shortened(reason.as_ref()) }
    }
}

/// Without the backtrace of a caught panic, and not longer than a message may be.
fn shortened(reason: &str) -> String {
    let reason = reason.split("<backtrace>").next().unwrap_or(reason);
    let words: Vec<&str> = reason.split_whitespace().collect();
    words.join(" ").chars().take(MAX_REASON_CHARS).collect()
}
