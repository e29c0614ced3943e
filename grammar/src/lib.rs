//! Structured output: grammars, compiled against a model's vocabulary, and the tokens that they allow next.
//!
//! A thin crate over `llguidance`. [`Vocabulary`] is what it must know of a tokenizer: the bytes of each token.
//! [`GrammarCompiler`] compiles a [`Grammar`](baton_request::Grammar), bounded in time, memory and number, and keeps
//! what it compiled. [`TokenMatcher`] follows one sequence: a [`TokenMask`] of the tokens that may come next, then the
//! token that was sampled.
//!
//! It knows neither requests nor sampling nor HTTP.
#![forbid(unsafe_code)]

mod compiler;
mod mask_thread;
mod matcher;
mod vocabulary;

mod cache;
mod compilations;
mod error;
mod limits;
mod source;
mod watch;

pub use compiler::GrammarCompiler;
pub use error::GrammarError;
pub use limits::GrammarLimits;
pub use mask_thread::{MASK_STACK_BYTES, MaskThread, Masked, NoMasks};
pub use matcher::{TokenMask, TokenMatcher};
pub use vocabulary::{TextEncoder, Vocabulary, VocabularyToken};
pub use watch::GrammarTime;
