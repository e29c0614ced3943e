//! Ids of calls as Mistral's chat templates take them: nine letters and digits. It knows messages, no templates.

use serde_json::Value;

const LENGTH: usize = 9;
const CHARACTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Gives the calls of a chat, and their results, such ids. Equal ids stay equal; an id of this form stays as it is.
pub(crate) fn shorten(messages: &mut Value) {
    for message in messages.as_array_mut().into_iter().flatten() {
        shorten_one(message.get_mut("tool_call_id"));
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        calls.into_iter().flatten().for_each(|call| shorten_one(call.get_mut("id")));
    }
}

fn shorten_one(id: Option<&mut Value>) {
    if let Some(Value::String(id)) = id
        && !(id.len() == LENGTH && id.bytes().all(|byte| byte.is_ascii_alphanumeric()))
    {
        *id = short(id);
    }
}

/// The same in every process and build, so that the prefix of a conversation is found again.
fn short(id: &str) -> String {
    // FNV-1a.
    let add = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let mut rest = id.bytes().fold(0xcbf2_9ce4_8422_2325, add);
    let character = || {
        let idx = rest % CHARACTERS.len() as u64;
        rest /= CHARACTERS.len() as u64;
        char::from(CHARACTERS[idx as usize])
    };
    std::iter::repeat_with(character).take(LENGTH).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_are_short_and_differ_where_the_long_ones_do() {
        let long = |idx: u32| format!("call_0123456789abcdef0123456789abcdef{idx}");
        let ids: HashSet<String> = (0..1000).map(|idx| short(&long(idx))).collect();
        assert_eq!(ids.len(), 1000);
        let is_right = |id: &String| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        assert!(ids.iter().all(is_right), "{ids:?}");
        assert_eq!(short(&long(7)), short(&long(7)));
    }
}
