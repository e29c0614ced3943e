//! What the router knows of the model: names, sizes, tokenizer, defaults. No weights.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use baton_tokenizer::{GenerationDefaults, Tokenizer};
use serde::Deserialize;

/// The served model, as its directory describes it.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) architecture: String,
    /// Ids below this one exist in the model.
    pub(crate) vocab_size: usize,
    /// As far as the model was made to reach; workers may serve less.
    pub(crate) max_context: Option<usize>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) defaults: GenerationDefaults,
    /// Seconds since 1970 at which the router loaded it.
    pub(crate) created: u64,
    /// Changes when the served software does.
    pub(crate) fingerprint: String,
}

#[derive(Deserialize, Default)]
struct ConfigFile {
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
}

impl Model {
    /// Reads a model directory; blocks.
    pub(crate) fn load(dir: &Path, name: &str) -> anyhow::Result<Model> {
        let tokenizer = Tokenizer::load(dir)?;
        let defaults = GenerationDefaults::load(dir)?;
        let path = dir.join("config.json");
        let config: ConfigFile = match std::fs::read(&path) {
            Ok(json) => {
                serde_json::from_slice(&json).with_context(|| format!("cannot read {}", path.display()))?
            }
            // A directory with only the tokenizer is enough for a router.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => ConfigFile::default(),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Model {
            name: name.to_owned(),
            architecture: config.architectures.into_iter().next().unwrap_or_default(),
            vocab_size: config.vocab_size.unwrap_or_else(|| tokenizer.vocab_size()),
            max_context: config.max_position_embeddings,
            tokenizer,
            defaults,
            created,
            fingerprint: concat!("fp_baton_", env!("CARGO_PKG_VERSION")).to_owned(),
        })
    }
}
