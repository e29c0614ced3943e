//! Text to token ids and back: tokenizer, chat template, incremental detokenising.
//!
//! Everything is read from a Hugging Face model directory or a GGUF file, once, at start. The crate
//! knows no model, no requests and no network.
#![forbid(unsafe_code)]

mod tokenizer;

mod chat_template;
mod template_functions;
mod template_methods;

mod detokenizer;
mod text_offsets;
mod vocabulary;

mod error;
mod files;
mod generation_defaults;
mod gguf;
mod load;
mod pieces;
mod post_processor;
mod splitter;

pub use chat_template::{ChatTemplate, TemplateError};
pub use detokenizer::Detokenizer;
pub use error::TokenizerError;
pub use generation_defaults::GenerationDefaults;
pub use text_offsets::TextOffsets;
pub use tokenizer::Tokenizer;

#[cfg(test)]
mod testing;
