//! What a JSON schema means where JSON Schema leaves it open.

use serde_json::{Map, Value, json};

/// White space between two parts of a JSON value: none, a space, or a new line with some indentation. Without a bound a
/// model may write white space for ever.
const JSON_WHITE_SPACE: &str = "[ ]|\\n[ \\t]{0,24}";

/// The formats of JSON Schema.
const FORMATS: [&str; 19] = [
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "iri",
    "iri-reference",
    "uuid",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
];

/// The schema of an answer as compilers of grammars take it: without [idle keywords](drop_idle_keywords), and with a bound of
/// white space unless it says otherwise.
pub fn output_schema(mut schema: Value) -> Value {
    drop_idle_keywords(&mut schema);
    if let Value::Object(fields) = &mut schema {
        fields.entry("x-guidance").or_insert(json!({"whitespace_pattern": JSON_WHITE_SPACE}));
    }
    schema
}

/// Removes what constrains nothing and compilers of grammars refuse: formats that JSON Schema does not define, such as Pydantic's
/// `path`, which it takes for remarks (Validation 7.2.3); `propertyNames` that every name matches, as Zod writes them for
/// records; empty `dependencies`.
pub fn drop_idle_keywords(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    fields.retain(|name, value| !is_idle(name, value));
    for (name, value) in fields {
        match &**name {
            // Values, not schemas.
            "enum" | "const" | "default" | "examples" => {}
            // The keys are names that the schema's author chose.
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas"
            | "dependencies" => {
                value
                    .as_object_mut()
                    .into_iter()
                    .flatten()
                    .for_each(|(_, schema)| drop_idle_keywords(schema));
            }
            _ => match value {
                Value::Array(schemas) => schemas.iter_mut().for_each(drop_idle_keywords),
                schema => drop_idle_keywords(schema),
            },
        }
    }
}

fn is_idle(keyword: &str, value: &Value) -> bool {
    match keyword {
        "format" => value.as_str().is_some_and(|format| !FORMATS.contains(&format)),
        "propertyNames" => [json!(true), json!({}), json!({"type": "string"})].contains(value),
        "dependencies" => value.as_object().is_some_and(Map::is_empty),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keywords_that_constrain_nothing_are_dropped() {
        let string = json!({"type": "string"});
        for (mut schema, expected) in [
            (json!({"format": "path", "type": "string"}), string.clone()),
            (json!({"format": "date"}), json!({"format": "date"})),
            (json!({"items": {"propertyNames": true}}), json!({"items": {}})),
            (json!({"anyOf": [{"propertyNames": {}}, {"dependencies": {}}]}), json!({"anyOf": [{}, {}]})),
            (json!({"propertyNames": string, "type": "object"}), json!({"type": "object"})),
            (json!({"propertyNames": {"pattern": "^a"}}), json!({"propertyNames": {"pattern": "^a"}})),
            (json!({"propertyNames": false}), json!({"propertyNames": false})),
            (json!({"dependencies": {"a": ["b"]}}), json!({"dependencies": {"a": ["b"]}})),
            // Properties and values that are called so.
            (json!({"properties": {"propertyNames": true}}), json!({"properties": {"propertyNames": true}})),
            (json!({"const": {"dependencies": {}}}), json!({"const": {"dependencies": {}}})),
        ] {
            let sent = schema.clone();
            drop_idle_keywords(&mut schema);
            assert_eq!(schema, expected, "{sent}");
        }
    }
}
