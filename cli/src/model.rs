//! Which model a process serves, and under which name.

use std::path::PathBuf;

use baton_command::{embedded_model, model_path};
use clap::Args;

/// Which model, and under which name.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// Directory of a Hugging Face model, or a .gguf file. Default: the tiny model that is embedded in this
    /// program.
    #[arg(long, value_name = "DIR|FILE", env = "BATON_MODEL")]
    pub model: Option<PathBuf>,
    /// Model name in the API. Default: the name of the directory, or of the file without .gguf.
    #[arg(long, value_name = "NAME", env = "BATON_MODEL_NAME")]
    pub model_name: Option<String>,
}

impl ModelArgs {
    /// Path and name of the model: the given one, or the embedded one.
    pub(crate) fn resolve(&self) -> anyhow::Result<(PathBuf, String)> {
        let Some(model) = &self.model else {
            let name = self.model_name.clone().unwrap_or_else(|| embedded_model::NAME.to_owned());
            return Ok((embedded_model::directory()?, name));
        };
        let model = model_path(model)?;
        let name = self.model_name.clone().unwrap_or_else(|| baton_worker::name_of(&model));
        Ok((model, name))
    }
}
