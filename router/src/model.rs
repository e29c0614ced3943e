//! What the router knows of the model: names, sizes, tokenizer, defaults. No weights.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use baton_gguf::{GgufFile, Value};
use baton_tokenizer::{GenerationDefaults, Tokenizer};
use serde::Deserialize;

/// The served model, as it describes itself.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) architecture: String,
    /// Ids below this one exist in the model.
    pub(crate) vocab_size: usize,
    /// The context that the model was made for; workers may serve less.
    pub(crate) max_context: Option<usize>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) defaults: GenerationDefaults,
    /// Seconds since 1970 at which the router loaded it.
    pub(crate) created: u64,
    /// Changes with the version of the software.
    pub(crate) fingerprint: String,
}

/// The part of a model's description that a router needs.
#[derive(Deserialize, Default)]
struct Description {
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
}

impl Description {
    /// Reads `config.json` of a directory.
    fn read(dir: &Path) -> anyhow::Result<Description> {
        let path = dir.join("config.json");
        match std::fs::read(&path) {
            Ok(json) => {
                serde_json::from_slice(&json).with_context(|| format!("cannot read {}", path.display()))
            }
            // A directory with only the tokenizer is enough for a router.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Description::default()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
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
        })
    }
}

impl Model {
    /// Reads a model directory or a GGUF file; blocks.
    pub(crate) fn load(model: &Path, name: &str) -> anyhow::Result<Model> {
        let tokenizer = Tokenizer::load(model)?;
        let defaults = GenerationDefaults::load(model)?;
        let description =
            if model.is_dir() { Description::read(model)? } else { Description::read_gguf(model)? };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Model {
            name: name.to_owned(),
            architecture: description.architectures.into_iter().next().unwrap_or_default(),
            vocab_size: description.vocab_size.unwrap_or_else(|| tokenizer.vocab_size()),
            max_context: description.max_position_embeddings,
            tokenizer,
            defaults,
            created,
            fingerprint: concat!("fp_baton_", env!("CARGO_PKG_VERSION")).to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gguf_file_says_what_a_directory_says() {
        let fixtures = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/gguf/fixtures"));
        let model = Model::load(&fixtures.join("tokenizer-qwen2.gguf"), "x").unwrap();
        assert_eq!((model.architecture.as_str(), model.max_context), ("llama", None));
        assert_eq!(model.vocab_size, model.tokenizer.vocab_size(), "no embedding tells otherwise");
        assert!(model.tokenizer.has_chat_template());

        let path = fixtures.join("llama-f32.gguf");
        let description = Description::read_gguf(&path).unwrap();
        assert_eq!((description.vocab_size, description.max_position_embeddings), (Some(48), Some(64)));
        let error = Model::load(&path, "x").unwrap_err();
        assert!(format!("{error:#}").contains("tokenizer.ggml.model is \"none\""), "{error:#}");
    }
}
