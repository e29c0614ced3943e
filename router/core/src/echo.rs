//! Prompts that answers begin with. It does not know how answers are written.

use std::sync::Arc;

use baton_request::Request;
use baton_tokenizer::Tokenizer;

use super::{CoreError, limits};

/// Whether an answer begins with its prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Echo {
    /// It is what was generated.
    #[default]
    Off,
    /// What was generated follows the prompt.
    Before,
    /// It is the prompt alone. Workers generate at least a token, which is left out.
    Alone,
}

/// What the answers to these prompts begin with: what is `known`, else the text of the tokens.
///
/// # Errors
/// When all choices together have too much of it.
pub(crate) fn texts(
    known: Vec<Option<Arc<str>>>,
    prompts: &[Request],
    n: u32,
    tokenizer: &Tokenizer,
) -> Result<Vec<Arc<str>>, CoreError> {
    let mut num_bytes = 0;
    let text = |(known, request): (Option<Arc<str>>, &Request)| -> Result<Arc<str>, CoreError> {
        let text = known.unwrap_or_else(|| tokenizer.decode(&request.prompt, true).into());
        num_bytes += text.len() * n as usize;
        // After each prompt: the text of many tokens is much longer than their ids.
        limits::check_echo(num_bytes)?;
        Ok(text)
    };
    known.into_iter().zip(prompts).map(text).collect()
}
