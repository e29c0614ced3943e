//! Fields that say what the output must match: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

use baton_request::{Grammar, GrammarKind};
use serde_json::{Map, Value, json};

use crate::refusal::OutputRefusal;

/// The fields of a request; `None` and `null` are absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutputFields<'a> {
    /// `{"type": "text" | "json_object" | "json_schema", ...}`.
    pub response_format: Option<&'a Value>,
    /// `{"json" | "regex" | "choice" | "grammar": ...}`, or `{"json_object": true}`.
    pub structured_outputs: Option<&'a Value>,
    /// A schema, as an object or as text.
    pub guided_json: Option<&'a Value>,
    /// A regular expression.
    pub guided_regex: Option<&'a Value>,
    /// A list of strings.
    pub guided_choice: Option<&'a Value>,
    /// A grammar in Lark.
    pub guided_grammar: Option<&'a Value>,
}

/// A grammar, and the field that asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedGrammar {
    /// For errors.
    pub param: &'static str,
    /// What the output must match.
    pub grammar: Grammar,
}

impl OutputFields<'_> {
    /// The grammar that the fields ask for, if they ask for one.
    ///
    /// # Errors
    /// When a field is not what it should be, or two of them ask.
    pub fn grammar(&self) -> Result<Option<AskedGrammar>, OutputRefusal> {
        let guided =
            |param, value: Option<&Value>, kind| present(value).map(|value| of_kind(param, value, kind));
        let all = [
            present(self.response_format).map(response_format),
            present(self.structured_outputs).map(structured_outputs),
            guided("guided_json", self.guided_json, GrammarKind::JsonSchema),
            guided("guided_regex", self.guided_regex, GrammarKind::Regex),
            guided("guided_choice", self.guided_choice, GrammarKind::Choice),
            guided("guided_grammar", self.guided_grammar, GrammarKind::Lark),
        ];
        let mut asked: Option<AskedGrammar> = None;
        for grammar in all.into_iter().flatten() {
            let Some(next) = grammar? else { continue };
            if let Some(first) = &asked {
                let message = format!("{} asks for a format already", first.param);
                return Err(OutputRefusal::new(next.param, message));
            }
            asked = Some(next);
        }
        Ok(asked)
    }
}

type Asked = Result<Option<AskedGrammar>, OutputRefusal>;

fn present(value: Option<&Value>) -> Option<&Value> {
    value.filter(|value| !value.is_null())
}

fn asked(param: &'static str, kind: GrammarKind, text: impl AsRef<str>) -> Asked {
    Ok(Some(AskedGrammar { param, grammar: Grammar::new(kind, text.as_ref()) }))
}

fn response_format(value: &Value) -> Asked {
    let param = "response_format";
    let refused = |at: &str, message: &str| Err(OutputRefusal::new(format!("{param}{at}"), message));
    let Some(fields) = value.as_object() else { return refused("", "it is not an object") };
    match fields.get("type").and_then(Value::as_str) {
        Some("text") => only(param, fields, &["type"]).map(|()| None),
        Some("json_object") => {
            only(param, fields, &["type"])?;
            asked(param, GrammarKind::JsonSchema, r#"{"type":"object"}"#)
        }
        Some("json_schema") => {
            only(param, fields, &["type", "json_schema"])?;
            let Some(named) = fields.get("json_schema").and_then(Value::as_object) else {
                return refused(".json_schema", "it is missing or not an object");
            };
            // `strict` or not: the output always matches.
            only("response_format.json_schema", named, &["name", "description", "schema", "strict"])?;
            match named.get("schema") {
                Some(schema) if !schema.is_null() => of_kind(param, schema, GrammarKind::JsonSchema),
                _ => refused(".json_schema.schema", "it is missing"),
            }
        }
        Some("structural_tag") => refused(".type", "structural_tag is not built; use tools or a grammar"),
        _ => refused(".type", "it is not \"text\", \"json_object\" or \"json_schema\""),
    }
}

fn structured_outputs(value: &Value) -> Asked {
    let param = "structured_outputs";
    let kinds = [
        ("json", GrammarKind::JsonSchema),
        ("regex", GrammarKind::Regex),
        ("choice", GrammarKind::Choice),
        ("grammar", GrammarKind::Lark),
    ];
    let Some(fields) = value.as_object() else {
        return Err(OutputRefusal::new(param, "it is not an object"));
    };
    only(param, fields, &["json", "regex", "choice", "grammar", "json_object"])?;
    let json_object = fields.get("json_object").filter(|value| **value == Value::Bool(true));
    let object = json!({"type": "object"});
    let given = kinds.into_iter().filter_map(|(name, kind)| Some((present(fields.get(name))?, kind)));
    let given: Vec<_> = given.chain(json_object.map(|_| (&object, GrammarKind::JsonSchema))).collect();
    match given[..] {
        [(value, kind)] => of_kind(param, value, kind),
        _ => {
            let message =
                format!("it has {} of json, regex, choice, grammar and json_object, not one", given.len());
            Err(OutputRefusal::new(param, message))
        }
    }
}

/// A grammar from a field's value.
fn of_kind(param: &'static str, value: &Value, kind: GrammarKind) -> Asked {
    match (kind, value) {
        (GrammarKind::JsonSchema, Value::Object(_) | Value::Bool(_))
        | (GrammarKind::Choice, Value::Array(_)) => asked(param, kind, value.to_string()),
        (GrammarKind::JsonSchema | GrammarKind::Regex | GrammarKind::Lark, Value::String(text)) => {
            asked(param, kind, text)
        }
        (kind, _) => {
            let expected = match kind {
                GrammarKind::JsonSchema => "a schema",
                GrammarKind::Choice => "a list of strings",
                GrammarKind::Regex | GrammarKind::Lark => "a string",
            };
            Err(OutputRefusal::new(param, format!("the {} is not {expected}", kind.name())))
        }
    }
}

/// Refuses fields that would be ignored.
fn only(param: &str, fields: &Map<String, Value>, known: &[&str]) -> Result<(), OutputRefusal> {
    let foreign = fields.iter().find(|(name, value)| !value.is_null() && !known.contains(&name.as_str()));
    match foreign {
        Some((name, _)) => {
            Err(OutputRefusal::new(format!("{param}.{name}"), "this is not supported by this server"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(field: &str, value: &Value) -> Result<Option<(GrammarKind, String)>, String> {
        let mut fields = OutputFields::default();
        match field {
            "response_format" => fields.response_format = Some(value),
            "structured_outputs" => fields.structured_outputs = Some(value),
            "guided_json" => fields.guided_json = Some(value),
            "guided_regex" => fields.guided_regex = Some(value),
            "guided_choice" => fields.guided_choice = Some(value),
            _ => fields.guided_grammar = Some(value),
        }
        let asked = fields.grammar().map_err(|refusal| refusal.to_string())?;
        Ok(asked.map(|asked| (asked.grammar.kind, asked.grammar.text.to_string())))
    }

    #[test]
    fn each_field_asks_for_its_kind() {
        let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
        let text = schema.to_string();
        let json = |text: &str| Some((GrammarKind::JsonSchema, text.to_owned()));
        let named =
            json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
        for (field, value, expected) in [
            ("response_format", json!({"type": "text"}), None),
            ("response_format", json!(null), None),
            ("response_format", json!({"type": "json_object"}), json(r#"{"type":"object"}"#)),
            ("response_format", named, json(&text)),
            ("structured_outputs", json!({"json": schema, "regex": null}), json(&text)),
            ("structured_outputs", json!({"json": text}), json(&text)),
            ("structured_outputs", json!({"json_object": true}), json(r#"{"type":"object"}"#)),
            ("structured_outputs", json!({"regex": "a+"}), Some((GrammarKind::Regex, "a+".into()))),
            ("structured_outputs", json!({"choice": ["a"]}), Some((GrammarKind::Choice, r#"["a"]"#.into()))),
            (
                "structured_outputs",
                json!({"grammar": "start: X"}),
                Some((GrammarKind::Lark, "start: X".into())),
            ),
            ("guided_json", schema.clone(), json(&text)),
            ("guided_regex", json!("a+"), Some((GrammarKind::Regex, "a+".into()))),
            ("guided_choice", json!(["a", "b"]), Some((GrammarKind::Choice, r#"["a","b"]"#.into()))),
            ("guided_grammar", json!("start: X"), Some((GrammarKind::Lark, "start: X".into()))),
        ] {
            assert_eq!(of(field, &value), Ok(expected), "{field} {value}");
        }
    }

    #[test]
    fn what_would_be_ignored_is_refused() {
        for (field, value, expected) in [
            ("response_format", json!("json"), "response_format: it is not an object"),
            ("response_format", json!({"type": "xml"}), "response_format.type: it is not"),
            ("response_format", json!({"type": "structural_tag"}), "response_format.type: structural_tag"),
            ("response_format", json!({"type": "json_schema"}), "response_format.json_schema: it is missing"),
            (
                "response_format",
                json!({"type": "json_schema", "json_schema": {"name": "n"}}),
                "response_format.json_schema.schema: it is missing",
            ),
            ("response_format", json!({"type": "json_object", "x": 1}), "response_format.x: this is not"),
            ("structured_outputs", json!({}), "structured_outputs: it has 0 of"),
            ("structured_outputs", json!({"json": {}, "regex": "a"}), "structured_outputs: it has 2 of"),
            (
                "structured_outputs",
                json!({"whitespace_pattern": " "}),
                "structured_outputs.whitespace_pattern:",
            ),
            ("guided_regex", json!(1), "guided_regex: the regular expression is not a string"),
            ("guided_choice", json!("a"), "guided_choice: the choice is not a list"),
        ] {
            let message = of(field, &value).expect_err(expected);
            assert!(message.starts_with(expected), "{message:?} does not begin with {expected:?}");
        }
        let (format, regex) = (json!({"type": "json_object"}), json!("a"));
        let both =
            OutputFields { response_format: Some(&format), guided_regex: Some(&regex), ..Default::default() };
        assert_eq!(
            both.grammar().unwrap_err().to_string(),
            "guided_regex: response_format asks for a format already"
        );
    }
}
