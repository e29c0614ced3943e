//! A model's tokenizer and its defaults for generation, from a model directory or a GGUF file.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{ChatTemplate, GenerationDefaults, Tokenizer, TokenizerError, files, gguf, post_processor};

/// Ids may have holes, and each takes memory.
const MAX_ID: u32 = 1 << 24;

impl Tokenizer {
    /// Reads `tokenizer.json`, `tokenizer_config.json` and the chat template of the model directory
    /// `model`, of which only the first must be there; or the same from the GGUF file `model`. What ends a sequence is special.
    ///
    /// # Errors
    /// Names the file that is missing or wrong.
    pub fn load(model: &Path) -> Result<Self, TokenizerError> {
        let (tokenizer, defaults) = match model.is_dir() {
            true => (Self::load_dir(model)?, GenerationDefaults::load(model)?),
            false => gguf::load_tokenizer(model)?,
        };
        let ends = defaults.with_end_of(&tokenizer, usize::MAX).eos_token_ids;
        Ok(tokenizer.with_ends(&ends))
    }

    fn load_dir(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        let mut tokenizer: tokenizers::Tokenizer =
            files::read(&path)?.parse().map_err(|error| files::invalid(&path, error))?;
        if let Some(id) = tokenizer.get_vocab(true).into_values().find(|&id| id > MAX_ID) {
            return Err(files::invalid(&path, format!("a token has the id {id}, above {MAX_ID}")));
        }
        let config: Map<String, Value> =
            files::read_json_if_present(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let mut special_tokens: Map<String, Value> =
            files::read_json_if_present(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
        special_tokens.extend(config.clone());
        let chat_template = ChatTemplate::load(dir, &config)?;
        let special_tokens = special_token_texts(&special_tokens);
        add_llama_signs(&mut tokenizer, &config, &special_tokens);
        Ok(Self::new(tokenizer, special_tokens, chat_template))
    }
}

/// `transformers` takes what Llama's tokenizers put around a text from these flags, whatever `tokenizer.json` says.
fn add_llama_signs(
    tokenizer: &mut tokenizers::Tokenizer,
    config: &Map<String, Value>,
    special_tokens: &Map<String, Value>,
) {
    let class = config.get("tokenizer_class").and_then(Value::as_str);
    let flag = |name: &str| config.get(name).and_then(Value::as_bool);
    let (bos, eos) = (flag("add_bos_token"), flag("add_eos_token"));
    if !matches!(class, Some("LlamaTokenizer" | "LlamaTokenizerFast")) || (bos.is_none() && eos.is_none()) {
        return;
    }
    let sign = |adds: bool, name: &str| {
        let token = special_tokens.get(name).filter(|_| adds)?.as_str()?;
        Some((token, tokenizer.token_to_id(token)?))
    };
    let (before, after) = (sign(bos.unwrap_or(true), "bos_token"), sign(eos.unwrap_or(false), "eos_token"));
    tokenizer.with_post_processor(Some(post_processor::with_signs(before, after)));
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
        let Config { ids: model, text_config: text } =
            files::read_json_if_present(&dir.join("config.json"))?.unwrap_or_default();
        let (ids, text) = (generation.ids, text.unwrap_or_default());
        let eos = ids.eos_token_id.or(model.eos_token_id).or(text.eos_token_id);
        Ok(Self {
            eos_token_ids: eos.map(OneOrMany::into_vec).unwrap_or_default(),
            bos_token_id: ids
                .bos_token_id
                .or(model.bos_token_id)
                .or(text.bos_token_id)
                .and_then(OneOrMany::into_first),
            pad_token_id: ids
                .pad_token_id
                .or(model.pad_token_id)
                .or(text.pad_token_id)
                .and_then(OneOrMany::into_first),
            do_sample: generation.do_sample,
            temperature: generation.temperature,
            top_p: generation.top_p,
            // Some files say -1 for "off", as vLLM does.
            top_k: generation.top_k.map(|top_k| u32::try_from(top_k).unwrap_or(0)),
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
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    max_new_tokens: Option<u32>,
}

#[derive(Default, Deserialize)]
struct Config {
    #[serde(flatten)]
    ids: Ids,
    /// The text part of a model that reads images too.
    text_config: Option<Ids>,
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

/// Named tokens are written as text, or as an object with the text in `content`.
fn special_token_texts(config: &Map<String, Value>) -> Map<String, Value> {
    config
        .iter()
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, value)| {
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            Some((name.clone(), Value::from(text)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

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
        assert_eq!(load(&[("generation_config.json", r#"{"top_k": -1}"#)]).unwrap().top_k, Some(0), "off");
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
    fn the_text_part_fills_in_token_ids_that_the_whole_model_lacks() {
        let config = r#"{"eos_token_id": [1, 106], "text_config": {"eos_token_id": 1, "bos_token_id": 2}}"#;
        let defaults = load(&[("config.json", config)]).unwrap();
        assert_eq!((defaults.eos_token_ids, defaults.bos_token_id), (vec![1, 106], Some(2)));
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

    #[test]
    fn flags_of_llama_tokenizers_say_what_is_put_around_a_text() {
        let load = |files: &[(&str, &str)]| Tokenizer::load(testing::model_dir(files).path()).unwrap();
        let config = |class: &str, flags: &str| {
            let config = format!(
                r#"{{"tokenizer_class": {class:?}, "bos_token": "<|start|>", "eos_token": "<|end|>"{flags}}}"#
            );
            load(&[("tokenizer_config.json", config.as_str())])
        };
        let plain = load(&[]);
        let [start, end] = ["<|start|>", "<|end|>"].map(|token| plain.token_id(token).unwrap());
        let text = plain.encode("hello", false).unwrap();
        let cases: [(&str, &str, &[u32], &[u32]); 7] = [
            ("LlamaTokenizerFast", r#", "add_bos_token": true"#, &[start], &[]),
            ("LlamaTokenizer", r#", "add_bos_token": true, "add_eos_token": true"#, &[start], &[end]),
            ("LlamaTokenizer", r#", "add_bos_token": false, "add_eos_token": true"#, &[], &[end]),
            ("LlamaTokenizerFast", r#", "add_eos_token": false"#, &[start], &[]),
            ("LlamaTokenizerFast", r#", "add_bos_token": false"#, &[], &[]),
            ("LlamaTokenizerFast", "", &[], &[]),
            ("PreTrainedTokenizerFast", r#", "add_bos_token": true"#, &[], &[]),
        ];
        for (class, flags, before, after) in cases {
            let tokenizer = config(class, flags);
            let expected = [before, text.as_slice(), after].concat();
            assert_eq!(tokenizer.encode("hello", true).unwrap(), expected, "{class}{flags}");
            assert_eq!(tokenizer.encode("hello", false).unwrap(), text);
            assert!(tokenizer.encodes_by_pieces());
        }
    }

    #[test]
    fn ids_that_would_take_all_memory_name_the_file() {
        for id in [u32::MAX - 1, u32::MAX] {
            let dir = tempfile::tempdir().unwrap();
            let json = format!(r#"{{"model": {{"type": "BPE", "vocab": {{"a": {id}}}, "merges": []}}}}"#);
            std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
            let error = Tokenizer::load(dir.path()).expect_err("the id is too high").to_string();
            assert!(error.contains("tokenizer.json") && error.contains(&id.to_string()), "{error}");
        }
    }
}
