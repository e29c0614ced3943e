//! What a JSON schema means where JSON Schema leaves it open.

use serde_json::Value;

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
