//! The grammars of requests to a worker. They are compiled against the tokenizer beside the model's weights, which is
//! loaded for the first grammar, and never on the async runtime.

use std::{path::Path, sync::Arc};

use baton_grammar::{GrammarCompiler, GrammarError, GrammarLimits, Vocabulary, VocabularyToken};
use baton_request::{Failure, FailureKind, Request};
use baton_tokenizer::{GenerationDefaults, Tokenizer, TokenizerError};

use crate::{convert::submit_failure, worker::Worker};

/// A compiler for the tokenizer of `model`, a directory or a GGUF file.
pub(crate) fn compiler(model: &Path) -> Arc<GrammarCompiler> {
    let model = model.to_owned();
    let load = move || load(&model).map_err(|error| GrammarError::vocabulary(error.to_string()))?;
    Arc::new(GrammarCompiler::new(load, GrammarLimits::default()))
}

fn load(model: &Path) -> Result<Result<Vocabulary, GrammarError>, TokenizerError> {
    let tokenizer = Tokenizer::load(model)?;
    let ends = GenerationDefaults::load(model)?.eos_token_ids;
    let Some(tokens) = tokenizer.all_token_bytes() else {
        return Ok(Err(GrammarError::vocabulary("a text is not its tokens' bytes in a row")));
    };
    let tokens = tokens.map(|(bytes, is_special)| VocabularyToken { bytes, is_special });
    let encoder = tokenizer.clone();
    let encode = move |text: &str| encoder.encode(text, false).unwrap_or_default();
    Ok(Vocabulary::new(tokens, &ends, Box::new(encode)))
}

impl Worker {
    /// Compiles the request's grammar, if it has one, so that the engine finds it compiled.
    ///
    /// # Errors
    /// When the grammar cannot be used.
    pub async fn prepare_grammar(&self, request: &Request) -> Result<(), Failure> {
        if request.sampling.grammar.is_none() {
            return Ok(());
        }
        let (engine, request) = (self.engine().clone(), request.clone());
        match tokio::task::spawn_blocking(move || engine.matcher(&request)).await {
            Ok(compiled) => compiled.map(drop).map_err(|error| submit_failure(&error.into())),
            Err(error) => Err(Failure::new(FailureKind::Internal, format!("compiling a grammar: {error}"))),
        }
    }
}
