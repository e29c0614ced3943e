//! What a model is, as its configuration says: `config.json` of a Hugging Face directory, or what another format has
//! instead.
//!
//! Fields that change what a model means are either understood or refused. It knows no weights.

use std::path::Path;

use serde_json::Value;

use crate::architecture;
use crate::decoder::DecoderSpec;
use crate::error::LoadError;
use crate::fields::{Fields, parse_object};
use crate::float::FloatDtype;
use crate::quantisation_config::StoredQuantisation;

/// What `config.json`, or a GGUF file's metadata, says.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// "LlamaForCausalLM".
    pub architecture: String,
    /// Tokens that a sequence may have.
    pub context_length: usize,
    /// Tokens that end a text. `generation_config.json` may know more of them.
    pub eos_token_ids: Vec<u32>,
    /// The token that begins a text.
    pub bos_token_id: Option<u32>,
    /// The type in which weights are stored, or of the scales of integers that are.
    pub dtype: FloatDtype,
    /// How the weights of a directory were quantised, if they were.
    pub quantisation: Option<StoredQuantisation>,
    /// The decoder.
    pub decoder: DecoderSpec,
}

impl ModelConfig {
    /// Whether the weights of a directory are stored as small numbers with scales.
    pub fn is_quantised(&self) -> bool {
        self.quantisation.is_some()
    }

    /// Reads `config.json` of the directory `model`.
    ///
    /// # Errors
    /// When it is missing, broken, or describes what the decoder cannot compute.
    pub fn of_directory(model: &Path) -> Result<ModelConfig, LoadError> {
        let path = model.join("config.json");
        let text = std::fs::read(&path).map_err(|source| LoadError::io(&path, source))?;
        ModelConfig::parse(&path, &text)
    }

    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`of_directory`](Self::of_directory).
    pub fn parse(path: &Path, text: &[u8]) -> Result<ModelConfig, LoadError> {
        let object = parse_object(path, text)?;
        let fields = Fields::new(path, &object);
        let architecture = name_of(&fields)?;
        Ok(ModelConfig {
            // The decoder first: it knows whether the architecture is supported at all.
            context_length: architecture::context_length(&architecture, &fields)?,
            eos_token_ids: fields.token_ids("eos_token_id")?,
            bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
            dtype: stated_dtype(&fields)?,
            quantisation: StoredQuantisation::read(&fields)?,
            decoder: architecture::decoder(&architecture, &fields)?,
            architecture,
        })
    }

    /// Token ids are below.
    pub fn vocab_size(&self) -> usize {
        self.decoder.vocab_size
    }
}

fn name_of(fields: &Fields<'_>) -> Result<String, LoadError> {
    let expected = "a list with the name of one architecture";
    let names = fields.list("architectures")?.ok_or_else(|| fields.refuse("architectures", expected))?;
    match names.as_slice() {
        [Value::String(name)] => Ok(name.clone()),
        _ => Err(fields.refuse("architectures", expected)),
    }
}

/// `dtype` or, in older files, `torch_dtype`; bf16 if neither is there or names another type.
fn stated_dtype(fields: &Fields<'_>) -> Result<FloatDtype, LoadError> {
    let name = fields.text("dtype")?.or(fields.text("torch_dtype")?);
    Ok(match name {
        Some("float32") => FloatDtype::F32,
        Some("float16") => FloatDtype::F16,
        _ => FloatDtype::Bf16,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stated_type_is_found_under_either_name() {
        let path = Path::new("config.json");
        for (json, expected) in [
            (r#"{"torch_dtype": "float16"}"#, FloatDtype::F16),
            (r#"{"dtype": "float32"}"#, FloatDtype::F32),
            (r#"{"dtype": "float8_e4m3fn"}"#, FloatDtype::Bf16),
            ("{}", FloatDtype::Bf16),
        ] {
            let object = parse_object(path, json.as_bytes()).unwrap();
            assert_eq!(stated_dtype(&Fields::new(path, &object)).unwrap(), expected, "{json}");
        }
    }
}
