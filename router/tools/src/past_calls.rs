//! The calls that a conversation has made, as chat templates read them.

use serde_json::{Map, Value};

/// The arguments of a call: the object that `text` is. Of a call without arguments some clients send no text. Other text stays
/// as it is.
pub fn read_arguments(text: &str) -> Value {
    match text.trim() {
        "" => Value::Object(Map::new()),
        // What begins with other space than JSON's is no object: the edge, which counts values before they are parsed, knows no other.
        _ => serde_json::from_str(text.trim_end()).map_or_else(|_| Value::from(text), Value::Object),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_are_objects_where_they_can_be() {
        for (text, expected) in [
            ("{\"a\": 1}", json!({"a": 1})),
            (" {} ", json!({})),
            ("", json!({})),
            (" \n", json!({})),
            ("{\"a\": ", json!("{\"a\": ")),
            ("[1]", json!("[1]")),
            (" 1", json!(" 1")),
        ] {
            assert_eq!(read_arguments(text), expected, "{text:?}");
        }
    }
}
