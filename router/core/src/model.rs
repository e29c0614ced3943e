//! What the router knows of the model: names, sizes, tokenizer, defaults. No weights.

use std::{
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use baton_gguf::{GgufFile, Value};
use baton_grammar::{GrammarCompiler, GrammarError, GrammarLimits, Vocabulary, VocabularyToken};
use baton_request::Grammar;
use baton_tokenizer::{GenerationDefaults, Tokenizer};
use baton_tools::{AnswerForm, ToolFormat};
use serde::Deserialize;

use super::CoreError;

/// The served model, as it describes itself.
#[derive(Debug)]
pub struct ServedModel {
    /// What clients call it.
    pub name: String,
    /// As its configuration says; may be empty.
    pub architecture: String,
    /// Ids below this one exist in the model.
    pub vocab_size: usize,
    /// The context that the model was made for; workers may serve less.
    pub(crate) max_context: Option<usize>,
    /// Between text and ids.
    pub tokenizer: Tokenizer,
    /// Of sampling parameters.
    pub defaults: GenerationDefaults,
    /// Compiles the grammars of requests, to refuse what workers would.
    pub(crate) grammars: GrammarCompiler,
    /// How its answers are written.
    pub form: AnswerForm,
    /// The special tokens among the marks of that form.
    pub(crate) marks: Arc<[u32]>,
    /// Seconds since 1970 at which the router loaded it.
    pub created: u64,
    /// Changes with the version of the software.
    pub fingerprint: String,
}

/// The part of a model's description that a router needs.
#[derive(Deserialize, Default)]
struct Description {
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    /// Of a model that reads images too: its text part, which has the sizes.
    text_config: Option<Box<Description>>,
}

impl Description {
    /// Reads `config.json` of a directory.
    fn read(dir: &Path) -> anyhow::Result<Description> {
        let path = dir.join("config.json");
        match std::fs::read(&path) {
            Ok(json) => {
                let whole: Description = serde_json::from_slice(&json)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                Ok(whole.with_text_part())
            }
            // A directory with only the tokenizer is enough for a router.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Description::default()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Takes absent sizes from the text part.
    fn with_text_part(mut self) -> Description {
        let text = self.text_config.take().unwrap_or_default();
        Description {
            vocab_size: self.vocab_size.or(text.vocab_size),
            max_position_embeddings: self.max_position_embeddings.or(text.max_position_embeddings),
            ..self
        }
    }

    /// Reads the metadata of a GGUF file.
    fn read_gguf(path: &Path) -> anyhow::Result<Description> {
        let file = GgufFile::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        let gguf = file.parse().with_context(|| path.display().to_string())?;
        let architecture = gguf.get("general.architecture").and_then(Value::as_text).unwrap_or_default();
        let context = gguf.get(&format!("{architecture}.context_length")).and_then(Value::as_unsigned);
        Ok(Description {
            architectures: vec![architecture.to_owned()],
            vocab_size: gguf.tensors().get("token_embd.weight").map(|embedding| embedding.shape[0]),
            max_position_embeddings: context.and_then(|context| context.try_into().ok()),
            text_config: None,
        })
    }
}

impl ServedModel {
    /// Reads a model directory or a GGUF file, whose tokenizer this is; blocks.
    pub fn load(
        model: &Path,
        name: &str,
        format: Option<ToolFormat>,
        tokenizer: Tokenizer,
    ) -> anyhow::Result<ServedModel> {
        let description =
            if model.is_dir() { Description::read(model)? } else { Description::read_gguf(model)? };
        let vocab_size = description.vocab_size.unwrap_or_else(|| tokenizer.vocab_size());
        let defaults = GenerationDefaults::load(model)?.with_end_of(&tokenizer, vocab_size);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let form = AnswerForm::detect(|text| tokenizer.chat_template_contains(text), format);
        Ok(ServedModel {
            name: name.to_owned(),
            architecture: description.architectures.into_iter().next().unwrap_or_default(),
            vocab_size,
            max_context: description.max_position_embeddings,
            grammars: grammars(&tokenizer, &defaults),
            form,
            marks: form.marks().filter_map(|mark| special(&tokenizer, mark)).collect(),
            tokenizer,
            defaults,
            created,
            fingerprint: concat!("fp_baton_", env!("CARGO_PKG_VERSION")).to_owned(),
        })
    }

    /// Changes with what makes events of tokens: the software, and how answers are read.
    pub(crate) fn making_of_events(&self) -> String {
        format!("{} {:?}", self.fingerprint, self.form)
    }

    /// Refuses a grammar that workers would refuse; `param` asks for it.
    pub(crate) fn check_grammar(&self, grammar: &Grammar, param: &str) -> Result<(), CoreError> {
        match self.grammars.matcher(grammar, &[]) {
            Ok(_) => Ok(()),
            Err(error @ GrammarError::Busy { .. }) => Err(CoreError::full(error.to_string())),
            Err(error) => Err(CoreError::invalid(param, format!("{param}: {error}"))),
        }
    }
}

/// The id of a text that is a special token.
pub(crate) fn special(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    tokenizer.token_id(text).filter(|&id| tokenizer.is_special(id))
}

fn grammars(tokenizer: &Tokenizer, defaults: &GenerationDefaults) -> GrammarCompiler {
    let (tokenizer, ends) = (tokenizer.clone(), defaults.eos_token_ids.clone());
    let load = move || {
        let opaque = || GrammarError::vocabulary("a text is not its tokens' bytes in a row");
        let tokens = tokenizer.all_token_bytes().ok_or_else(opaque)?;
        let tokens = tokens.map(|(bytes, is_special)| VocabularyToken { bytes, is_special });
        // Only workers draft.
        Vocabulary::new(tokens, &ends, Box::new(|_| Vec::new()))
    };
    GrammarCompiler::new(load, GrammarLimits::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(path: &Path) -> anyhow::Result<ServedModel> {
        ServedModel::load(path, "x", None, Tokenizer::load(path)?)
    }

    #[test]
    fn the_sizes_of_a_model_for_images_are_those_of_its_text_part() {
        let json = r#"{"architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {"vocab_size": 131072, "max_position_embeddings": 4096}}"#;
        let description: Description = serde_json::from_str(json).unwrap();
        let description = description.with_text_part();
        assert_eq!(description.architectures, ["Mistral3ForConditionalGeneration"]);
        assert_eq!(
            (description.vocab_size, description.max_position_embeddings),
            (Some(131_072), Some(4096))
        );
    }

    #[test]
    fn a_gguf_file_says_what_a_directory_says() {
        let fixtures = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/gguf/fixtures"));
        let model = load(&fixtures.join("tokenizer-qwen2.gguf")).unwrap();
        assert_eq!((model.architecture.as_str(), model.max_context), ("llama", None));
        assert_eq!(model.vocab_size, model.tokenizer.vocab_size(), "no embedding tells otherwise");
        assert!(model.tokenizer.has_chat_template());

        let path = fixtures.join("llama-f32.gguf");
        let description = Description::read_gguf(&path).unwrap();
        assert_eq!((description.vocab_size, description.max_position_embeddings), (Some(48), Some(64)));
        let error = load(&path).unwrap_err();
        assert!(format!("{error:#}").contains("tokenizer.ggml.model is \"none\""), "{error:#}");
    }
}
