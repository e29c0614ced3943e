//! Cases in the manner of the public JSON-Schema test suite, one or more for each keyword: a schema is compiled, and then
//! takes and refuses the right texts, or it is refused with a reason.

mod support;

use baton_grammar::GrammarError;
use baton_request::GrammarKind;
use support::{Tiny, tiny};

/// A schema, texts that are valid under it, and texts that are not. Properties are in the order of the schema.
type Case = (&'static str, &'static [&'static str], &'static [&'static str]);

const COMPILED: &[Case] = &[
    ("{}", &["1", "null", "[]", r#"{"a": [1]}"#], &["nul", "{", ""]),
    ("true", &["1", r#""x""#], &[]),
    (r#"{"type": "null"}"#, &["null"], &["0", "false", r#""""#]),
    (r#"{"type": "boolean"}"#, &["true", "false"], &["0", "null", r#""true""#]),
    (r#"{"type": "integer"}"#, &["0", "-7", "12345"], &["1.5", "01", r#""1""#]),
    (r#"{"type": "number"}"#, &["0", "-7.25", "1e9"], &[".5", "1.", "NaN"]),
    (r#"{"type": "string"}"#, &[r#""""#, r#""é\n""#], &["x", r#"""#, "1"]),
    (r#"{"type": ["integer", "null"]}"#, &["1", "null"], &["true", "1.5"]),
    (r#"{"type": "array"}"#, &["[]", r#"[1, "a", []]"#], &["{}", "[1,]"]),
    (r#"{"type": "object"}"#, &["{}", r#"{"a": 1}"#], &["[]", "{a: 1}"]),
    (r#"{"const": 2}"#, &["2"], &["3", "\"2\""]),
    (r#"{"const": 9007199254740992}"#, &["9007199254740992"], &["9007199254740993", "9007199254740991"]),
    (r#"{"const": {"a": [1, null]}}"#, &[r#"{"a":[1,null]}"#], &["{}", r#"{"a":[1]}"#]),
    (r#"{"enum": [1, "a", null, [2]]}"#, &["1", r#""a""#, "null", "[2]"], &["2", r#""b""#]),
    (r#"{"type": "integer", "minimum": 3, "maximum": 12}"#, &["3", "9", "12"], &["2", "13", "-3"]),
    (r#"{"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}"#, &["1", "2"], &["0", "3"]),
    (r#"{"type": "number", "minimum": -1.5, "maximum": 1.5}"#, &["-1.5", "0", "1.25"], &["-1.6", "2"]),
    (r#"{"type": "integer", "multipleOf": 5}"#, &["0", "15"], &["7", "1"]),
    (
        r#"{"type": "string", "minLength": 2, "maxLength": 3}"#,
        &[r#""ab""#, r#""abc""#],
        &[r#""a""#, r#""abcd""#],
    ),
    (r#"{"type": "string", "pattern": "^a+b$"}"#, &[r#""aab""#], &[r#""b""#, r#""aabb""#]),
    (r#"{"type": "string", "pattern": "b"}"#, &[r#""abc""#], &[r#""ac""#]),
    (r#"{"type": "string", "format": "date"}"#, &[r#""2026-11-23""#], &[r#""23.11.2026""#]),
    (
        r#"{"type": "string", "format": "uuid"}"#,
        &[r#""2eb8aa08-aa98-11ea-b4aa-73b441d16380""#],
        &[r#""2eb8aa08""#],
    ),
    // Formats of Pydantic and OpenAPI are remarks. A property may be called so.
    (r#"{"type": "string", "format": "path"}"#, &[r#""/tmp""#], &["7"]),
    (
        r#"{"type": "object", "properties": {"format": {"type": "integer", "format": "int32"}}, "required": ["format"]}"#,
        &[r#"{"format": 7}"#],
        &[r#"{"format": "7"}"#],
    ),
    // Zod writes these for records.
    (
        r#"{"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}, "dependencies": {}}"#,
        &["{}", r#"{"a": 1}"#],
        &[r#"{"a": "1"}"#],
    ),
    (r#"{"enum": [{"format": "colour"}]}"#, &[r#"{"format": "colour"}"#], &["{}"]),
    (r#"{"type": "string", "format": "ipv4"}"#, &[r#""10.0.3.7""#], &[r#""10.0.3""#, r#""256.0.0.1""#]),
    (r#"{"items": {"type": "integer"}, "type": "array"}"#, &["[]", "[1, 2]"], &[r#"["a"]"#]),
    (r#"{"type": "array", "minItems": 1, "maxItems": 2}"#, &["[1]", "[1, 2]"], &["[]", "[1, 2, 3]"]),
    (
        r#"{"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": false, "minItems": 2}"#,
        &[r#"[1, "a"]"#],
        &["[1, 2]", r#"[1, "a", 2]"#],
    ),
    (
        r#"{"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"], "additionalProperties": false}"#,
        &[r#"{"a": 1}"#, r#"{"a": 1, "b": null}"#],
        &["{}", r#"{"b": 1}"#, r#"{"a": 1, "c": 2}"#, r#"{"a": "x"}"#],
    ),
    (
        r#"{"type": "object", "additionalProperties": {"type": "integer"}}"#,
        &["{}", r#"{"x": 1, "y": 2}"#],
        &[r#"{"x": "a"}"#],
    ),
    (
        r#"{"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": false}"#,
        &["{}", r#"{"n1": 1}"#],
        &[r#"{"n1": "a"}"#, r#"{"x": 1}"#],
    ),
    (r#"{"anyOf": [{"type": "integer"}, {"type": "string"}]}"#, &["1", r#""a""#], &["null"]),
    (r#"{"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 3}]}"#, &["1", "3"], &["0", "4"]),
    (r#"{"oneOf": [{"type": "integer"}, {"type": "string"}]}"#, &["1", r#""a""#], &["null"]),
    (r##"{"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}"##, &["1"], &[r#""a""#]),
    // Keys that a JSON pointer escapes.
    (
        r##"{"$defs": {"a/b~": {"type": "integer"}, "é %": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/a~1b~0"}, {"$ref": "#/$defs/%C3%A9%20%25"}]}"##,
        &["1", "null"],
        &[r#""a""#],
    ),
    (
        r##"{"$defs": {"t": {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}, "additionalProperties": false}}, "$ref": "#/$defs/t"}"##,
        &["{}", r#"{"next": {"next": {}}}"#],
        &[r#"{"next": 1}"#, r#"{"last": {}}"#],
    ),
    (
        r#"{"title": "t", "description": "d", "default": 1, "examples": [2], "type": "integer"}"#,
        &["5"],
        &["null"],
    ),
    (r#"{"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "null"}"#, &["null"], &["1"]),
];

/// What llguidance does not compile: never ignored.
const REFUSED: &[&str] = &[
    r#"{"not": {"type": "integer"}}"#,
    r#"{"if": {"const": 1}, "then": {"const": 1}, "else": {"const": 2}}"#,
    r#"{"type": "array", "uniqueItems": true}"#,
    r#"{"type": "array", "contains": {"type": "integer"}}"#,
    r#"{"dependentRequired": {"a": ["b"]}}"#,
    r#"{"dependentSchemas": {"a": {"required": ["b"]}}}"#,
    r#"{"unevaluatedProperties": false}"#,
    r##"{"$dynamicRef": "#node"}"##,
    r#"{"type": "string", "format": "iri"}"#,
    r#"{"properties": {"format": {"anyOf": [{"type": "string", "format": "regex"}]}}}"#,
    r#"{"type": "string", "pattern": "(?=a)b"}"#,
    r#"{"type": "string", "minLength": 3, "maxLength": 2}"#,
    r#"{"enum": []}"#,
    r#"{"allOf": [{"type": "string"}, {"type": "integer"}]}"#,
    r#"{"type": 7}"#,
    r#"{"properties": []}"#,
    r#"{"required": "a"}"#,
    r#"{"minimum": "1", "type": "integer"}"#,
    r#"{"$ref": 1}"#,
    "false",
];

/// Whether `text` is a whole text of the schema.
fn takes(tiny: &Tiny, schema: &str, text: &str) -> bool {
    let mut matcher = tiny.matcher(GrammarKind::JsonSchema, schema).expect(schema);
    let tokens = tiny.tokenizer.encode(text, false).expect("it is text");
    tokens.into_iter().all(|token| matcher.accept(token).is_ok()) && matcher.is_complete()
}

#[test]
fn compiled_schemas_take_valid_texts_and_no_others() {
    let tiny = tiny();
    for &(schema, valid, invalid) in COMPILED {
        for text in valid {
            assert!(takes(&tiny, schema, text), "{schema} refuses {text}");
        }
        for text in invalid {
            assert!(!takes(&tiny, schema, text), "{schema} takes {text}");
        }
    }
}

/// The compiler would round them.
#[test]
fn constants_beyond_2_to_the_53_are_refused_also_within_lark() {
    let tiny = tiny();
    for (kind, text, number) in [
        (GrammarKind::JsonSchema, r#"{"const": 9007199254740993}"#, "9007199254740993"),
        (
            GrammarKind::JsonSchema,
            r#"{"items": {"enum": [1, -9223372036854775807]}}"#,
            "-9223372036854775807",
        ),
        (GrammarKind::JsonSchema, r#"{"const": 100000000000000000000}"#, "e+20"),
        (GrammarKind::Lark, r#"start: "%json" | %json {"const": 9007199254740993}"#, "9007199254740993"),
    ] {
        match tiny.matcher(kind, text) {
            Err(GrammarError::Invalid { reason, .. }) => {
                assert!(reason.contains(number), "{text}: {reason:?}")
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn other_schemas_are_refused_with_a_reason() {
    let tiny = tiny();
    for schema in REFUSED {
        match tiny.matcher(GrammarKind::JsonSchema, schema) {
            Err(GrammarError::Invalid { reason, .. }) => assert!(reason.len() > 5, "{schema}: {reason:?}"),
            other => panic!("{schema}: {other:?}"),
        }
    }
}
