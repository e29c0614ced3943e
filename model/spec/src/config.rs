//! A model's configuration: `config.json` of a Hugging Face directory, or the metadata of another format.
//!
//! A field that changes the model's meaning is either understood or refused. Unknown fields are ignored; those of the
//! rotary embedding are collected for a warning. This module does not know weights.

use std::path::Path;

use serde_json::Value;

use crate::architecture;
use crate::decoder::DecoderSpec;
use crate::error::LoadError;
use crate::fields::{Fields, parse_object, read_object};
use crate::float::FloatDtype;
use crate::quantisation_config::StoredQuantisation;
use crate::stored_weights::StoredWeights;
use crate::text_part::{self, TextPart};
use crate::weight_format::WeightFormat;

/// Older exports of NVIDIA's ModelOpt state here how the weights are quantised, and nothing in `config.json`.
const MODELOPT_FILE: &str = "hf_quant_config.json";

/// The contents of `config.json` or of a GGUF file's metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The architecture's name: "LlamaForCausalLM".
    pub architecture: String,
    /// The largest number of tokens of a sequence.
    pub context_length: usize,
    /// Tokens that end a text. `generation_config.json` may list more.
    pub eos_token_ids: Vec<u32>,
    /// The token that starts a text.
    pub bos_token_id: Option<u32>,
    /// The type of stored weights; for quantised weights the type of their scales.
    pub dtype: FloatDtype,
    /// How the weights of a directory are quantised; `None` if they are not.
    pub quantisation: Option<StoredQuantisation>,
    /// The number format of the layers' weights that a directory's configuration states; bf16 for other files.
    pub weights: WeightFormat,
    /// How most weights of the layers are stored: as a directory's configuration states, or as a GGUF file's header says.
    pub stored: StoredWeights,
    /// Fields of the rotary embedding's parameters that are not known and not read.
    pub unknown_rope_fields: Vec<String>,
    /// The decoder.
    pub decoder: DecoderSpec,
}

impl ModelConfig {
    /// Whether the weights of a directory are quantised.
    pub fn is_quantised(&self) -> bool {
        self.quantisation.is_some()
    }

    /// Reads `config.json` of the directory `model`, and ModelOpt's file beside it if the weights are quantised as only
    /// that file says.
    ///
    /// # Errors
    /// When a file is missing or malformed, or describes a model that the decoder cannot compute.
    pub fn of_directory(model: &Path) -> Result<ModelConfig, LoadError> {
        let path = model.join("config.json");
        let object = read_object(&path)?;
        let mut config = ModelConfig::read(&Fields::new(&path, &object))?;
        let beside = model.join(MODELOPT_FILE);
        if config.quantisation.is_none() && beside.exists() {
            let object = read_object(&beside)?;
            config.read_modelopt(&Fields::new(&beside, &object))?;
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`of_directory`](Self::of_directory).
    pub fn parse(path: &Path, text: &[u8]) -> Result<ModelConfig, LoadError> {
        let object = parse_object(path, text)?;
        ModelConfig::read(&Fields::new(path, &object))
    }

    fn read(fields: &Fields<'_>) -> Result<ModelConfig, LoadError> {
        let architecture = name_of(fields)?;
        let part = TextPart::find(&architecture, fields)?;
        let (name, text) = match &part {
            Some(part) => (part.architecture, part.fields()),
            None => (architecture.as_str(), fields.clone()),
        };
        let stating = |names: &[&str]| stating(fields, &text, names);
        // The decoder comes first: it refuses unsupported architectures.
        let context_length = architecture::context_length(name, &text)?;
        let dtype = stated_dtype(stating(&["dtype", "torch_dtype"]))?;
        let quantised = stating(&["quantization_config", "compression_config"]);
        let weights = WeightFormat::read(quantised)?;
        Ok(ModelConfig {
            context_length,
            eos_token_ids: stating(&["eos_token_id"]).token_ids("eos_token_id")?,
            bos_token_id: stating(&["bos_token_id"]).token_ids("bos_token_id")?.first().copied(),
            dtype,
            quantisation: StoredQuantisation::read(quantised)?,
            weights,
            stored: StoredWeights::stated(weights, dtype),
            decoder: architecture::decoder(name, &text)?,
            unknown_rope_fields: architecture::unknown_rope_fields(&text)?,
            architecture,
        })
    }

    /// Whether the model has parts that are not read, such as one for images: then the decoder is that of its text model.
    pub fn has_other_parts(&self) -> bool {
        text_part::names().any(|name| name == self.architecture)
    }

    /// Takes the quantisation of the weights from ModelOpt's file.
    fn read_modelopt(&mut self, fields: &Fields<'_>) -> Result<(), LoadError> {
        let stated =
            fields.object("quantization")?.ok_or_else(|| fields.refuse("quantization", "an object"))?;
        self.quantisation = StoredQuantisation::read_modelopt(&stated)?;
        if self.is_quantised() {
            self.weights = WeightFormat::Fp8;
            self.stored = StoredWeights::stated(self.weights, self.dtype);
        }
        Ok(())
    }

    /// The number of tokens in the vocabulary; token ids are below this.
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

/// The object that states one of these fields: the whole model comes first, as in transformers, then its text model.
fn stating<'f, 'a>(whole: &'f Fields<'a>, text: &'f Fields<'a>, names: &[&str]) -> &'f Fields<'a> {
    if names.iter().any(|name| whole.get(name).is_some()) { whole } else { text }
}

/// `dtype` or, in older files, `torch_dtype`; bf16 if both are missing or name another type.
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
    fn the_stored_type_is_found_under_either_name() {
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
