//! The grammars of requests to a worker. They are compiled against the tokenizer beside the model's weights, which is
//! loaded for the first grammar, and never on the async runtime.

use std::{path::Path, sync::Arc};

use baton_engine::Submission;
use baton_grammar::{GrammarCompiler, GrammarError, GrammarLimits, Vocabulary, VocabularyToken};
use baton_request::{Failure, FailureKind, Request};
use baton_tokenizer::{GenerationDefaults, Tokenizer, TokenizerError};
use baton_worker_messages::submit_failure;

use crate::worker::Worker;

/// A compiler for the tokenizer of `model`, a directory or a GGUF file, which computes logits of so many tokens: a tokenizer may know
/// more.
pub(crate) fn compiler(model: &Path, vocab_size: usize) -> Arc<GrammarCompiler> {
    let model = model.to_owned();
    let load =
        move || load(&model, vocab_size).map_err(|error| GrammarError::vocabulary(error.to_string()))?;
    Arc::new(GrammarCompiler::new(load, GrammarLimits::default()))
}

fn load(model: &Path, vocab_size: usize) -> Result<Result<Vocabulary, GrammarError>, TokenizerError> {
    let tokenizer = Tokenizer::load(model)?;
    let ends = GenerationDefaults::load(model)?.with_end_of(&tokenizer, vocab_size).eos_token_ids;
    let Some(tokens) = tokenizer.all_token_bytes() else {
        return Ok(Err(GrammarError::vocabulary("a text is not its tokens' bytes in a row")));
    };
    let tokens = tokens.take(vocab_size).map(|(bytes, is_special)| VocabularyToken { bytes, is_special });
    let encoder = tokenizer.clone();
    let encode = move |text: &str| encoder.encode(text, false).unwrap_or_default();
    Ok(Vocabulary::new(tokens, &ends, Box::new(encode)))
}

impl Worker {
    /// Compiles the request's grammar, if it has one, and goes through the request's output with it, so that the engine need not.
    ///
    /// # Errors
    /// When the grammar cannot be used.
    pub async fn prepare_grammar(&self, request: Request) -> Result<Submission, Failure> {
        if request.sampling.grammar.is_none() {
            return Ok(request.into());
        }
        let engine = self.engine().clone();
        match tokio::task::spawn_blocking(move || engine.prepare(request)).await {
            Ok(prepared) => prepared.map_err(|error| submit_failure(&error.into())),
            Err(error) => Err(Failure::new(FailureKind::Internal, format!("compiling a grammar: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use baton_request::{Grammar, GrammarKind};

    use super::*;

    fn tiny() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny")
    }

    #[test]
    fn no_token_is_forced_that_the_model_lacks() {
        let model = tiny();
        let grammar = Grammar::new(GrammarKind::Regex, "The old house keeps a letter for the gardener");
        let forced =
            |vocab_size| compiler(&model, vocab_size).matcher(&grammar, &[]).expect("it compiles").forced(64);
        let all = forced(usize::MAX);
        let last = all.iter().max().expect("some are forced");
        let few = forced(*last as usize);
        assert!(!few.is_empty() && few.iter().all(|token| token < last), "{few:?} of {all:?}");
        assert_eq!(few, all[..few.len()]);
    }

    #[test]
    fn an_end_that_the_tokenizer_calls_ordinary_is_no_text() {
        let (tiny, dir) = (tiny(), tempfile::tempdir().unwrap());
        let file = std::fs::read(tiny.join("tokenizer.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&file).unwrap();
        for token in json["added_tokens"].as_array_mut().unwrap() {
            token["special"] = false.into();
        }
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let name = "tokenizer_config.json";
        std::fs::copy(tiny.join(name), dir.path().join(name)).unwrap();
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let (quote, end) = (tokenizer.encode("\"", false).unwrap(), tokenizer.special_token_id("eos_token"));
        let grammar = Grammar::new(GrammarKind::Regex, r#""[^"]*""#);
        let mut matcher = compiler(dir.path(), usize::MAX).matcher(&grammar, &quote).expect("it compiles");
        assert!(!matcher.mask().expect("a mask").allows(end.expect("it has one")));
    }

    #[test]
    fn a_text_ends_with_the_tokenizers_end_too() {
        let (tiny, dir) = (tiny(), tempfile::tempdir().unwrap());
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(tiny.join(name), dir.path().join(name)).unwrap();
        }
        std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 7}"#).unwrap();
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let end = tokenizer.special_token_id("eos_token").expect("it has one");
        assert_ne!(end, 7);
        let output = tokenizer.encode("house", false).unwrap();
        let grammar = Grammar::new(GrammarKind::Regex, "house");
        let mut matcher = compiler(dir.path(), usize::MAX).matcher(&grammar, &output).expect("it compiles");
        assert!(matcher.allows(7) && matcher.allows(end));
    }
}
