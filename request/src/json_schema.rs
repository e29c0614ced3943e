//! What a JSON schema means where JSON Schema leaves it open.

use serde_json::{Value, json};

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

/// The schema of an answer as compilers of grammars take it: without [foreign formats](drop_foreign_formats), and with a bound
/// of white space unless it says otherwise.
pub fn output_schema(mut schema: Value) -> Value {
    drop_foreign_formats(&mut schema);
    if let Value::Object(fields) = &mut schema {
        fields.entry("x-guidance").or_insert(json!({"whitespace_pattern": JSON_WHITE_SPACE}));
    }
    schema
}

/// Removes formats that JSON Schema does not define, such as Pydantic's `path`: it takes them for remarks (Validation 7.2.3).
/// Compilers of grammars refuse them.
pub fn drop_foreign_formats(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    if fields.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
        fields.remove("format");
    }
    for (name, value) in fields {
        match &**name {
            // Values, not schemas.
            "enum" | "const" | "default" | "examples" => {}
            // The keys are names that the schema's author chose.
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas" => {
                value
                    .as_object_mut()
                    .into_iter()
                    .flatten()
                    .for_each(|(_, schema)| drop_foreign_formats(schema));
            }
            _ => match value {
                Value::Array(schemas) => schemas.iter_mut().for_each(drop_foreign_formats),
                schema => drop_foreign_formats(schema),
            },
        }
    }
}
