use proptest::{collection::vec, prelude::*, sample::select};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::*;
use crate::{splitter::Splitter as Published, testing};

/// What regular expressions of tokenizers tell apart, and what becomes another text when it is normalised.
const PARTS: &[&str] = &[
    "a",
    "he",
    "hello",
    "Hello",
    "HE",
    "'s",
    "'S",
    "'ll",
    "'",
    "1",
    "12",
    "1234",
    "٣",
    "½",
    "Ⅷ",
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\n\n",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "\u{85}",
    "\u{200b}",
    ".",
    "?!",
    "...",
    "/",
    "$",
    "+",
    "=",
    "^",
    "~",
    "_",
    "-",
    "#",
    "é",
    "e\u{301}",
    "\u{301}",
    "Å",
    "ſ",
    "ß",
    "İ",
    "ǅ",
    "ʰ",
    "日本",
    "ひら",
    "カナ",
    "한글",
    "\u{1112}\u{1161}",
    "🙂",
    "👩\u{200d}👩",
    "\u{fffd}",
    "\0",
    "<|start|>",
    "<|end|>",
    "<|",
    "|>",
    "<tool>",
    "<tool>x",
    "<",
    ">",
    "<pad>",
];

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        vec(select(PARTS), 0..40).prop_map(|parts| parts.concat()),
        "\\PC{0,40}",
        "[ \\t\\r\\na-c1!]{0,40}"
    ]
}

/// The shape of Llama 3, with another way to split, and added tokens of all kinds.
fn described(pre_tokenizer: &Value, normalizer: &Value) -> Tokenizer {
    let mut json = testing::byte_level_json();
    let next = json["model"]["vocab"].as_object().unwrap().len() + 2;
    let plain = |offset: usize, content: &str| {
        json!({"id": next + offset, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": true, "special": false})
    };
    let mut greedy = plain(2, "<pad>");
    greedy["rstrip"] = json!(true);
    let added = json["added_tokens"].as_array_mut().unwrap();
    added.extend([plain(0, "<tool>"), plain(1, "<tool>x"), plain(3, "Å"), greedy]);
    json["pre_tokenizer"] = pre_tokenizer.clone();
    json["normalizer"] = normalizer.clone();
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "e", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"b": {"id": "b", "ids": [3, 4], "tokens": ["b", "b"]}, "e": {"id": "e", "ids": [5], "tokens": ["e"]}},
    });
    json["truncation"] = Value::Null;
    json.to_string().parse().unwrap()
}

fn check(tokenizer: &Tokenizer, pieces: &PieceEncoder, text: &str) -> Result<(), TestCaseError> {
    for special in [false, true] {
        let plain = tokenizer.encode_fast(text, special).unwrap().get_ids().to_vec();
        if let Some(ids) = pieces.encode(tokenizer, text, special) {
            prop_assert_eq!(ids.unwrap(), plain, "{:?}", text);
        } else {
            prop_assert!(text.contains("<pad>"), "{:?} is left to the tokenizer", text);
        }
    }
    Ok(())
}

#[test]
fn ids_are_those_of_the_tokenizer() {
    let nfc = json!({"type": "NFC"});
    let both = json!({"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "NFC"}]});
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let mut tokenizers = vec![described(&bytes, &Value::Null)];
    for name in Published::names() {
        let pre_tokenizer = serde_json::to_value(Published::named(name).unwrap().pre_tokenizer()).unwrap();
        let normalizers: &[&Value] = if name == "qwen2" { &[&nfc, &both] } else { &[&Value::Null] };
        tokenizers.extend(normalizers.iter().map(|normalizer| described(&pre_tokenizer, normalizer)));
    }
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny/tokenizer.json");
    tokenizers.push(Tokenizer::from_file(tiny).unwrap());
    let encoders: Vec<_> =
        tokenizers.iter().filter_map(|tokenizer| Some((tokenizer, PieceEncoder::of(tokenizer)?))).collect();
    // The pattern of files without a name ends otherwise.
    assert_eq!(encoders.len(), tokenizers.len() - 1);
    proptest!(ProptestConfig::with_cases(400), |(text in text())| {
        for (tokenizer, pieces) in &encoders {
            check(tokenizer, pieces, &text)?;
        }
    });
}

#[test]
fn patterns_that_would_mean_something_else_are_refused() {
    for pattern in [
        r"\p{L}++|\s+",
        r"[^\r\n]?+\p{L}+",
        r"a{2}+",
        r"\s+(?!\S)",
        r"(?<=a)b",
        r"\bword\b",
        r"^a",
        r"(a)\1",
        r"(?>a+)b",
    ] {
        assert!(Splitter::new(pattern).is_none(), "{pattern}");
    }
    for pattern in [GPT2, r"\p{N}{1,3}", r"a+?b", r"[+?]+", r"\++"] {
        assert!(Splitter::new(pattern).is_some(), "{pattern}");
    }
    let empty = json!({"type": "Split", "pattern": {"Regex": "x*"}, "behavior": "Isolated", "invert": false});
    let tokenizer = described(&json!({"type": "Sequence", "pretokenizers": [empty]}), &Value::Null);
    assert!(
        PieceEncoder::of(&tokenizer).unwrap().encode(&tokenizer, "ax", false).is_none(),
        "an empty match"
    );
}

#[test]
fn other_ways_to_tokenise_are_left_to_the_tokenizer() {
    for tokenizer in [testing::byte_fallback(), testing::word_piece()] {
        assert!(!tokenizer.encodes_by_pieces());
    }
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    assert!(PieceEncoder::of(&described(&bytes, &Value::Null)).is_none());
}

#[test]
fn a_tokenizer_that_forgets_texts_gives_the_same_ids_and_keeps_no_piece() {
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let plain = described(&bytes, &Value::Null);
    let mut pieces = PieceEncoder::of(&plain).unwrap();
    let encode =
        |pieces: &PieceEncoder| pieces.encode(&plain, "the same the same words", false).unwrap().unwrap();
    let num_kept = |pieces: &PieceEncoder| -> usize {
        let idle = pieces.idle.lock().unwrap();
        idle.iter().map(|memory| memory.pieces.recent.len() + memory.pieces.older.len()).sum()
    };
    let ids = encode(&pieces);
    assert!(num_kept(&pieces) > 0);
    pieces.forgets_texts = true;
    assert_eq!(encode(&pieces), ids);
    assert_eq!(num_kept(&pieces), 0);
}

#[test]
fn what_was_not_used_for_a_generation_is_forgotten() {
    let mut pieces = Pieces::default();
    let mut num_found = 0;
    let mut look_up = |name: &str| {
        let mut ids = Vec::new();
        let found = pieces.append(name, &mut ids, || {
            num_found += 1;
            Ok(Box::new([name.len() as u32]))
        });
        assert!(found.is_ok() && ids == [name.len() as u32]);
        (num_found, pieces.recent.len() + pieces.older.len())
    };
    for idx in 0..3 * MAX_KEPT {
        look_up(&format!("piece {idx}"));
        let (_, num_kept) = look_up("often used");
        assert!(num_kept <= 2 * MAX_KEPT);
    }
    assert_eq!(look_up("often used").0, 3 * MAX_KEPT + 1, "it was found once");
    assert_eq!(look_up("piece 0").0, 3 * MAX_KEPT + 2, "it was found again");
    let long = "x".repeat(MAX_KEPT_BYTES + 1);
    assert_eq!((look_up(&long).0, look_up(&long).0), (3 * MAX_KEPT + 3, 3 * MAX_KEPT + 4));
}
