//! Grammars that cannot be used are refused with the reason, in bounded time, and break nothing.

mod support;

use std::time::{Duration, Instant};

use baton_grammar::{GrammarError, GrammarLimits, GrammarTime, TokenMatcher, Vocabulary, VocabularyToken};
use baton_request::{GrammarKind, MAX_GRAMMAR_BYTES};
use support::{tiny, tiny_within};

#[test]
fn bad_grammars_are_refused_with_the_reason() {
    let tiny = tiny();
    let deep_lark = format!("start: {}\"a\"{}", "(".repeat(101), ")".repeat(101));
    let deep_schema = format!("{}{}", "{\"not\":".repeat(200), "}".repeat(200));
    let many_rules: String = (0..2100).map(|idx| format!("r{idx}: \"a\"\n")).collect();
    for (kind, text, reason) in [
        (GrammarKind::JsonSchema, "{", "EOF"),
        (GrammarKind::JsonSchema, "[]", "object or a boolean"),
        (GrammarKind::JsonSchema, r#"{"type": "number", "multipleOf": "x"}"#, "multipleOf"),
        (GrammarKind::JsonSchema, r#"{"type": "colour"}"#, "colour"),
        (GrammarKind::JsonSchema, r##"{"$ref": "#/$defs/none"}"##, "none"),
        (GrammarKind::JsonSchema, r#"{"$ref": "http://example.com/schema"}"#, "example.com"),
        (GrammarKind::JsonSchema, "false", "nsatisfiable"),
        (GrammarKind::JsonSchema, r#"{"type": "integer", "minimum": 3, "maximum": 2}"#, "maximum"),
        (GrammarKind::JsonSchema, &deep_schema, "recursion"),
        (GrammarKind::Regex, "(", "regex"),
        (GrammarKind::Regex, "(?<=a)b", "look"),
        (GrammarKind::Regex, &"(".repeat(200), "nested more than 100 deep"),
        (GrammarKind::Choice, "[]", "0 strings"),
        (GrammarKind::Choice, r#"["a", ""]"#, "empty"),
        (GrammarKind::Choice, r#"["a", 1]"#, "array of strings"),
        (GrammarKind::Lark, "", "start"),
        (GrammarKind::Lark, "start: other", "other"),
        (GrammarKind::Lark, "root ::= \"a\"", "write Lark"),
        (GrammarKind::Lark, &deep_lark, "nested more than 100 deep"),
        (GrammarKind::Lark, &many_rules, "2000 lines"),
    ] {
        let shown: String = text.chars().take(60).collect();
        let error = tiny.matcher(kind, text).expect_err(&shown);
        assert!(matches!(error, GrammarError::Invalid { .. }), "{shown}: {error:?}");
        let message = error.to_string();
        assert!(message.contains(reason), "{shown}: {message:?} does not say {reason:?}");
        assert!(message.len() < 600 && !message.contains('\n'), "{message:?}");
    }
    // A second time from the cache.
    tiny.matcher(GrammarKind::Regex, "(").unwrap_err();
    tiny.matcher(GrammarKind::Regex, "a+").expect("the compiler still works");
}

/// A schema with a chain of `len` references, each within `depth` times `open`.
fn references(len: usize, depth: usize, (open, close): (&str, &str)) -> String {
    let definition = |idx: usize| {
        let next = format!("{{\"$ref\":\"#/$defs/{}\"}}", idx + 1);
        format!("\"{idx}\":{}{next}{}", open.repeat(depth), close.repeat(depth))
    };
    let definitions: Vec<String> = (0..len).map(definition).collect();
    format!("{{\"$defs\":{{{},\"{len}\":{{}}}},\"$ref\":\"#/$defs/0\"}}", definitions.join(","))
}

#[test]
fn the_compiler_has_a_stack_for_the_deepest_schemas() {
    let tiny = tiny();
    let items = ("{\"items\":", "}");
    for (depth, nested) in [
        (0, items),
        (10, items),
        (100, items),
        (50, ("{\"anyOf\":[", "]}")),
        (50, ("{\"allOf\":[", "]}")),
        (50, ("{\"items\":[", "]}")),
        (50, ("{\"properties\":{\"\":", "}}")),
        (100, ("{\"additionalItems\":", "}")),
    ] {
        // As many as there may be.
        let len = (MAX_GRAMMAR_BYTES - 100) / (34 + depth * (nested.0.len() + nested.1.len()));
        let schema = references(len, depth, nested);
        assert!(schema.len() <= MAX_GRAMMAR_BYTES, "{nested:?}: {}", schema.len());
        // Refused or not, the process lives.
        let _ = tiny.matcher(GrammarKind::JsonSchema, &schema);
        let _ = tiny.matcher(GrammarKind::Lark, &format!("start: %json {schema}"));
    }
    let schema = references(30_000, 0, items);
    for (kind, text) in
        [(GrammarKind::JsonSchema, schema.clone()), (GrammarKind::Lark, format!("start: %json {schema}"))]
    {
        let error = tiny.matcher(kind, &text).expect_err("a longer one");
        assert!(error.to_string().contains("bytes, more than 262144"), "{error}");
    }
    tiny.matcher(GrammarKind::JsonSchema, &references(100, 3, items)).expect("a schema with many references");
}

#[test]
fn grammars_that_would_grow_without_bound_are_refused_or_compiled_in_time() {
    let tiny = tiny();
    let chain: String = (0..1900).map(|idx| format!("A{idx}: \"a\" A{}\n", idx + 1)).collect();
    let wide: Vec<String> = (0..3000).map(|idx| format!("\"key{idx}\": {{\"type\": \"string\"}}")).collect();
    let mut nested = r#"{"type": "string"}"#.to_owned();
    for idx in 0..60 {
        nested = format!(
            r#"{{"type": "object", "properties": {{"p{idx}": {nested}, "q": {nested_q}}}}}"#,
            nested_q = "{}"
        );
    }
    for (kind, text) in [
        (GrammarKind::Regex, "(a{1000}){1000}".to_owned()),
        (GrammarKind::Regex, "((a|b)*c){500}(a|b)*d(a|b){300}".to_owned()),
        (GrammarKind::Regex, ".*a.{40}".to_owned()),
        (GrammarKind::Lark, format!("start: A0\n{chain}A1900: \"z\"")),
        (GrammarKind::Lark, "start: start start | \"a\"".to_owned()),
        (GrammarKind::Lark, "start: a*\na: b*\nb: a | \"x\"".to_owned()),
        (
            GrammarKind::JsonSchema,
            format!("{{\"type\": \"object\", \"properties\": {{{}}}}}", wide.join(",")),
        ),
        (GrammarKind::JsonSchema, nested),
        (
            GrammarKind::JsonSchema,
            r##"{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}"##
                .to_owned(),
        ),
        (
            GrammarKind::JsonSchema,
            r##"{"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}"##.to_owned(),
        ),
        (
            GrammarKind::JsonSchema,
            format!(
                r#"{{"allOf": [{}]}}"#,
                [r#"{"anyOf": [{"minimum": 1}, {"minLength": 2}]}"#; 12].join(",")
            ),
        ),
        (GrammarKind::JsonSchema, r#"{"type": "string", "maxLength": 100000000}"#.to_owned()),
        (GrammarKind::JsonSchema, r#"{"type": "array", "minItems": 1000000}"#.to_owned()),
    ] {
        let started = Instant::now();
        let outcome = tiny.matcher(kind, &text);
        let shown: String = text.chars().take(60).collect();
        // The limit is 5 s; the rest is for a busy machine.
        assert!(started.elapsed() < Duration::from_secs(60), "{shown} took {:?}", started.elapsed());
        if let Ok(mut matcher) = outcome {
            // Going on is bounded as well: it works, or says why it does not.
            for _ in 0..20 {
                let Ok(mask) = matcher.mask() else { break };
                let Some(token) = mask.to_list().into_iter().find(|&token| token != tiny.end) else { break };
                match matcher.accept(token) {
                    Ok(()) => {}
                    Err(GrammarError::Exhausted { .. } | GrammarError::OutOfTime { .. }) => break,
                    Err(error) => panic!("{shown}: {error}"),
                }
            }
        }
    }
}

#[test]
fn a_grammar_that_takes_too_long_is_refused_and_counts_until_it_ends() {
    let limits = GrammarLimits { compile_time: Duration::ZERO, max_compiling: 1, ..GrammarLimits::default() };
    let tiny = tiny_within(limits);
    // No time is allowed, but a compiler that ends before its caller looks has still been in time: try again.
    let refused =
        (1..1000).find_map(|num| tiny.matcher(GrammarKind::Regex, &format!("(a{{{num}}}){{1000}}")).err());
    assert!(matches!(refused, Some(GrammarError::TooSlow { .. })), "{refused:?}");
    // Busy while that one is being compiled, and no longer.
    while let Err(error) = tiny.matcher(GrammarKind::Regex, "b") {
        match error {
            GrammarError::Busy { max_compiling: 1 } => std::thread::yield_now(),
            GrammarError::TooSlow { .. } => break,
            error => panic!("{error:?}"),
        }
    }
}

/// llguidance bounds the size of a step. The time of this one grows with the cube of its size: without the bound on time,
/// 400 tokens took 66 s, which the other sequences of the batch waited for.
#[test]
fn a_sequence_that_spends_too_long_on_its_grammar_ends_and_its_neighbour_goes_on() {
    let tiny = tiny();
    let ambiguous = "start: s\ns: s s s | s s | /[a-z]/";
    let token = tiny.tokenizer.encode("a", false).unwrap()[0];
    let mut matcher = tiny.matcher(GrammarKind::Lark, ambiguous).unwrap();
    let mut neighbour = tiny.matcher(GrammarKind::Regex, "[a-z]{2000}").unwrap();
    let step = |matcher: &mut TokenMatcher| matcher.mask().and_then(|_| matcher.accept(token));
    let error = (0..1000).find_map(|_| {
        step(&mut neighbour).expect("a mask costs it little");
        step(&mut matcher).err()
    });
    assert!(matches!(error, Some(GrammarError::OutOfTime { .. })), "{error:?}");
    // It stays so, whatever is asked.
    assert!(matches!(matcher.mask(), Err(GrammarError::OutOfTime { .. })));
    assert!(matches!(matcher.accept(token), Err(GrammarError::OutOfTime { .. })));
    assert!(!matcher.allows(token) && !matcher.is_complete() && matcher.forced(8).is_empty());
    step(&mut neighbour).expect("it is not charged for another's time");
}

/// After "b" the row of the parser has an item for each of the letters that may be left out, more than it may have.
#[test]
fn a_draft_that_exceeds_a_limit_fails_nothing_as_long_as_it_is_not_sampled() {
    let time = GrammarTime { ahead: Duration::from_secs(60), per_token: Duration::ZERO };
    let tiny = tiny_within(GrammarLimits { time, ..GrammarLimits::default() });
    let lark = format!("start: \"x\" (\"a\" \"yes\" | \"b\" many)\nmany: {} \"z\"", "\"c\"? ".repeat(2_500));
    let token = |text: &str| tiny.tokenizer.encode(text, false).unwrap()[0];
    let [x, a, b] = ["x", "a", "b"].map(token);
    let begun = || {
        let mut matcher = tiny.matcher(GrammarKind::Lark, &lark).unwrap();
        matcher.accept(x).unwrap();
        matcher
    };

    let mut matcher = begun();
    let expected = matcher.mask().unwrap().to_list();
    assert_eq!(matcher.num_allowed(&[b]), 1, "what a draft is cut to does not tell");
    let masks = matcher.masks(&[b]).unwrap();
    assert_eq!(masks.iter().map(|mask| mask.to_list()).collect::<Vec<_>>(), std::slice::from_ref(&expected));
    assert_eq!(matcher.mask().unwrap().to_list(), expected);
    assert!(!matcher.may_draft() && matcher.num_allowed(&[a]) == 0, "it happens once");
    matcher.accept(a).expect("as without the draft");
    for letter in tiny.tokenizer.encode("yes", false).unwrap() {
        matcher.accept(letter).unwrap();
    }
    assert!(matcher.is_complete());

    for num_drafts in [0, 1] {
        let mut matcher = begun();
        matcher.masks(&[b][..num_drafts]).unwrap();
        let error = matcher.accept(b).unwrap_err();
        assert!(matches!(&error, GrammarError::Exhausted { reason } if reason.contains("items")), "{error}");
    }
}

#[test]
fn the_cache_forgets_the_oldest() {
    let tiny = tiny_within(GrammarLimits { max_cached: 2, ..GrammarLimits::default() });
    for round in 0..3 {
        for text in ["a", "b", "c", "d"] {
            let mut matcher = tiny.matcher(GrammarKind::Regex, text).unwrap();
            let tokens = tiny.draw(&mut matcher, round, 4).expect("one letter, and the end");
            assert_eq!(tiny.text(&tokens), text);
        }
    }
}

#[test]
fn a_vocabulary_without_an_end_or_without_text_is_refused() {
    let token = |bytes: &[u8], is_special| VocabularyToken { bytes: bytes.to_vec(), is_special };
    let new =
        |tokens: Vec<VocabularyToken>, ends: &[u32]| Vocabulary::new(tokens, ends, Box::new(|_| Vec::new()));
    let error = new(vec![token(b"a", false)], &[7]).unwrap_err();
    assert!(error.to_string().contains("names no token that ends a text"), "{error}");
    let error = new(vec![token(b"<|end|>", true)], &[0]).unwrap_err();
    assert!(error.to_string().contains("no tokens of text"), "{error}");
}
