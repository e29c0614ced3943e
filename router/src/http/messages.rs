//! Chat messages: from what OpenAI clients send to what chat templates read.

use baton_router_core::{KeptText, MessageTexts, mark_passage};
use baton_tools::read_arguments;
use serde_json::Value;

use super::{cache_control, error::ApiError};

/// Checks the messages, joins text parts, marks passages, finds what is to be kept, and gives templates tool arguments as objects.
pub(crate) fn normalise(messages: Vec<Value>) -> Result<(Value, Vec<KeptText>), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty, at least one message is needed"));
    }
    let mut kept = Vec::new();
    let messages = messages.into_iter().enumerate();
    let messages = messages.map(|(idx, message)| normalise_one(idx, message, &mut kept));
    Ok((messages.collect::<Result<_, _>>()?, kept))
}

fn normalise_one(idx: usize, message: Value, kept: &mut Vec<KeptText>) -> Result<Value, ApiError> {
    let path = format!("messages[{idx}]");
    let wrong = |field: &str, expected: &str| {
        let param = if field.is_empty() { path.clone() } else { format!("{path}.{field}") };
        Err(ApiError::invalid(param.clone(), format!("{param}: expected {expected}")))
    };
    let Value::Object(mut message) = message else { return wrong("", "an object") };
    if !message.get("role").is_some_and(Value::is_string) {
        return wrong("role", "a string");
    }
    let is_assistants = message.get("role").is_some_and(|role| role == "assistant");
    // What the assistant refused with is what it said.
    let refusal = message.get_mut("refusal").filter(|it| is_assistants && it.is_string()).map(Value::take);
    let mut said = MessageTexts::default();
    match message.get_mut("content").map(Value::take) {
        None | Some(Value::Null) if refusal.is_some() || message.contains_key("tool_calls") => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) => said.push(text),
        Some(Value::Array(parts)) => said = texts(&path, parts, is_assistants)?,
        _ => return wrong("content", "a string or a list of parts"),
    }
    if let Some(Value::String(refusal)) = refusal {
        said.push(refusal);
    }
    // Templates write what is no text as "None".
    message.insert("content".to_owned(), said.join(idx, kept).into());
    // Clients write what a message has not as null; templates ask whether the key is there.
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    message.retain(|key, value| !(value.is_null() || key == "tool_calls" && is_empty(value)));
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        calls.iter_mut().for_each(parse_arguments);
    }
    Ok(Value::Object(message))
}

fn texts(path: &str, parts: Vec<Value>, is_assistants: bool) -> Result<MessageTexts, ApiError> {
    let mut texts = MessageTexts::default();
    for (idx, part) in parts.into_iter().enumerate() {
        let path = format!("{path}.content[{idx}]");
        let (kind, field) = match part["type"].as_str().unwrap_or_default() {
            "refusal" if is_assistants => ("text", "refusal"),
            kind => (kind, "text"),
        };
        match (kind, &part[field], &part["passage"]) {
            ("text", Value::String(text), Value::Null | Value::Bool(false)) => texts.push(text),
            ("text", Value::String(text), Value::Bool(true)) => texts.push(mark_passage(text)),
            ("text", Value::String(_), _) => {
                let param = format!("{path}.passage");
                return Err(ApiError::invalid(param.clone(), format!("{param}: expected a boolean")));
            }
            ("text", _, _) => {
                let param = format!("{path}.{field}");
                return Err(ApiError::invalid(param.clone(), format!("{param}: expected a string")));
            }
            ("", _, _) => {
                let param = format!("{path}.type");
                return Err(ApiError::invalid(param.clone(), format!("{param}: expected \"text\"")));
            }
            (kind, _, _) => {
                let param = format!("{path}.type");
                let message = format!("{param}: {kind:?} is not supported by this model, only \"text\" is");
                return Err(ApiError::unsupported(param, message));
            }
        }
        cache_control::keep(&mut texts, &path, &part)?;
    }
    Ok(texts)
}

/// OpenAI sends the arguments of a call as JSON in a string; templates expect the object.
fn parse_arguments(call: &mut Value) {
    if let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments"))
        && let Some(text) = arguments.as_str()
    {
        *arguments = read_arguments(text);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What templates read of one message.
    fn read(message: Value) -> Value {
        let (mut messages, _) = normalise(vec![message]).unwrap();
        messages[0].take()
    }

    #[test]
    fn what_a_message_has_not_is_no_key_of_it() {
        let plain = json!({"role": "assistant", "content": "x"});
        for calls in [json!(null), json!([])] {
            let sent = json!({
                "role": "assistant", "content": "x", "tool_calls": calls, "refusal": null, "audio": null,
                "function_call": null, "name": null, "annotations": null,
            });
            assert_eq!(read(sent), plain);
            let silent = json!({"role": "assistant", "content": null, "tool_calls": calls});
            assert_eq!(read(silent), json!({"role": "assistant", "content": ""}));
        }
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}});
        let calling = json!({"role": "assistant", "content": "", "tool_calls": [call]});
        assert_eq!(read(calling.clone()), calling);
    }

    #[test]
    fn a_refusal_is_what_the_assistant_said() {
        let said = json!({"role": "assistant", "content": "No."});
        let part = json!({"type": "refusal", "refusal": "No."});
        for sent in [
            json!({"role": "assistant", "content": null, "refusal": "No."}),
            json!({"role": "assistant", "refusal": "No."}),
            json!({"role": "assistant", "content": "", "refusal": "No."}),
            json!({"role": "assistant", "content": [part]}),
        ] {
            assert_eq!(read(sent), said);
        }
        let both = json!({"role": "assistant", "content": [{"type": "text", "text": "Hm."}, part]});
        assert_eq!(read(both), json!({"role": "assistant", "content": "Hm.\nNo."}));
        for (message, param) in [
            (json!({"role": "user", "content": [part]}), "messages[0].content[0].type"),
            (json!({"role": "user", "refusal": "No."}), "messages[0].content"),
            (
                json!({"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}),
                "messages[0].content[0].refusal",
            ),
        ] {
            let refused = normalise(vec![message]).expect_err(param);
            assert_eq!(refused.detail.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn arguments_are_objects_where_they_can_be() {
        for (sent, expected) in [
            (json!("{\"a\": 1}"), json!({"a": 1})),
            (json!({"a": 1}), json!({"a": 1})),
            (json!("[1]"), json!("[1]")),
        ] {
            let call = json!({"type": "function", "function": {"name": "f", "arguments": sent}});
            let message = read(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
            assert_eq!(message["tool_calls"][0]["function"]["arguments"], expected, "{sent}");
        }
    }
}
