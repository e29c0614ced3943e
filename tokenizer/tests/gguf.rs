//! Tokenizers in GGUF files against `tokenizers` in Python (`tests/gguf/`), and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use baton_gguf::testing::{Damage, Writer};
use baton_gguf::{GgufFile, Value};
use baton_tokenizer::{GenerationDefaults, Tokenizer};
use serde_json::{Map, json};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/gguf/fixtures");
const RECORDED: &[&str] = &["gemma", "gpt-2", "gpt-4o", "llama", "llama-bpe", "qwen2", "smollm", "tekken"];

fn fixture(name: &str) -> PathBuf {
    Path::new(FIXTURES).join(format!("tokenizer-{name}.gguf"))
}

/// Texts, and their ids with special tokens.
fn recorded(name: &str) -> Vec<(String, Vec<u32>)> {
    let file = GgufFile::open(&fixture(name)).unwrap();
    let gguf = file.parse().unwrap();
    let array = |key: &str| gguf.get(key).and_then(Value::as_array).unwrap().iter();
    let mut ids = array("test.ids").map(|id| id.as_unsigned().unwrap() as u32);
    let lengths = array("test.lengths").map(|len| len.as_unsigned().unwrap() as usize);
    let texts = array("test.texts").map(|text| text.as_text().unwrap().to_owned());
    texts.zip(lengths).map(|(text, len)| (text, ids.by_ref().take(len).collect())).collect()
}

#[test]
fn texts_become_the_ids_of_the_published_tokenizer() {
    for name in RECORDED {
        let tokenizer = Tokenizer::load(&fixture(name)).unwrap();
        for (text, ids) in recorded(name) {
            assert_eq!(tokenizer.encode(&text, true).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(tokenizer.encode(&text, false).unwrap(), ids[1..], "{name}: {text:?} alone");
            // Composed text comes back composed, and a space before it is no part of SentencePiece's text.
            if *name != "qwen2" && *name != "llama" {
                assert_eq!(tokenizer.decode(&ids[1..], false), text, "{name}");
            }
        }
        let start = tokenizer.token_id("<|start|>");
        assert_eq!(tokenizer.special_token_id("bos_token"), start);
        assert!(
            tokenizer.is_special(start.unwrap())
                && !tokenizer.is_special(tokenizer.token_id("<tool>").unwrap())
        );
        let messages = json!([{"role": "user", "content": "hi"}]);
        let prompt = tokenizer.chat_prompt(&messages, None, &Map::new()).unwrap();
        assert_eq!(prompt, "<|start|>user: hi<|end|>");
        let defaults = GenerationDefaults::load(&fixture(name)).unwrap();
        assert_eq!(defaults.eos_token_ids, [tokenizer.token_id("<|end|>").unwrap()]);
        assert_eq!(defaults.bos_token_id, start);
    }
}

/// Three letters, a joined pair, and two signs.
fn bytes_without(missing: &str) -> Writer {
    let mut writer = Writer::default();
    if missing != "model" {
        writer = writer.text("tokenizer.ggml.model", "gpt2");
    }
    if missing != "tokens" {
        writer = writer.texts("tokenizer.ggml.tokens", ["a", "b", "ab", "<|im_end|>", "<s>", ""]);
    }
    if missing != "types" {
        writer = writer.i32s("tokenizer.ggml.token_type", &[1, 1, 1, 3, 3, 5]);
    }
    if missing != "merges" {
        writer = writer.texts("tokenizer.ggml.merges", ["a b"]);
    }
    writer
}

fn load(writer: &Writer) -> Result<(Tokenizer, GenerationDefaults), String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, writer.finish()).unwrap();
    let clean = |error: baton_tokenizer::TokenizerError| {
        error.to_string().replace(&format!("{}/", dir.path().display()), "")
    };
    Ok((Tokenizer::load(&path).map_err(clean)?, GenerationDefaults::load(&path).map_err(clean)?))
}

#[test]
fn settings_of_a_file_are_kept() {
    let (tokenizer, defaults) = load(&bytes_without("")).unwrap();
    assert_eq!(tokenizer.encode("abba<|im_end|>", true).unwrap(), [2, 1, 0, 3]);
    assert_eq!(defaults.eos_token_ids, [3], "a sign that ends turns");
    assert!(!tokenizer.has_chat_template());

    let writer = bytes_without("")
        .text("tokenizer.ggml.pre", "qwen2")
        .bool("tokenizer.ggml.add_bos_token", true)
        .bool("tokenizer.ggml.add_eos_token", true)
        .u32("tokenizer.ggml.bos_token_id", 4)
        .u32("tokenizer.ggml.eos_token_id", 4)
        .u32("tokenizer.ggml.eot_token_id", 2)
        .f32("general.sampling.temp", 0.5)
        .value("general.sampling.top_k", 5, &20i32.to_le_bytes())
        .text("tokenizer.chat_template", "plain")
        .text("tokenizer.chat_template.tool_use", "tools");
    let (tokenizer, defaults) = load(&writer).unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [4, 2, 4]);
    assert_eq!(defaults.eos_token_ids, [2, 3, 4]);
    assert_eq!((defaults.temperature, defaults.top_k), (Some(0.5), Some(20)));
    let prompt = |tools| tokenizer.chat_prompt(&json!([]), tools, &Map::new()).unwrap();
    assert_eq!((prompt(None), prompt(Some(&json!([{}])))), ("plain".into(), "tools".into()));
}

#[test]
fn ends_are_special_whatever_their_type() {
    for token_type in [1, 3, 4] {
        let writer = bytes_without("types")
            .i32s("tokenizer.ggml.token_type", &[1, 1, 1, token_type, 3, 5])
            .u32("tokenizer.ggml.eot_token_id", 1);
        let (tokenizer, defaults) = load(&writer).unwrap();
        assert_eq!(tokenizer.encode("ab<|im_end|>", true).unwrap(), [2, 3], "type {token_type}");
        assert_eq!(defaults.eos_token_ids, [1, 3], "type {token_type}");
        assert!(tokenizer.is_special(1) && tokenizer.is_special(3) && !tokenizer.is_special(2));
        assert_eq!(tokenizer.decode(&[2, 3, 1], true), "ab");
    }
}

#[test]
fn signs_of_phi_3_take_the_space_after_them() {
    let pieces = |architecture: &str| {
        let writer = Writer::default()
            .text("general.architecture", architecture)
            .text("tokenizer.ggml.model", "llama")
            .texts("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "<|user|>", "▁", "x", "▁x", "<0x0A>"])
            .i32s("tokenizer.ggml.token_type", &[2, 3, 3, 3, 1, 1, 1, 6])
            .f32s("tokenizer.ggml.scores", &[0.0, 0.0, 0.0, 0.0, -3.0, -2.0, -1.0, 0.0]);
        let (tokenizer, _) = load(&writer).unwrap();
        tokenizer.encode("<|user|>\n x", false).unwrap()
    };
    assert_eq!(pieces("phi3"), [3, 6]);
    assert_eq!(pieces("llama"), [3, 4, 7, 6]);
}

#[test]
fn files_without_a_usable_tokenizer_are_refused() {
    let check = |writer: Writer, expected: &str| {
        assert_eq!(load(&writer).unwrap_err(), format!("model.gguf is not valid: {expected}"));
    };
    let model = "expected gpt2 or llama";
    check(bytes_without("model"), &format!("tokenizer.ggml.model is missing, {model}"));
    check(
        bytes_without("model").text("tokenizer.ggml.model", "bert"),
        &format!("tokenizer.ggml.model is \"bert\", {model}"),
    );
    check(bytes_without("tokens"), "tokenizer.ggml.tokens is missing, expected an array");
    check(
        bytes_without("tokens").i32s("tokenizer.ggml.tokens", &[1]),
        "tokenizer.ggml.tokens is an array of 1, expected texts",
    );
    check(
        bytes_without("tokens").texts("tokenizer.ggml.tokens", ["a", "a", "b", "c", "d", "e"]),
        "token \"a\" occurs twice",
    );
    check(
        bytes_without("types").i32s("tokenizer.ggml.token_type", &[1]),
        "tokenizer.ggml.token_type is an array of 1, expected one for each token",
    );
    check(bytes_without("merges"), "tokenizer.ggml.merges is missing, expected an array");
    check(
        bytes_without("merges").texts("tokenizer.ggml.merges", ["ab"]),
        "tokenizer.ggml.merges is an array of 1, expected pairs of texts",
    );
    check(
        bytes_without("").u32("tokenizer.ggml.bos_token_id", 6),
        "tokenizer.ggml.bos_token_id is 6, expected the id of a token",
    );
    check(
        bytes_without("model").text("tokenizer.ggml.model", "llama"),
        "tokenizer.ggml.scores is missing, expected an array",
    );
    for (writer, expected) in [
        (
            bytes_without("").text("tokenizer.ggml.pre", "bloom"),
            "tokenizer.ggml.pre is \"bloom\", expected one of",
        ),
        (
            bytes_without("merges").texts("tokenizer.ggml.merges", ["b a"]),
            "expected pairs of tokens that make one",
        ),
        (
            bytes_without("").text("tokenizer.chat_template", "{% if %}"),
            "tokenizer.chat_template is not usable",
        ),
    ] {
        let error = load(&writer).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// Damage that leaves a container whole still has to be refused, or loaded as what it says.
#[test]
fn damaged_files_are_loaded_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut damage = Damage::new(0x6775_6667);
    for name in ["llama", "qwen2"] {
        let whole = fs::read(fixture(name)).unwrap();
        let (mut num_loaded, mut num_refused) = (0, 0);
        for _ in 0..400 {
            let mut bytes = whole.clone();
            let len = bytes.len() - 4;
            damage.apply(&mut bytes, len);
            fs::write(&path, bytes).unwrap();
            let _ = GenerationDefaults::load(&path);
            match Tokenizer::load(&path) {
                Ok(tokenizer) => {
                    num_loaded += 1;
                    let ids = tokenizer.encode("Hello  <|start|> wörld\n<tool>", true).unwrap_or_default();
                    tokenizer.decode(&ids, false);
                }
                Err(error) => {
                    num_refused += 1;
                    assert!(error.to_string().contains("model.gguf is not valid: "), "{error}");
                }
            }
        }
        assert!(num_loaded > 20 && num_refused > 20, "{name}: {num_loaded} loaded, {num_refused} refused");
    }
}
