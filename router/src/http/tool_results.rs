//! Results of tools as chats have them. Other APIs name only the call; a chat's result names the function, too.

use std::collections::HashMap;

use serde_json::{Value, json};

/// The functions that a conversation has called so far.
#[derive(Default)]
pub(super) struct Called {
    /// By the id of the call.
    names: HashMap<String, String>,
}

impl Called {
    /// A call of the function `name`. Of calls with one id the first counts.
    pub(super) fn add(&mut self, id: &str, name: &str) {
        self.names.entry(id.to_owned()).or_insert_with(|| name.to_owned());
    }

    /// The message with the result of the call `id`.
    pub(super) fn result(&self, id: &str, content: &str) -> Value {
        json!({"role": "tool", "tool_call_id": id, "name": self.names.get(id), "content": content})
    }
}
