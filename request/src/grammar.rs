//! What the output of a request must match, as text. What the text means is `baton-grammar`'s.

use std::sync::Arc;

/// Most bytes of a grammar's text.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;

/// A description of all texts that a sequence may produce.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Grammar {
    /// The language of `text`.
    pub kind: GrammarKind,
    /// At most [`MAX_GRAMMAR_BYTES`]. Shared: choices and attempts hold the same text.
    pub text: Arc<str>,
}

/// The language in which a grammar is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GrammarKind {
    /// A JSON schema, as JSON. The output is a JSON value that is valid under it.
    JsonSchema,
    /// A regular expression, which the whole output matches.
    Regex,
    /// A JSON array of strings. The output is one of them.
    Choice,
    /// A context-free grammar in the Lark syntax of llguidance, with the rule `start`.
    Lark,
}

impl Grammar {
    /// A grammar of this kind.
    pub fn new(kind: GrammarKind, text: impl Into<Arc<str>>) -> Grammar {
        Grammar { kind, text: text.into() }
    }

    /// Whether the text has more than [`MAX_GRAMMAR_BYTES`].
    pub fn is_too_long(&self) -> bool {
        self.text.len() > MAX_GRAMMAR_BYTES
    }
}

impl GrammarKind {
    /// The name in errors and logs.
    pub fn name(self) -> &'static str {
        match self {
            GrammarKind::JsonSchema => "JSON schema",
            GrammarKind::Regex => "regular expression",
            GrammarKind::Choice => "choice",
            GrammarKind::Lark => "grammar",
        }
    }
}
