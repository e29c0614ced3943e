//! The path of a model: from the user, or of the model that is embedded in this program.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::{
    embedded_model,
    engine::{EngineArgs, Speculate},
};

/// The absolute path of a model. A link to a file is not followed: its target may have a meaningless name, as blobs of a
/// download cache have.
///
/// # Errors
/// When it does not exist.
pub fn model_path(model: &Path) -> anyhow::Result<PathBuf> {
    let whole = match model.is_file() {
        true => std::path::absolute(model),
        false => model.canonicalize(),
    };
    if whole.is_err()
        && let Some(name) = hub_name(model)
    {
        bail!(
            "there is no file or directory {name}, and Baton downloads nothing; get the model with \
             `hf download {name} --local-dir DIR`, and give DIR"
        );
    }
    whole.with_context(|| {
        format!(
            "cannot open the model {}; give a directory with config.json, tokenizer.json and *.safetensors, or a .gguf file",
            model.display()
        )
    })
}

/// The path as the name of a model on a hub, if it looks like one: `owner/name`.
pub fn hub_name(model: &Path) -> Option<&str> {
    let name = model.to_str()?;
    let (owner, rest) = name.split_once('/')?;
    let is_name = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['/', '\\']);
    (is_name(owner) && is_name(rest)).then_some(name)
}

/// Directory of the draft model, if the settings ask for one: the given directory, or that of the embedded model.
///
/// # Errors
/// When the settings contradict each other, or the directory does not exist.
pub fn draft_model(engine: &EngineArgs, is_embedded: bool) -> anyhow::Result<Option<PathBuf>> {
    match (engine.speculate, &engine.draft_model) {
        (Speculate::Draft, Some(draft)) => model_path(draft).map(Some),
        (Speculate::Draft, None) if is_embedded => embedded_model::draft_directory().map(Some),
        (Speculate::Draft, None) => {
            bail!("--speculate draft needs a smaller model: say where with --draft-model")
        }
        (Speculate::Off | Speculate::Ngram, Some(_)) => {
            bail!("--draft-model is for --speculate draft; give both or neither")
        }
        (Speculate::Off | Speculate::Ngram, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_hub_explains_how_to_get_the_model() {
        let error = |model: &str| format!("{:#}", model_path(Path::new(model)).unwrap_err());
        assert!(error("meta-llama/Llama-3.1-8B").contains("hf download meta-llama/Llama-3.1-8B"));
        for model in ["/no/where", "./no/where", "nowhere", "../no", "a/b/c"] {
            let error = error(model);
            assert!(!error.contains("hf download"), "{model}");
            assert!(error.contains(model) && error.contains("give a directory with config.json"), "{error}");
        }
    }
}
