//! Passages of a prompt: texts that a client marked, followed through the chat template to token ids.
//!
//! A passage is put between two characters that no text contains: Unicode's noncharacters U+FDD0 and U+FDD1. A template
//! copies them with the text. The prompt is then cut at them, and each part is tokenised on its own. So a passage has the same
//! ids in every prompt: no token reaches over its ends.

use std::{cmp::Reverse, ops::Range};

use baton_request::{BlendMarks, KeptPrefix};
use baton_tokenizer::{Tokenizer, TokenizerError};
use serde_json::{Map, Value, json};

use crate::CoreError;

const BEGIN: char = '\u{FDD0}';
const END: char = '\u{FDD1}';

/// Between documents, and between them and the message that they are placed before.
const SEPARATOR: &str = "\n\n";

/// The ids of a prompt, and the positions of its passages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenisedPrompt {
    /// The prompt.
    pub ids: Vec<u32>,
    /// In order; they do not overlap unless the client gave them.
    pub passages: Vec<Range<usize>>,
    /// What marked texts of a chat end.
    pub kept: Vec<KeptPrefix>,
}

/// Whether the KV of passages is blended, by the request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum BlendMode {
    /// As the workers have measured that it is good enough.
    #[default]
    Auto,
    /// The prompt is computed in full.
    Off,
    /// So much of the passages is computed again.
    Ratio(f32),
}

impl From<Vec<u32>> for TokenisedPrompt {
    fn from(ids: Vec<u32>) -> TokenisedPrompt {
        TokenisedPrompt { ids, ..TokenisedPrompt::default() }
    }
}

impl BlendMode {
    /// The marks of a prompt with these passages. They are there to be validated even if they are not used.
    pub(crate) fn marks(self, passages: Vec<Range<usize>>) -> Option<BlendMarks> {
        let ratio = match self {
            BlendMode::Ratio(ratio) => Some(ratio),
            BlendMode::Auto | BlendMode::Off => None,
        };
        let marks = BlendMarks { passages, ratio, ..BlendMarks::default() };
        (ratio.is_some() || !marks.passages.is_empty()).then_some(marks)
    }
}

/// The longest `max` passages, in order: short ones save least.
pub(crate) fn longest(mut passages: Vec<Range<usize>>, max: usize) -> Vec<Range<usize>> {
    if passages.len() > max {
        passages.sort_by_key(|passage| Reverse(passage.len()));
        passages.truncate(max);
        passages.sort_by_key(|passage| passage.start);
    }
    passages
}

/// The text, marked as a passage for [`tokenise`]. Marks inside it are dropped: passages have no passages.
pub fn mark_passage(text: &str) -> String {
    let mut marked = String::with_capacity(text.len() + 6);
    marked.push(BEGIN);
    marked.extend(text.chars().filter(|&char| !is_mark(char)));
    marked.push(END);
    marked
}

/// Documents as clients send them: texts, or objects with a `text`. As chat templates read them: objects, whose texts are
/// marked here.
///
/// # Errors
/// When one has another form.
pub fn documents(documents: Vec<Value>) -> Result<Vec<Value>, CoreError> {
    let one = |(idx, document)| {
        let param = format!("documents[{idx}]");
        match document {
            Value::String(text) => Ok(json!({"text": mark_passage(&text)})),
            Value::Object(mut fields) => {
                let (text, title) = (fields.get("text").and_then(Value::as_str), fields.get("title"));
                if title.is_some_and(|title| !title.is_string()) {
                    return Err(CoreError::invalid(
                        &format!("{param}.title"),
                        format!("{param}.title: expected a string"),
                    ));
                }
                let Some(text) = text.map(mark_passage) else {
                    return Err(CoreError::invalid(
                        &format!("{param}.text"),
                        format!("{param}.text: expected a string"),
                    ));
                };
                fields.insert("text".to_owned(), Value::String(text));
                Ok(Value::Object(fields))
            }
            _ => Err(CoreError::invalid(
                &param,
                format!("{param}: expected a string or an object with a text"),
            )),
        }
    };
    documents.into_iter().enumerate().map(one).collect()
}

/// Gives documents to a template that reads them, else to the last message of a user: each with its title on a line before its
/// text, and all of them before the message.
pub(crate) fn place_documents(
    documents: Vec<Value>,
    is_read: bool,
    messages: &mut Value,
    extra: &mut Map<String, Value>,
) -> Result<(), CoreError> {
    if is_read {
        extra.insert("documents".to_owned(), Value::Array(documents));
        return Ok(());
    }
    let messages = messages.as_array_mut().into_iter().flatten();
    let Some(message) = messages.rev().find(|message| message["role"] == "user") else {
        let message =
            "documents: this model's chat template reads none, and no message of a user can hold them";
        return Err(CoreError::invalid("documents", message));
    };
    let mut content = String::new();
    for document in &documents {
        let text = document["text"].as_str().unwrap_or_default();
        match document["title"].as_str().filter(|title| !title.is_empty()) {
            // The title belongs to the passage: the same document always has the same tokens.
            Some(title) => content.push_str(&mark_passage(&format!("{title}\n{text}"))),
            None => content.push_str(text),
        }
        content.push_str(SEPARATOR);
    }
    content.push_str(message["content"].as_str().unwrap_or_default());
    message["content"] = Value::String(content);
    Ok(())
}

/// Tokenises a prompt in which passages are marked, each part on its own. A mark without its counterpart marks nothing.
pub(crate) fn tokenise(tokenizer: &Tokenizer, prompt: &str) -> Result<TokenisedPrompt, TokenizerError> {
    if !prompt.contains(is_mark) {
        return tokenizer.encode(prompt, false).map(TokenisedPrompt::from);
    }
    let mut tokenised = TokenisedPrompt::default();
    // Text that was read and belongs to no passage.
    let mut text = String::new();
    let mut rest = prompt;
    while let Some(begin) = rest.find(BEGIN) {
        push_unmarked(&mut text, &rest[..begin]);
        rest = &rest[begin + BEGIN.len_utf8()..];
        let Some(end) = rest.find(is_mark).filter(|&end| rest[end..].starts_with(END)) else { continue };
        let passage = &rest[..end];
        rest = &rest[end + END.len_utf8()..];
        if passage.is_empty() {
            continue;
        }
        tokenised.ids.extend(tokenizer.encode(&text, false)?);
        text.clear();
        let start = tokenised.ids.len();
        tokenised.ids.extend(tokenizer.encode(passage, false)?);
        tokenised.passages.push(start..tokenised.ids.len());
    }
    push_unmarked(&mut text, rest);
    tokenised.ids.extend(tokenizer.encode(&text, false)?);
    // A tokenizer may have no token for a text.
    tokenised.passages.retain(|passage| !passage.is_empty());
    Ok(tokenised)
}

/// Whether the token at `idx` ends with an empty line, or contains one.
pub(crate) fn ends_paragraph(tokenizer: &Tokenizer, ids: &[u32], idx: usize) -> bool {
    let bytes = |idx: usize| tokenizer.token_bytes(ids[idx]).unwrap_or_default();
    let token = bytes(idx);
    let begins_line = || idx > 0 && bytes(idx - 1).ends_with(b"\n");
    token.windows(2).any(|pair| pair == b"\n\n") || (token.starts_with(b"\n") && begins_line())
}

fn push_unmarked(text: &mut String, part: &str) {
    text.extend(part.chars().filter(|&char| !is_mark(char)));
}

pub(crate) fn is_mark(char: char) -> bool {
    char == BEGIN || char == END
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::load(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny")).unwrap()
    }

    #[test]
    fn of_too_many_passages_the_longest_stay_in_order() {
        let passages = vec![0..3, 4..5, 5..9, 10..12];
        assert_eq!(longest(passages.clone(), 4), passages);
        assert_eq!(longest(passages, 2), [0..3, 5..9]);
    }

    #[test]
    fn a_passage_has_the_same_ids_in_every_prompt() {
        let tokenizer = tokenizer();
        let (one, two) = ("The lamp is in Lima.", "ing of the red key\n");
        let alone = |text: &str| tokenizer.encode(text, false).unwrap();
        for prompt in [
            format!("Read{}{} and answer.", mark_passage(one), mark_passage(two)),
            format!("{}Read {}", mark_passage(two), mark_passage(one)) + "ly",
        ] {
            let TokenisedPrompt { ids, passages, .. } = tokenise(&tokenizer, &prompt).unwrap();
            let found: Vec<_> = passages.iter().map(|passage| &ids[passage.clone()]).collect();
            let mut expected = vec![alone(one), alone(two)];
            if prompt.starts_with(BEGIN) {
                expected.reverse();
            }
            assert_eq!(found, expected);
            assert_eq!(tokenizer.decode(&ids, false), prompt.replace(is_mark, ""));
        }
    }

    #[test]
    fn paragraphs_end_with_an_empty_line_however_it_is_tokenised() {
        let tokenizer = tokenizer();
        for (text, num_ends) in
            [("One.\n\nTwo.\n\nThree", 2), ("One\nTwo\n", 0), ("a\n \nb", 0), ("\n", 0), ("", 0)]
        {
            let ids = tokenizer.encode(text, false).unwrap();
            // Each alone, as in vocabularies without such tokens.
            let bytes: Vec<u32> =
                text.chars().flat_map(|char| tokenizer.encode(&char.to_string(), false).unwrap()).collect();
            for ids in [ids, bytes] {
                let ends = (0..ids.len()).filter(|&idx| ends_paragraph(&tokenizer, &ids, idx));
                assert_eq!(ends.count(), num_ends, "{text:?} {ids:?}");
            }
        }
    }

    #[test]
    fn marks_without_a_counterpart_mark_nothing() {
        let tokenizer = tokenizer();
        let plain = tokenizer.encode("one two three", false).unwrap();
        for prompt in ["one\u{FDD1} two three", "one two\u{FDD0} three", "one\u{FDD0}\u{FDD1} two three"] {
            assert_eq!(tokenise(&tokenizer, prompt).unwrap(), plain.clone().into(), "{prompt:?}");
        }
        let TokenisedPrompt { ids, passages, .. } =
            tokenise(&tokenizer, "one\u{FDD0} two\u{FDD0} three\u{FDD1}").unwrap();
        assert_eq!((passages.len(), tokenizer.decode(&ids, false)), (1, "one two three".to_owned()));
        assert_eq!(mark_passage("a\u{FDD1}b"), "\u{FDD0}ab\u{FDD1}");
    }

    #[test]
    fn documents_are_placed_where_the_template_or_the_page_says() {
        let given = vec![json!("first"), json!({"title": "T", "text": "second", "url": "u"})];
        let read = documents(given.clone()).unwrap();
        let mut messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "q"},
                                  {"role": "assistant", "content": "b"}]);
        let mut extra = Map::new();
        place_documents(read.clone(), true, &mut messages, &mut extra).unwrap();
        let first = format!("{BEGIN}first{END}");
        assert_eq!(
            extra["documents"],
            json!([{"text": first}, {"title": "T", "text": format!("{BEGIN}second{END}"), "url": "u"}])
        );
        extra.clear();
        place_documents(read.clone(), false, &mut messages, &mut extra).unwrap();
        assert!(extra.is_empty());
        assert_eq!(messages[1]["content"], format!("{first}\n\n{BEGIN}T\nsecond{END}\n\nq"));
        assert_eq!((&messages[0]["content"], &messages[2]["content"]), (&json!("a"), &json!("b")));
        let error = place_documents(read, false, &mut json!([{"role": "system", "content": ""}]), &mut extra);
        assert!(error.unwrap_err().to_string().contains("no message of a user"));
        for (bad, param) in [
            (json!(7), "documents[1]: expected"),
            (json!({"title": "T"}), "documents[1].text: expected"),
            (json!({"text": "t", "title": 7}), "documents[1].title: expected"),
        ] {
            let error = documents(vec![json!("good"), bad]).unwrap_err().to_string();
            assert!(error.contains(param), "{error}");
        }
    }
}
