//! What a client wants to be kept of a prompt, and how many tokens of it that is.
//!
//! A mark in a chat must not change its prompt, so it is not written into it. The chat is rendered once more, cut behind the marked
//! text. Where the two prompts begin to differ, the kept prefix ends: a later request with the same beginning shares no more.

use std::time::Duration;

use baton_request::{KeptPrefix, Retention};
use baton_tokenizer::Tokenizer;
use serde_json::{Map, Value};

use crate::{CoreError, passages::is_mark};

/// So many texts of a chat may be marked, as in Anthropic's API.
const MAX_MARKS: usize = 4;

/// How a client wants the KV of a prompt to be kept, unless as that of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheControl {
    /// It goes before that of others.
    Low,
    /// It stays before that of others, for so long after each use that asks for it.
    High(Duration),
}

/// A text of a chat. The prompt up to its end is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptText {
    /// Its message.
    pub message_idx: usize,
    /// What follows it in the message's content.
    pub num_bytes_after: usize,
    /// How long.
    pub ttl: Duration,
}

/// Texts that become the content of a message, a line each, and which of them end what is to be kept.
#[derive(Debug, Default)]
pub struct MessageTexts {
    texts: Vec<String>,
    /// Of each, how many texts it covers.
    ends: Vec<(usize, Duration)>,
}

impl CacheControl {
    /// How long KV is kept if the client does not say it, as in Anthropic's API.
    pub const DEFAULT_TTL: Duration = Duration::from_mins(5);
}

impl MessageTexts {
    /// Appends a text.
    pub fn push(&mut self, text: impl Into<String>) {
        self.texts.push(text.into());
    }

    /// Appends the texts of another message, with what is kept of them.
    pub fn append(&mut self, other: MessageTexts) {
        let num_texts = self.texts.len();
        self.ends.extend(other.ends.into_iter().map(|(num, ttl)| (num_texts + num, ttl)));
        self.texts.extend(other.texts);
    }

    /// What was appended, and all before it, is to be kept.
    pub fn keep(&mut self, ttl: Duration) {
        self.ends.push((self.texts.len(), ttl));
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// The content of message `message_idx`. Tells `kept` what is marked in it.
    pub fn join(self, message_idx: usize, kept: &mut Vec<KeptText>) -> String {
        let content = self.texts.join("\n");
        let mut texts = self.texts.iter();
        let (mut num_before, mut num_bytes) = (0, 0);
        // In the order of the texts.
        for (num_texts, ttl) in self.ends {
            num_bytes +=
                texts.by_ref().take(num_texts - num_before).map(|text| text.len() + 1).sum::<usize>();
            num_before = num_texts;
            let num_bytes_after = content.len() - num_bytes.saturating_sub(1);
            kept.push(KeptText { message_idx, num_bytes_after, ttl });
        }
        content
    }
}

/// A chat and its prompt.
#[derive(Debug)]
pub(crate) struct RenderedChat<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) messages: &'a Value,
    pub(crate) tools: Option<&'a Value>,
    pub(crate) extra: &'a Map<String, Value>,
    /// With marks of passages.
    pub(crate) prompt: &'a str,
}

/// The prefixes that marked texts end. `ids` are the tokens of the prompt.
///
/// # Errors
/// When too many texts are marked.
pub(crate) fn prefixes(
    chat: &RenderedChat<'_>,
    texts: &[KeptText],
    ids: &[u32],
) -> Result<Vec<KeptPrefix>, CoreError> {
    if texts.len() > MAX_MARKS {
        let num_marks = texts.len();
        let message =
            format!("cache_control: {num_marks} parts of the prompt have it, at most {MAX_MARKS} may");
        return Err(CoreError::invalid("cache_control", message));
    }
    let mut longest = None;
    let marks = texts.iter().rev().filter(|text| {
        // What a later mark keeps as long need not be found.
        let is_longer = longest.is_none_or(|longest| text.ttl > longest);
        longest = longest.max(Some(text.ttl));
        is_longer
    });
    let num_tokens = |text| num_tokens(chat.tokenizer, ids, num_bytes(chat, text));
    Ok(marks.map(|text| KeptPrefix { num_tokens: num_tokens(text), ttl: text.ttl }).collect())
}

/// Bytes of the prompt up to the end of a text, without marks of passages; all, if the template cannot render the chat that ends
/// there.
fn num_bytes(chat: &RenderedChat<'_>, text: &KeptText) -> usize {
    let messages = chat.messages.as_array().map_or(&[][..], Vec::as_slice);
    let mut messages = messages[..messages.len().min(text.message_idx + 1)].to_vec();
    if let Some(last) = messages.last_mut().and_then(Value::as_object_mut)
        && text.num_bytes_after > 0
    {
        // Calls follow the content.
        last.remove("tool_calls");
        if let Some(Value::String(content)) = last.get_mut("content") {
            content.truncate(content.floor_char_boundary(content.len().saturating_sub(text.num_bytes_after)));
        }
    }
    let mut extra = chat.extra.clone();
    extra.insert("add_generation_prompt".to_owned(), Value::Bool(false));
    let cut = chat.tokenizer.chat_prompt(&Value::Array(messages), chat.tools, &extra);
    let cut = cut.as_deref().unwrap_or(chat.prompt);
    let common = chat.prompt.chars().zip(cut.chars()).take_while(|(one, other)| one == other);
    common.filter(|&(char, _)| !is_mark(char)).map(|(char, _)| char.len_utf8()).sum()
}

/// Tokens of which the first `num_bytes` bytes of a prompt consist.
fn num_tokens(tokenizer: &Tokenizer, ids: &[u32], num_bytes: usize) -> usize {
    let mut end = 0;
    let is_before = |&&id: &&u32| {
        end += tokenizer.token_bytes(id).map_or(0, |bytes| bytes.len());
        end <= num_bytes
    };
    ids.iter().take_while(is_before).count()
}

/// What workers are told of a prompt with `num_tokens` tokens.
pub(crate) fn retention(
    whole: Option<CacheControl>,
    mut kept: Vec<KeptPrefix>,
    num_tokens: usize,
) -> Retention {
    if let Some(CacheControl::High(ttl)) = whole {
        kept.push(KeptPrefix { num_tokens, ttl });
    }
    Retention { kept, rest_is_low: whole == Some(CacheControl::Low) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(message_idx: usize, after: &str, secs: u64) -> KeptText {
        KeptText { message_idx, num_bytes_after: after.len(), ttl: Duration::from_secs(secs) }
    }

    /// What is kept of the chat, as text.
    fn kept(messages: &Value, tools: Option<&Value>, kept: Vec<KeptText>) -> Vec<String> {
        let model = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny");
        let tokenizer = Tokenizer::load(&model).expect("the tiny model");
        let extra = Map::new();
        let prompt = tokenizer.chat_prompt(messages, tools, &extra).expect("a prompt");
        let ids = tokenizer.encode(&prompt, false).expect("text");
        let chat = RenderedChat { tokenizer: &tokenizer, messages, tools, extra: &extra, prompt: &prompt };
        let prefixes = prefixes(&chat, &kept, &ids).expect("few marks");
        let decode = |kept: KeptPrefix| tokenizer.decode(&ids[..kept.num_tokens], false);
        prefixes.into_iter().map(decode).collect()
    }

    #[test]
    fn a_kept_prefix_ends_with_the_marked_text() {
        let messages = json!([
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "The lamp is in Lima. Read.\nWhere is it?"},
        ]);
        let tools = json!([{"type": "function", "function": {"name": "add", "parameters": {}}}]);
        let calls = json!([{"type": "function", "function": {"name": "add", "arguments": {}}}]);
        let called = json!([{"role": "assistant", "content": "Let me see.", "tool_calls": calls}]);
        let system = "<|bos|><|system|>\nYou are brief.";
        let user = format!("{system}<|end|>\n<|user|>\nThe lamp is in Lima. Read.");
        let after = "\nWhere is it?";
        for (messages, tools, marks, expected) in [
            (&messages, None, vec![text(0, "", 1)], vec![format!("{system}<|end|>\n")]),
            (&messages, None, vec![text(1, after, 1)], vec![user.clone()]),
            (
                &messages,
                None,
                vec![text(0, "", 2), text(1, after, 1)],
                vec![user.clone(), format!("{system}<|end|>\n")],
            ),
            (&messages, None, vec![text(0, "", 1), text(1, after, 1)], vec![user]),
            (
                &messages,
                Some(&tools),
                vec![text(0, "", 1)],
                vec![format!("{system}\n\nTools:\n{{\"name\": \"add\", \"arguments\": {{}}}}<|end|>\n")],
            ),
            (&called, None, vec![text(0, " see.", 1)], vec!["<|bos|><|assistant|>\nLet me".to_owned()]),
            // A message that is not there, or is shorter.
            (
                &called,
                None,
                vec![text(7, "longer than its content", 1)],
                vec!["<|bos|><|assistant|>\n".to_owned()],
            ),
        ] {
            let found = kept(messages, tools, marks.clone());
            assert_eq!(found.len(), expected.len(), "{marks:?}: {found:?}");
            for (found, expected) in found.iter().zip(&expected) {
                // A token may reach over the end of the marked text.
                let is_close = expected.starts_with(found) && found.len() + 8 > expected.len();
                assert!(is_close, "{marks:?}: {found:?} is not {expected:?}");
            }
        }
    }

    #[test]
    fn texts_are_joined_and_their_marks_count_what_follows() {
        let (mut texts, mut more) = (MessageTexts::default(), MessageTexts::default());
        texts.keep(Duration::from_secs(1));
        texts.push("ab");
        texts.keep(Duration::from_secs(2));
        more.push("c");
        more.keep(Duration::from_secs(3));
        texts.append(more);
        let mut kept = Vec::new();
        assert_eq!(texts.join(4, &mut kept), "ab\nc");
        let found: Vec<_> = kept.iter().map(|text| (text.message_idx, text.num_bytes_after)).collect();
        assert_eq!(found, [(4, 4), (4, 2), (4, 0)]);
    }
}
