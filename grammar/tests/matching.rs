//! Texts that follow masks are texts of the grammar, however a sequence came to where it is.

mod support;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use baton_grammar::{GrammarError, GrammarLimits, MaskThread, TokenMask};
use baton_request::{Grammar, GrammarKind};
use serde_json::{Value, json};
use support::{Tiny, tiny, tiny_seeing};

const PERSON: &str = r#"{
    "type": "object", "additionalProperties": false, "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["é", "blue", "red"]}}
    }
}"#;

fn texts(tiny: &Tiny, kind: GrammarKind, text: &str) -> Vec<String> {
    let sampled = (0..30).filter_map(|seed| {
        let mut matcher = tiny.matcher(kind, text).expect(text);
        tiny.draw(&mut matcher, seed, 300).map(|tokens| tiny.text(&tokens))
    });
    let texts: Vec<String> = sampled.collect();
    assert!(texts.len() >= 20, "{} of 30 texts of {text} end", texts.len());
    texts
}

#[test]
fn texts_of_every_kind_match() {
    let tiny = tiny();
    for text in texts(&tiny, GrammarKind::JsonSchema, PERSON) {
        let person: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(person["name"].as_str().is_some_and(|name| name.chars().count() <= 12), "{text}");
        assert!(person["age"].as_u64().is_some_and(|age| age <= 150), "{text}");
        let tags = person.get("tags").map_or(&[][..], |tags| tags.as_array().unwrap());
        assert!(
            tags.len() <= 2 && tags.iter().all(|tag| ["é", "blue", "red"].map(Value::from).contains(tag))
        );
    }
    for text in texts(&tiny, GrammarKind::JsonSchema, r#"{"type": "object"}"#) {
        assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
    }
    for text in texts(&tiny, GrammarKind::Regex, r"(\+49|0)[1-9][0-9]{2,5}") {
        let digits = text.strip_prefix("+49").or_else(|| text.strip_prefix('0')).expect("a prefix");
        assert!(
            (3..=6).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit()),
            "{text}"
        );
    }
    let choices = ["yes", "no", "a \"quoted\" \\ one", "zwölf\n"];
    for text in texts(&tiny, GrammarKind::Choice, &json!(choices).to_string()) {
        assert!(choices.contains(&&*text), "{text:?}");
    }
    let sums = "start: NUMBER (\"+\" NUMBER)*\nNUMBER: /[0-9]{1,3}/";
    for text in texts(&tiny, GrammarKind::Lark, sums) {
        assert!(text.split('+').all(|number| number.parse::<u32>().is_ok_and(|n| n < 1000)), "{text}");
    }
}

#[test]
fn a_complete_text_is_followed_by_its_end_only() {
    let tiny = tiny();
    let mut matcher = tiny.matcher(GrammarKind::Choice, r#"["yes"]"#).unwrap();
    assert!(!matcher.mask().unwrap().allows(tiny.end));
    for token in tiny.tokenizer.encode("yes", false).unwrap() {
        assert!(!matcher.is_complete());
        matcher.accept(token).unwrap();
    }
    assert!(matcher.is_complete() && !matcher.has_ended());
    let mask = matcher.mask().unwrap();
    assert!(mask.allows(tiny.end) && mask.num_allowed() == 1);
    let mut row = vec![1.0; tiny.tokenizer.vocab_size() + 70];
    mask.apply_to(&mut row);
    let left: Vec<usize> = (0..row.len()).filter(|&token| row[token] > f32::NEG_INFINITY).collect();
    assert_eq!(left, [tiny.end as usize]);
    matcher.accept(tiny.end).unwrap();
    assert!(matcher.has_ended());
    matcher.accept(tiny.end).expect_err("nothing follows the end");
}

#[test]
fn a_refused_token_is_named_and_special_tokens_are_no_text() {
    let tiny = tiny();
    let letter = tiny.tokenizer.encode("x", false).unwrap()[0];
    let mut matcher = tiny.matcher(GrammarKind::Regex, "[0-9]+").unwrap();
    let beyond = tiny.tokenizer.vocab_size() as u32;
    assert_eq!((matcher.num_allowed(&[beyond]), matcher.allows(beyond)), (0, false));
    assert_eq!(matcher.accept(beyond), Err(GrammarError::Refused { token: beyond }));
    let error = matcher.accept(letter).unwrap_err();
    assert_eq!(error.to_string(), format!("token {letter} does not follow in the grammar"));
    let mask = tiny.matcher(GrammarKind::Regex, ".*").unwrap().mask().unwrap();
    for special in ["<|bos|>", "<|user|>", "<|pad|>"] {
        assert!(!mask.allows(tiny.tokenizer.token_id(special).unwrap()), "{special}");
    }
}

#[test]
fn a_token_is_allowed_where_the_mask_has_it() {
    let tiny = tiny();
    let sums = "start: NUMBER (\"+\" NUMBER)*\nNUMBER: /[0-9]{1,3}/";
    let grammars = [
        (GrammarKind::JsonSchema, PERSON),
        (GrammarKind::JsonSchema, r#"{"type": "object"}"#),
        (GrammarKind::Regex, r"(\+49|0)[1-9][0-9]{2,5}"),
        (GrammarKind::Regex, ".*"),
        (GrammarKind::Choice, r#"["yes", "yes, of course", "zwölf\n"]"#),
        (GrammarKind::Lark, sums),
    ];
    for (kind, text) in grammars {
        for seed in 0..6 {
            let mut matcher = tiny.matcher(kind, text).unwrap();
            let tokens = tiny.draw(&mut tiny.matcher(kind, text).unwrap(), seed, 60).unwrap_or_default();
            for token in tokens.into_iter().chain([tiny.end]) {
                let mask = matcher.mask().unwrap();
                for id in 0..tiny.tokenizer.vocab_size() as u32 + 2 {
                    assert_eq!(
                        matcher.allows(id),
                        mask.allows(id),
                        "token {id} of {kind:?} {text}, seed {seed}"
                    );
                }
                if mask.allows(token) {
                    matcher.accept(token).unwrap();
                }
            }
            assert!(
                !matcher.has_ended() || (0..10_000).all(|id| !matcher.allows(id)),
                "nothing follows the end"
            );
        }
    }
}

#[test]
fn masks_of_both_threads_come_back() {
    let tiny = tiny();
    let mut masks = MaskThread::default();
    // The first round tells what a mask takes. Of the second the caller computes a few.
    for round in 0..2 {
        for key in 0..1_000 {
            let text = format!("{}[0-9]{{3}}", key % 7);
            let draft = tiny.tokenizer.encode(&format!("{}1", key % 7), false).unwrap();
            masks.begin(key, tiny.matcher(GrammarKind::Regex, &text).unwrap(), &draft).unwrap();
        }
        let mut keys = Vec::new();
        let collected = masks.collect(|masked| {
            let mut matcher =
                tiny.matcher(GrammarKind::Regex, &format!("{}[0-9]{{3}}", masked.key % 7)).unwrap();
            let draft = tiny.tokenizer.encode(&format!("{}1", masked.key % 7), false).unwrap();
            let list = |masks: Vec<TokenMask>| masks.iter().map(TokenMask::to_list).collect::<Vec<_>>();
            assert_eq!(list(masked.masks.unwrap()), list(matcher.masks(&draft).unwrap()), "round {round}");
            keys.push(masked.key);
        });
        collected.unwrap();
        keys.sort_unstable();
        assert_eq!(keys, Vec::from_iter(0..1_000));
    }
}

#[test]
fn masks_of_drafts_are_those_of_tokens_one_by_one() {
    let tiny = tiny();
    for seed in 0..20 {
        let mut drawing = tiny.matcher(GrammarKind::JsonSchema, PERSON).unwrap();
        let Some(tokens) = tiny.draw(&mut drawing, seed, 300) else { continue };
        let mut drafting = tiny.matcher(GrammarKind::JsonSchema, PERSON).unwrap();
        let mut stepping = tiny.matcher(GrammarKind::JsonSchema, PERSON).unwrap();
        for draft in tokens.chunks(5) {
            // A draft that goes wrong is cut; what was verified of it leaves no trace.
            let wrong = [draft, &[tiny.end, 3]].concat();
            assert_eq!(drafting.num_allowed(&wrong), draft.len());
            let masks = drafting.masks(draft).unwrap();
            for (idx, mask) in masks.iter().enumerate() {
                let expected = format!("{:?}", stepping.mask().unwrap().to_list());
                assert_eq!(format!("{:?}", mask.to_list()), expected, "seed {seed}");
                if let Some(&token) = draft.get(idx) {
                    stepping.accept(token).unwrap();
                }
            }
            draft.iter().for_each(|&token| drafting.accept(token).unwrap());
        }
        drafting.accept(tiny.end).unwrap();
    }
}

#[test]
fn nothing_is_drafted_where_tokens_cannot_be_taken_back() {
    let tiny = tiny();
    let text = "The name of the cat is Tom";
    let tokens = tiny.tokenizer.encode(text, false).unwrap();
    for (attribute, can_draft) in [("", true), ("[max_tokens=9]", false), ("[stop=\".\"]", false)] {
        let lark = format!("start: \"The name of the cat is \" name\nname{attribute}: /[A-Za-z ]+/");
        let mut matcher = tiny.matcher(GrammarKind::Lark, &lark).unwrap();
        assert_eq!(!matcher.forced(16).is_empty(), can_draft, "{attribute}");
        for (idx, &token) in tokens.iter().enumerate() {
            let num_drafts = matcher.num_allowed(&tokens[idx..]);
            assert_eq!(num_drafts > 0, can_draft, "{attribute}");
            let masks = matcher.masks(&tokens[idx..][..num_drafts]).expect(attribute);
            assert!(masks[0].allows(token), "{attribute}");
            matcher.accept(token).expect(attribute);
        }
    }
}

#[test]
fn a_matcher_is_rebuilt_from_the_tokens_so_far() {
    let tiny = tiny();
    let grammar = Grammar::new(GrammarKind::JsonSchema, PERSON);
    for seed in 0..10 {
        let mut matcher = tiny.compiler.matcher(&grammar, &[]).unwrap();
        let Some(mut tokens) = tiny.draw(&mut matcher, seed, 300) else { continue };
        tokens.push(tiny.end);
        let mut going = tiny.compiler.matcher(&grammar, &[]).unwrap();
        for num_tokens in 0..tokens.len() {
            let mut rebuilt = tiny.compiler.matcher(&grammar, &tokens[..num_tokens]).unwrap();
            assert_eq!(rebuilt.mask().unwrap().to_list(), going.mask().unwrap().to_list());
            going.accept(tokens[num_tokens]).unwrap();
        }
        assert!(tiny.compiler.matcher(&grammar, &tokens).unwrap().has_ended());
    }
}

#[test]
fn forced_text_is_proposed_as_the_tokenizer_writes_it() {
    let tiny = tiny();
    let mut matcher = tiny.matcher(GrammarKind::Regex, r#"\{"orange button": (yes|no)\}"#).unwrap();
    let mut alone = tiny.matcher(GrammarKind::Regex, r#"\{"orange button": (yes|no)\}"#).unwrap();
    let forced = matcher.forced(100);
    let text = tiny.text(&forced);
    assert!(text.len() > 12 && r#"{"orange button": "#.starts_with(&text), "{text:?}");
    assert_eq!(matcher.num_allowed(&forced), forced.len());
    assert_eq!(forced, tiny.tokenizer.encode(r#"{"orange button": yes}"#, false).unwrap()[..forced.len()]);
    // Proposing does not go on.
    assert_eq!(matcher.forced(100), forced);
    assert_eq!(matcher.forced(2), forced[..2]);
    // It changes no mask: other tokens of the same text are allowed as well.
    for (idx, &token) in forced.iter().enumerate() {
        let mask = matcher.mask().unwrap();
        assert_eq!(mask.to_list(), alone.mask().unwrap().to_list(), "{idx}");
        assert!(mask.allows(token));
        matcher.accept(token).unwrap();
        alone.accept(token).unwrap();
        matcher.forced(3);
    }
}

#[test]
fn of_a_long_forced_text_so_much_is_tokenised_as_is_wanted() {
    let longest = Arc::new(AtomicUsize::new(0));
    let seen = longest.clone();
    let see = move |text: &str| {
        seen.fetch_max(text.len(), Ordering::Relaxed);
    };
    let tiny = tiny_seeing(GrammarLimits::default(), see);
    let text: String = (0..200).map(|idx| format!("The garden of house {idx} is green. ")).collect();
    let mut matcher = tiny.matcher(GrammarKind::Choice, &json!([text]).to_string()).unwrap();
    let mut at = 0;
    for step in 0..60 {
        // The same drafts as of the whole text, also where the model has cut it into other tokens.
        let whole = tiny.tokenizer.encode(&text[at..], false).unwrap();
        let forced = matcher.forced(16);
        assert_eq!(forced, whole[..16], "step {step}");
        matcher.masks(&forced[..step % 3]).unwrap();
        let letter = tiny.tokenizer.encode(&text[at..=at], false).unwrap();
        let accepted = if step % 2 == 0 { &letter[..] } else { &forced[..step % 17] };
        accepted.iter().for_each(|&token| matcher.accept(token).unwrap());
        at += tiny.text(accepted).len();
    }
    let longest = longest.load(Ordering::Relaxed);
    assert!(longest > 0 && longest < text.len() / 5, "{longest} of {} bytes", text.len());
}
