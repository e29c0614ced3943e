//! Grammars of clients: compiled, and followed for some tokens.
//!
//! The mask before each token is what is accepted: what it has, and nothing else. A grammar may become too complex at any token.
#![no_main]

use std::sync::LazyLock;
use std::time::Duration;

use arbitrary::Arbitrary;
use baton_fuzz::json::Json;
use baton_fuzz::pick;
use baton_grammar::{GrammarCompiler, GrammarError, GrammarLimits, GrammarTime, Vocabulary, VocabularyToken};
use baton_request::{Grammar, GrammarKind};
use libfuzzer_sys::fuzz_target;

const MAX_STEPS: usize = 16;

/// The token that ends a text. One for each byte of UTF-8 follows, and then the longer ones.
const END: u32 = 0;
const NUM_BYTES: u8 = 0xf5;
const LONGER: &[&str] = &[
    "{\"", "\"}", "\":", "\": ", "\", \"", "\",", "[1", "]}", "}}", "[[", "\\u00", "true", "null", "false",
    "ab", "xy", "aa", "00", "12", "-1", "1e", ".5", "yes", "no", "é", "zwölf", "  ", "\n\n",
];
const NUM_TOKENS: u32 = 1 + NUM_BYTES as u32 + LONGER.len() as u32;

/// Fields and texts of schemas.
const WORDS: &[&str] = &[
    "type",
    "object",
    "array",
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
    "pattern",
    "format",
    "date-time",
    "uuid",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "$ref",
    "#",
    "#/$defs/a",
    "$defs",
    "a",
    "b",
    "é",
    "^a+$",
    "[0-9]{2}",
];

/// Of regular expressions and of grammars in Lark.
const PIECES: &[&str] = &[
    "a",
    "b",
    "é",
    "1",
    ".",
    "\\d",
    "\\w",
    "\\n",
    "[a-z]",
    "[^\"]",
    "(",
    "(?:",
    "(?i)",
    ")",
    "|",
    "&",
    "~",
    "*",
    "+",
    "?",
    "{2}",
    "{1,3}",
    "{0,}",
    "^",
    "$",
    "start: ",
    "x: ",
    "X: ",
    "x",
    "X",
    "\"a\"",
    "\"ab\"i",
    "/[0-9]+/",
    "/(?s:.*)/",
    "%ignore /\\s+/",
    "%json {\"type\": \"integer\"}",
    "%regex {\"substring_chars\": \"ab\"}",
    "[max_tokens=2]: ",
    "[lazy]: ",
    "[stop=\"b\"]: ",
    " ",
    "\n",
    "\n  | ",
];

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    steps: Vec<Step>,
    source: Source<'a>,
}

/// The next token.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Step {
    /// One of the mask.
    Allowed(u16),
    /// Any, or an id that no token has.
    Any(u16),
}

#[derive(Arbitrary, Debug)]
enum Source<'a> {
    Text { kind: u8, text: &'a str },
    Schema(Json),
    Choice(Vec<String>),
    Regex(Vec<Piece<'a>>),
    Lark(Vec<Piece<'a>>),
}

#[derive(Arbitrary, Debug)]
enum Piece<'a> {
    Known(u8),
    Text(&'a str),
}

static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    // Enough with a sanitizer, and less than an input may take.
    let time = GrammarTime { ahead: Duration::from_secs(5), per_token: Duration::ZERO };
    GrammarCompiler::new(vocabulary, GrammarLimits { time, ..GrammarLimits::default() })
});

fn vocabulary() -> Result<Vocabulary, GrammarError> {
    let end = VocabularyToken { bytes: b"<end>".to_vec(), is_special: true };
    let texts =
        (0..NUM_BYTES).map(|byte| vec![byte]).chain(LONGER.iter().map(|text| text.as_bytes().to_vec()));
    let tokens = texts.map(|bytes| VocabularyToken { bytes, is_special: false });
    let encode = |text: &str| -> Vec<u32> { text.bytes().map(|byte| 1 + u32::from(byte)).collect() };
    Vocabulary::new([end].into_iter().chain(tokens), &[END], Box::new(encode))
}

fuzz_target!(|input: Input<'_>| {
    let Ok(mut matcher) = COMPILER.matcher(&input.source.grammar(), &[]) else { return };
    for step in input.steps.iter().take(MAX_STEPS) {
        let Ok(mask) = matcher.mask() else { return };
        for token in 0..NUM_TOKENS + 2 {
            if matcher.allows(token) != mask.allows(token) {
                assert!(matcher.mask().is_err(), "the mask is wrong about token {token}");
                return;
            }
        }
        let token = match *step {
            Step::Allowed(idx) => *pick(&mask.to_list(), idx),
            Step::Any(token) => u32::from(token) % (NUM_TOKENS + 2),
        };
        match matcher.accept(token) {
            Ok(()) => assert!(mask.allows(token), "token {token} is accepted, and is not in the mask"),
            Err(GrammarError::Refused { .. }) => {
                assert!(!mask.allows(token), "token {token} is in the mask, and is not accepted");
            }
            Err(_) => return,
        }
        if matcher.has_ended() {
            return;
        }
    }
});

impl Source<'_> {
    fn grammar(&self) -> Grammar {
        match self {
            Source::Text { kind, text } => {
                let kinds =
                    [GrammarKind::JsonSchema, GrammarKind::Regex, GrammarKind::Choice, GrammarKind::Lark];
                Grammar::new(*pick(&kinds, *kind), *text)
            }
            Source::Schema(schema) => Grammar::new(GrammarKind::JsonSchema, schema.value(WORDS).to_string()),
            Source::Choice(texts) => {
                Grammar::new(GrammarKind::Choice, serde_json::Value::from(texts.clone()).to_string())
            }
            Source::Regex(pieces) => Grammar::new(GrammarKind::Regex, text_of(pieces)),
            Source::Lark(pieces) => Grammar::new(GrammarKind::Lark, text_of(pieces)),
        }
    }
}

fn text_of(pieces: &[Piece<'_>]) -> String {
    let texts = pieces.iter().map(|piece| match piece {
        Piece::Known(idx) => *pick(PIECES, *idx),
        Piece::Text(text) => text,
    });
    texts.collect()
}
