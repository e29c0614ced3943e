//! From a grammar's text to what llguidance compiles. What would need more than the compiler may use is refused here.

use baton_request::{Grammar, GrammarKind, MAX_GRAMMAR_BYTES, output_schema, rounded_constant};
use llguidance::api::TopLevelGrammar;
use serde_json::Value;

use crate::error::GrammarError;

/// Brackets inside brackets. The parsers are recursive.
const MAX_DEPTH: usize = 100;

/// Rules of a grammar in Lark. Terminals are expanded recursively.
const MAX_RULES: usize = 2_000;

/// Strings of a choice.
const MAX_CHOICES: usize = 10_000;

/// What llguidance compiles for `grammar`.
pub(crate) fn parse(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    let (kind, text) = (grammar.kind, &*grammar.text);
    let invalid = |reason: &str| GrammarError::invalid(kind, reason);
    if grammar.is_too_long() {
        return Err(invalid(&format!("it has {} bytes, more than {MAX_GRAMMAR_BYTES}", text.len())));
    }
    match kind {
        GrammarKind::JsonSchema => {
            let schema: Value = serde_json::from_str(text).map_err(|error| invalid(&error.to_string()))?;
            if !(schema.is_object() || schema.is_boolean()) {
                return Err(invalid("a schema is a JSON object or a boolean"));
            }
            check_numbers(kind, &schema)?;
            Ok(TopLevelGrammar::from_json_schema(output_schema(schema)))
        }
        GrammarKind::Regex => {
            check_depth(kind, text)?;
            Ok(TopLevelGrammar::from_regex(text))
        }
        GrammarKind::Choice => {
            let choices: Vec<String> =
                serde_json::from_str(text).map_err(|_| invalid("it is not a JSON array of strings"))?;
            if choices.is_empty() || choices.len() > MAX_CHOICES {
                return Err(invalid(&format!("it has {} strings, not 1 to {MAX_CHOICES}", choices.len())));
            }
            if choices.iter().any(String::is_empty) {
                return Err(invalid("a string is empty"));
            }
            let choices: Vec<String> =
                choices.iter().map(|choice| Value::from(&**choice).to_string()).collect();
            Ok(TopLevelGrammar::from_lark(format!("start: {}", choices.join("\n     | "))))
        }
        GrammarKind::Lark => {
            if text.contains("::=") {
                return Err(invalid("it is written with `::=`; write Lark: `start: \"yes\" | \"no\"`"));
            }
            check_depth(kind, text)?;
            if text.lines().count() > MAX_RULES {
                return Err(invalid(&format!("it has more than {MAX_RULES} lines")));
            }
            schemas(text).try_for_each(|schema| check_numbers(kind, &schema))?;
            Ok(TopLevelGrammar::from_lark(text.to_owned()))
        }
    }
}

/// The JSON schemas in a grammar in Lark.
fn schemas(lark: &str) -> impl Iterator<Item = Value> {
    lark.match_indices("%json").filter_map(move |(idx, mark)| {
        let rest = &lark[idx + mark.len()..];
        serde_json::Deserializer::from_str(rest).into_iter::<Value>().next()?.ok()
    })
}

/// The compiler rounds numbers: it would demand another one than the client.
fn check_numbers(kind: GrammarKind, schema: &Value) -> Result<(), GrammarError> {
    let Some(number) = rounded_constant(schema) else { return Ok(()) };
    let reason =
        format!("the number {number} in const or enum may be rounded, as it is beyond 2^53: use a string");
    Err(GrammarError::invalid(kind, reason))
}

fn check_depth(kind: GrammarKind, text: &str) -> Result<(), GrammarError> {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if deepest > MAX_DEPTH {
        return Err(GrammarError::invalid(kind, format!("brackets are nested more than {MAX_DEPTH} deep")));
    }
    Ok(())
}
