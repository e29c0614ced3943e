//! Messages with one call each, as the chat templates of Llama 3 and GPT-OSS take them. It knows messages, no templates.

use std::{iter, mem};

use serde_json::{Value, json};

/// Splits messages with several calls into messages with one, each before its result. Calls without a result follow those with
/// one. Returns where each message is now; of a split one, where its text is.
pub(crate) fn split(messages: &mut Value) -> Vec<usize> {
    let Value::Array(list) = messages else { return Vec::new() };
    let mut places = vec![0; list.len()];
    // Each with its place so far; what is new has none.
    let mut parts = Vec::with_capacity(list.len());
    let mut rest = mem::take(list).into_iter().enumerate().peekable();
    while let Some((idx, mut message)) = rest.next() {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        let Some(calls) = calls.filter(|calls| calls.len() > 1).map(mem::take) else {
            parts.push((Some(idx), message));
            continue;
        };
        let results = iter::from_fn(|| rest.next_if(|(_, next)| next["role"] == "tool"));
        let mut results: Vec<(usize, Value)> = results.collect();
        let pairs = calls.into_iter().map(|call| {
            let is_its = |(_, result): &(usize, Value)| id(&result["tool_call_id"]) == id(&call["id"]);
            let result = results.iter().position(is_its).map(|at| results.remove(at));
            (call, result)
        });
        let (answered, open): (Vec<_>, Vec<_>) = pairs.partition(|(_, result)| result.is_some());
        let mut idx = Some(idx);
        for (call, result) in answered.into_iter().chain(open) {
            let mut said = mem::replace(&mut message, json!({"role": "assistant", "content": ""}));
            said["tool_calls"] = Value::Array(vec![call]);
            parts.push((idx.take(), said));
            parts.extend(result.map(|(idx, result)| (Some(idx), result)));
        }
        parts.extend(results.into_iter().map(|(idx, result)| (Some(idx), result)));
    }
    for (place, (idx, message)) in parts.into_iter().enumerate() {
        if let Some(idx) = idx {
            places[idx] = place;
        }
        list.push(message);
    }
    places
}

fn id(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chat in short: `text > a b` has the calls a and b, `= a` is the result of a.
    fn chat(forms: &[&str]) -> Value {
        let message = |form: &&str| match (form.split_once(" > "), form.strip_prefix("= ")) {
            (Some((text, ids)), _) => {
                let calls: Vec<Value> = ids.split(' ').map(|id| json!({"id": id})).collect();
                json!({"role": "assistant", "content": text, "tool_calls": calls})
            }
            (None, Some(id)) => json!({"role": "tool", "tool_call_id": id}),
            (None, None) => json!({"role": "user", "content": form}),
        };
        forms.iter().map(message).collect()
    }

    fn check(before: &[&str], after: &[&str], places: &[usize]) {
        let mut messages = chat(before);
        assert_eq!(split(&mut messages), places, "{before:?}");
        assert_eq!(messages, chat(after), "{before:?}");
    }

    #[test]
    fn each_call_is_a_message_before_its_result() {
        let several = ["U", "Hm > a b", "= a", "= b", "V"];
        check(&several, &["U", "Hm > a", "= a", " > b", "= b", "V"], &[0, 1, 2, 4, 5]);
        check(&["Hm > a b", "= b", "= a"], &["Hm > a", "= a", " > b", "= b"], &[0, 3, 1]);
        check(&["Hm > a b c", "= b"], &["Hm > b", "= b", " > a", " > c"], &[0, 1]);
        check(&["Hm > a b"], &["Hm > a", " > b"], &[0]);
        // One id for both, and a result of neither.
        check(&["Hm > a a", "= a", "= a"], &["Hm > a", "= a", " > a", "= a"], &[0, 1, 3]);
        check(&["Hm > a b", "= x", "= b"], &["Hm > b", "= b", " > a", "= x"], &[0, 3, 1]);
        check(&["Hm > a", "= a", "= a"], &["Hm > a", "= a", "= a"], &[0, 1, 2]);
        assert!(split(&mut Value::Null).is_empty());
    }
}
