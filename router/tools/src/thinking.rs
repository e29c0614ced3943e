//! Reasoning of earlier answers as the chat templates of GPT-OSS take it. It knows messages, no templates.

use serde_json::Value;

/// Gives reasoning the key that the templates read. They take a message with calls that has reasoning or content, and refuse one
/// with both: it keeps its reasoning, which the template would also make of the content.
pub(crate) fn rename(messages: &mut Value) {
    for message in messages.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        let reasoning = message.remove("reasoning_content");
        if let Some(reasoning) = reasoning.filter(is_text) {
            message.entry("thinking").or_insert(reasoning);
        }
        if message.contains_key("tool_calls") && message.get("thinking").is_some_and(is_text) {
            message.insert("content".to_owned(), "".into());
        }
    }
}

fn is_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reasoning_has_the_key_of_the_templates_and_stands_alone_beside_calls() {
        for (message, expected) in [
            (json!({"content": "A", "reasoning_content": "T"}), json!({"content": "A", "thinking": "T"})),
            (json!({"content": "A", "reasoning_content": ""}), json!({"content": "A"})),
            (
                json!({"content": "A", "reasoning_content": "T", "tool_calls": [1]}),
                json!({"content": "", "thinking": "T", "tool_calls": [1]}),
            ),
            (
                json!({"content": "A", "thinking": "T", "tool_calls": [1]}),
                json!({"content": "", "thinking": "T", "tool_calls": [1]}),
            ),
            (json!({"content": "A", "tool_calls": [1]}), json!({"content": "A", "tool_calls": [1]})),
        ] {
            let mut messages = json!([message]);
            rename(&mut messages);
            assert_eq!(messages, json!([expected]));
        }
    }
}
