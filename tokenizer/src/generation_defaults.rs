//! Which tokens end a text, and how a model's authors want it sampled.

use std::path::Path;

use serde::Deserialize;

use crate::{TokenizerError, files, gguf};

/// `generation_config.json`; where that is silent about token ids, `config.json`. Or what a GGUF file says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Any of these ends a sequence. Empty when the model names none.
    pub eos_token_ids: Vec<u32>,
    /// Begins a sequence.
    pub bos_token_id: Option<u32>,
    /// Fills up a batch; never generated.
    pub pad_token_id: Option<u32>,
    /// False: the authors mean greedy decoding unless told otherwise.
    pub do_sample: Option<bool>,
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// In (0, 1].
    pub top_p: Option<f32>,
    /// 0 is off.
    pub top_k: Option<u32>,
    /// In [0, 1).
    pub min_p: Option<f32>,
    /// 1 is off.
    pub repetition_penalty: Option<f32>,
    /// Most tokens to generate.
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    /// Reads them from a model directory, whose files may be absent: then nothing is known; or from a
    /// GGUF file.
    ///
    /// # Errors
    /// When a file is there and cannot be read, is not what it should be, or a value has the wrong type.
    pub fn load(model: &Path) -> Result<Self, TokenizerError> {
        if !model.is_dir() {
            return gguf::load_defaults(model);
        }
        let dir = model;
        let generation: File =
            files::read_json_if_present(&dir.join("generation_config.json"))?.unwrap_or_default();
        let model: Ids = files::read_json_if_present(&dir.join("config.json"))?.unwrap_or_default();
        let ids = generation.ids;
        let eos = ids.eos_token_id.or(model.eos_token_id);
        Ok(Self {
            eos_token_ids: eos.map(OneOrMany::into_vec).unwrap_or_default(),
            bos_token_id: ids.bos_token_id.or(model.bos_token_id).and_then(OneOrMany::into_first),
            pad_token_id: ids.pad_token_id.or(model.pad_token_id).and_then(OneOrMany::into_first),
            do_sample: generation.do_sample,
            temperature: generation.temperature,
            top_p: generation.top_p,
            top_k: generation.top_k,
            min_p: generation.min_p,
            repetition_penalty: generation.repetition_penalty,
            max_new_tokens: generation.max_new_tokens,
        })
    }
}

#[derive(Default, Deserialize)]
struct File {
    #[serde(flatten)]
    ids: Ids,
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    max_new_tokens: Option<u32>,
}

#[derive(Default, Deserialize)]
struct Ids {
    eos_token_id: Option<OneOrMany>,
    bos_token_id: Option<OneOrMany>,
    pad_token_id: Option<OneOrMany>,
}

// Signed: some published files say -1 for "none".
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

impl OneOrMany {
    fn into_vec(self) -> Vec<u32> {
        let ids = match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        };
        ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect()
    }

    fn into_first(self) -> Option<u32> {
        self.into_vec().first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(files: &[(&str, &str)]) -> Result<GenerationDefaults, TokenizerError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        GenerationDefaults::load(dir.path())
    }

    #[test]
    fn eos_is_one_id_or_a_list() {
        let one = load(&[("generation_config.json", r#"{"eos_token_id": 2, "top_k": 20}"#)]).unwrap();
        assert_eq!(one.eos_token_ids, [2]);
        assert_eq!(one.top_k, Some(20));
        let many = load(&[("generation_config.json", r#"{"eos_token_id": [7, 9]}"#)]).unwrap();
        assert_eq!(many.eos_token_ids, [7, 9]);
    }

    #[test]
    fn model_config_fills_in_token_ids() {
        let defaults = load(&[
            ("generation_config.json", r#"{"temperature": 0.6, "bos_token_id": null}"#),
            ("config.json", r#"{"eos_token_id": 3, "bos_token_id": 1, "pad_token_id": -1, "top_k": 4}"#),
        ])
        .unwrap();
        assert_eq!(defaults.eos_token_ids, [3]);
        assert_eq!(defaults.bos_token_id, Some(1));
        assert_eq!(defaults.pad_token_id, None);
        assert_eq!(defaults.temperature, Some(0.6));
        assert_eq!(defaults.top_k, None, "the model's config holds no sampling defaults");
    }

    #[test]
    fn nothing_there_is_nothing_known() {
        assert_eq!(load(&[]).unwrap(), GenerationDefaults::default());
    }

    #[test]
    fn wrong_type_names_the_file() {
        let error = load(&[("generation_config.json", r#"{"top_p": "high"}"#)]).unwrap_err();
        assert!(error.to_string().contains("generation_config.json"), "{error}");
    }
}
