//! Where a model is: a path that the user gave, or the model inside this program.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::{
    embedded_model,
    engine::{EngineArgs, Speculate},
};

/// The whole path of a model. A link to a file keeps its name: what it links to may have one that says nothing, such as
/// the blobs of a download cache.
pub fn model_path(model: &Path) -> anyhow::Result<PathBuf> {
    let whole = match model.is_file() {
        true => std::path::absolute(model),
        false => model.canonicalize(),
    };
    whole.with_context(|| format!("model {}", model.display()))
}

/// Directory of the draft model if there is to be one: the given one, or that of the embedded model.
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
