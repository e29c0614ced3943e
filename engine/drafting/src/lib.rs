//! Drafts of a sequence: [how many tokens](DraftLength), by what was accepted and what steps cost, and [which](ngram), by
//! look-up of its own text. Pure: it knows no batch, no model and no clock.

#![forbid(unsafe_code)]

pub mod length;
pub mod ngram;

pub use length::DraftLength;
