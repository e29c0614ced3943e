//! Speculative decoding: what drafts tokens, and how many.
//!
//! - [`policy`]: how many tokens to draft, from what was accepted;
//! - [`ngram`]: proposes what followed the same few tokens before.

pub mod ngram;
pub mod policy;
