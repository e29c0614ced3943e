//! JSON: edits of an object.

use arbitrary::Arbitrary;
use serde_json::{Map, Value, json};

use crate::{Change, pick};

/// Lists and objects inside each other. Deeper ones become null: readers of JSON refuse much depth at once.
const MAX_DEPTH: usize = 16;

/// Some JSON.
#[derive(Arbitrary, Clone, Debug)]
pub enum Json {
    /// Nothing.
    Null,
    /// True or false.
    Bool(bool),
    /// A whole number.
    Whole(Change),
    /// Any number.
    Number(f64),
    /// A known word.
    Word(u8),
    /// Any text.
    Text(String),
    /// A list of numbers.
    Numbers(Vec<i16>),
    /// A list of words.
    Words(Vec<u8>),
    /// A list of anything.
    List(Vec<Json>),
    /// An object whose fields are words.
    Object(Vec<(u8, Json)>),
}

impl Json {
    /// The value. Words come from `words`.
    pub fn value(&self, words: &[&str]) -> Value {
        self.value_within(MAX_DEPTH, words)
    }

    fn value_within(&self, depth: usize, words: &[&str]) -> Value {
        match self {
            Json::Null => Value::Null,
            Json::List(_) | Json::Object(_) if depth == 0 => Value::Null,
            Json::Bool(value) => json!(value),
            Json::Whole(change) => json!(change.of(1)),
            Json::Number(number) => json!(number),
            Json::Word(word) => json!(pick(words, *word)),
            Json::Text(text) => json!(text),
            Json::Numbers(numbers) => json!(numbers),
            Json::Words(words_of) => words_of.iter().map(|word| json!(pick(words, *word))).collect(),
            Json::List(items) => items.iter().map(|item| item.value_within(depth - 1, words)).collect(),
            Json::Object(fields) => fields
                .iter()
                .map(|(word, value)| ((*pick(words, *word)).to_owned(), value.value_within(depth - 1, words)))
                .collect(),
        }
    }
}

/// A change of an object.
#[derive(Arbitrary, Clone, Debug)]
pub enum Edit {
    /// A field gets a value.
    Set(u8, Json),
    /// A field of the object in a field gets a value.
    SetInner(u8, u8, Json),
    /// A number changes.
    Number(u8, Change),
    /// A field is removed.
    Remove(u8),
}

/// Applies the edits. Fields and texts come from `words`.
pub fn edit(object: &mut Map<String, Value>, edits: &[Edit], words: &[&str]) {
    let word = |idx: u8| (*pick(words, idx)).to_owned();
    for edit in edits {
        match edit {
            Edit::Set(field, value) => {
                object.insert(word(*field), value.value(words));
            }
            Edit::SetInner(field, inner, value) => {
                let outer = object.entry(word(*field)).or_insert_with(|| json!({}));
                if !outer.is_object() {
                    *outer = json!({});
                }
                outer[word(*inner)] = value.value(words);
            }
            Edit::Number(field, change) => {
                if let Some(number) = object.get_mut(&word(*field)) {
                    *number = json!(change.of(number.as_u64().unwrap_or(1)));
                }
            }
            Edit::Remove(field) => {
                object.remove(&word(*field));
            }
        }
    }
}
