//! Tiny tokenizers for the tests of this crate.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::Tokenizer;

/// A model directory with a byte-level tokenizer and these files.
pub(crate) fn model_dir(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("tokenizer.json"), &byte_level_json().to_string());
    for (name, text) in files {
        write(&dir.path().join(name), text);
    }
    dir
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// All bytes, a few merges, and two special tokens at the end: the shape of Llama 3 and Qwen.
pub(crate) fn byte_level() -> Tokenizer {
    from_json(&byte_level_json())
}

/// ASCII, `▁`, and `<0x..>` for the rest: the shape of Llama 2 and Mistral.
pub(crate) fn byte_fallback() -> Tokenizer {
    let mut vocab = Map::new();
    for token in ["<unk>", "<s>", "</s>"]
        .map(str::to_owned)
        .into_iter()
        .chain((0..256).map(|byte| format!("<0x{byte:02X}>")))
    {
        vocab.insert(token, json!(vocab.len()));
    }
    for token in
        (33..127u8).map(|byte| char::from(byte).to_string()).chain(["▁".into(), "▁t".into(), "▁▁".into()])
    {
        vocab.insert(token, json!(vocab.len()));
    }
    from_json(&json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "fuse_unk": true,
                  "vocab": vocab, "merges": ["▁ t", "▁ ▁"]},
    }))
}

/// Characters with a decoder that the vocabulary table does not know.
pub(crate) fn word_piece() -> Tokenizer {
    let vocab: Map<String, Value> = ["[UNK]", "a", "b", "##a", "##b", "##é", "you", "##'s", "."]
        .into_iter()
        .enumerate()
        .map(|(id, token)| (token.to_owned(), json!(id)))
        .collect();
    from_json(&json!({
        "version": "1.0", "added_tokens": [],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab},
    }))
}

pub(crate) fn from_json(json: &Value) -> Tokenizer {
    Tokenizer::new(json.to_string().parse().unwrap(), Map::new(), None)
}

pub(crate) fn byte_level_json() -> Value {
    let mut alphabet: Vec<char> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut vocab = Map::new();
    for token in alphabet {
        vocab.insert(token.to_string(), json!(vocab.len()));
    }
    let merges = ["h e", "l l", "Ġ he", "Ã ©", "ð Ł"];
    for merge in merges {
        vocab.insert(merge.replace(' ', ""), json!(vocab.len()));
    }
    let next = vocab.len();
    let split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "added_tokens": [added(next, "<|start|>"), added(next + 1, "<|end|>")],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    })
}

fn added(id: usize, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": true})
}
