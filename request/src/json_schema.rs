//! What a JSON schema means where JSON Schema leaves it open.

use std::collections::{BTreeMap, BTreeSet};

use percent_encoding::percent_decode_str;
use serde_json::{Map, Number, Value, json};

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

/// The schema of an answer as compilers of grammars take it: [plain](make_plain), and with a bound of white space unless it says
/// otherwise.
pub fn output_schema(mut schema: Value) -> Value {
    make_plain(&mut schema);
    if let Value::Object(fields) = &mut schema {
        fields.entry("x-guidance").or_insert(json!({"whitespace_pattern": JSON_WHITE_SPACE}));
    }
    schema
}

/// Gives the schema a form that means the same to compilers of grammars, which refuse some of what JSON Schema allows. They look up
/// the parts of a reference as they are written. What constrains nothing is removed: formats that JSON Schema does not define, such
/// as Pydantic's `path`, which it takes for remarks (Validation 7.2.3); `propertyNames` that every name matches, as Zod writes them
/// for records; empty `dependencies`.
pub fn make_plain(schema: &mut Value) {
    unescape_references(schema);
    visit(schema, &mut |fields: &mut Map<String, Value>| fields.retain(|name, value| !is_idle(name, value)));
}

/// Calls `change` with a schema and then with those in it, unless they are booleans.
fn visit(schema: &mut Value, change: &mut impl FnMut(&mut Map<String, Value>)) {
    let Value::Object(fields) = schema else { return };
    change(fields);
    for (keyword, value) in fields {
        match (Held::by(keyword), value) {
            (Held::Values, _) => {}
            (Held::Named, value) => {
                let named = value.as_object_mut().into_iter().flatten();
                named.for_each(|(_, schema)| visit(schema, change));
            }
            (Held::Schemas, Value::Array(schemas)) => {
                schemas.iter_mut().for_each(|schema| visit(schema, change));
            }
            (Held::Schemas, schema) => visit(schema, change),
        }
    }
}

/// What a keyword holds.
enum Held {
    /// No schemas.
    Values,
    /// Schemas by names that the schema's author chose.
    Named,
    /// Perhaps a schema, or a list of them.
    Schemas,
}

impl Held {
    fn by(keyword: &str) -> Held {
        match keyword {
            "enum" | "const" | "default" | "examples" => Held::Values,
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas"
            | "dependencies" => Held::Named,
            _ => Held::Schemas,
        }
    }
}

/// A number in a `const` or an `enum` that compilers of grammars may round: to them numbers are floats of 64 bits.
pub fn rounded_constant(schema: &Value) -> Option<&Number> {
    schema.as_object()?.iter().find_map(|(keyword, value)| match (Held::by(keyword), value) {
        (Held::Values, value) if ["const", "enum"].contains(&keyword.as_str()) => rounded_number(value),
        (Held::Values, _) => None,
        (Held::Named, value) => value.as_object()?.values().find_map(rounded_constant),
        (Held::Schemas, Value::Array(schemas)) => schemas.iter().find_map(rounded_constant),
        (Held::Schemas, schema) => rounded_constant(schema),
    })
}

fn rounded_number(value: &Value) -> Option<&Number> {
    const MAX_EXACT: u64 = 1 << 53;
    match value {
        Value::Number(number) => {
            let is_exact = match number.as_i64() {
                Some(integer) => integer.unsigned_abs() <= MAX_EXACT,
                // A longer integer is a float, too, once it is parsed.
                None => number.as_f64().is_some_and(|float| float.abs() <= MAX_EXACT as f64),
            };
            (!is_exact).then_some(number)
        }
        Value::Array(items) => items.iter().find_map(rounded_number),
        Value::Object(fields) => fields.values().find_map(rounded_number),
        _ => None,
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

/// Writes references as JSON pointers whose parts are the keys themselves. Those that lead nowhere stay as they are.
fn unescape_references(root: &mut Value) {
    let mut escaped: BTreeSet<String> = BTreeSet::new();
    visit(root, &mut |fields: &mut Map<String, Value>| {
        let to = fields.get("$ref").and_then(Value::as_str);
        escaped.extend(to.filter(|to| to.contains(['~', '%'])).map(str::to_owned));
    });
    let (mut plain, mut moved) = (BTreeMap::new(), Moved::default());
    for to in escaped {
        if let Some(reference) = moved.plain_reference(root, &to) {
            plain.insert(to, reference);
        }
    }
    if !plain.is_empty() {
        visit(root, &mut |fields: &mut Map<String, Value>| {
            if let Some(Value::String(to)) = fields.get_mut("$ref")
                && let Some(reference) = plain.get(to.as_str())
            {
                to.clone_from(reference);
            }
        });
    }
}

/// Values that have become definitions, each with a reference in its old place.
#[derive(Default)]
struct Moved {
    /// Of the definitions, by the old paths.
    names: BTreeMap<Vec<String>, String>,
    /// Of the next name, unless it is taken.
    next_idx: usize,
}

impl Moved {
    /// The reference without escapes (RFC 6901, section 6). `None` if it leads nowhere.
    fn plain_reference(&mut self, root: &mut Value, to: &str) -> Option<String> {
        let pointer = percent_decode_str(to.strip_prefix("#/")?).decode_utf8().ok()?;
        let mut path: Vec<String> = Vec::new();
        for part in pointer.split('/') {
            path.push(part.replace("~1", "/").replace("~0", "~"));
            // Without an escape, a slash would end the key.
            if part.contains("~1") {
                path = vec!["$defs".to_owned(), self.definition(root, path)?];
            }
        }
        at(root, &path)?;
        Some(format!("#/{}", path.join("/")))
    }

    /// The name of the definition that the value at `path` is, or becomes.
    fn definition(&mut self, root: &mut Value, path: Vec<String>) -> Option<String> {
        if let Some(name) = self.names.get(&path) {
            return Some(name.clone());
        }
        at(root, &path)?;
        let definitions = root.as_object_mut()?.entry("$defs").or_insert(json!({})).as_object_mut()?;
        while definitions.contains_key(&format!("moved_{}", self.next_idx)) {
            self.next_idx += 1;
        }
        let name = format!("moved_{}", self.next_idx);
        let value = std::mem::replace(at(root, &path)?, json!({"$ref": format!("#/$defs/{name}")}));
        root["$defs"][&name] = value;
        self.names.insert(path, name.clone());
        Some(name)
    }
}

/// The value behind these keys.
fn at<'a>(root: &'a mut Value, path: &[String]) -> Option<&'a mut Value> {
    path.iter().try_fold(root, |value, key| match value {
        Value::Object(fields) => fields.get_mut(key),
        Value::Array(items) => items.get_mut(key.parse::<usize>().ok()?),
        _ => None,
    })
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
            make_plain(&mut schema);
            assert_eq!(schema, expected, "{sent}");
        }
    }

    #[test]
    fn references_are_written_with_the_keys_themselves() {
        let string = json!({"type": "string"});
        for (mut schema, expected) in [
            // No slash in a key.
            (
                json!({"$ref": "#/$defs/a%20~0%C3%A9", "$defs": {"a ~é": string}}),
                json!({"$ref": "#/$defs/a ~é", "$defs": {"a ~é": string}}),
            ),
            // A definition, and a part of it; one of the names is taken.
            (
                json!({"anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/a~1b/items"}, {"$ref": "#/$defs/moved_0"}],
                    "$defs": {"a/b": {"items": {"$ref": "#/$defs/a~1b"}}, "moved_0": string}}),
                json!({"anyOf": [{"$ref": "#/$defs/moved_1"}, {"$ref": "#/$defs/moved_1/items"}, {"$ref": "#/$defs/moved_0"}],
                    "$defs": {"a/b": {"$ref": "#/$defs/moved_1"}, "moved_0": string,
                        "moved_1": {"items": {"$ref": "#/$defs/moved_1"}}}}),
            ),
            // A property stays where it is.
            (
                json!({"properties": {"a/b": {"anyOf": [string]}, "c": {"$ref": "#/properties/a~1b/anyOf/0"}}}),
                json!({"properties": {"a/b": {"$ref": "#/$defs/moved_0"}, "c": {"$ref": "#/$defs/moved_0/anyOf/0"}},
                    "$defs": {"moved_0": {"anyOf": [string]}}}),
            ),
            // They lead nowhere, or are none.
            (json!({"$ref": "#/$defs/a~1b"}), json!({"$ref": "#/$defs/a~1b"})),
            (json!({"$ref": "#/$defs/a%"}), json!({"$ref": "#/$defs/a%"})),
            (
                json!({"$ref": "#/x~1y", "x/y": string, "$defs": 1}),
                json!({"$ref": "#/x~1y", "x/y": string, "$defs": 1}),
            ),
            (json!({"const": {"$ref": "#/a~0b"}, "a~b": 1}), json!({"const": {"$ref": "#/a~0b"}, "a~b": 1})),
        ] {
            let sent = schema.clone();
            make_plain(&mut schema);
            assert_eq!(schema, expected, "{sent}");
        }
    }

    #[test]
    fn constants_are_exact_up_to_2_to_the_53() {
        let big = 9_007_199_254_740_993_i64;
        for (schema, expected) in [
            (json!({"const": big - 1}), None),
            (json!({"enum": [1 - big, 0.1, "9007199254740993", null]}), None),
            (json!({"const": big}), Some("9007199254740993")),
            (json!({"anyOf": [{"enum": [1, {"a": [-big]}]}]}), Some("-9007199254740993")),
            (json!({"properties": {"enum": {"const": u64::MAX}}}), Some("18446744073709551615")),
            (json!({"$defs": {"x": {"items": {"const": 1.5e300}}}}), Some("1.5e+300")),
            // Bounds, remarks, and a property that is called so.
            (json!({"maximum": big, "default": big, "properties": {"const": {"minimum": big}}}), None),
            (json!(true), None),
        ] {
            let found = rounded_constant(&schema).map(ToString::to_string);
            assert_eq!(found.as_deref(), expected, "{schema}");
        }
    }
}
