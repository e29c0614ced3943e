//! What puts the signs of a sequence's begin and end around a text.

use serde_json::{Map, Value, json};
use tokenizers::PostProcessorWrapper;

use crate::splitter::described;

/// A token and its id.
type Sign<'a> = (&'a str, u32);

/// Puts the signs before and after each text.
pub(crate) fn with_signs(before: Option<Sign<'_>>, after: Option<Sign<'_>>) -> PostProcessorWrapper {
    let around = |text: Value| {
        let sign = |sign: Option<Sign<'_>>| {
            sign.map(|(token, _)| json!({"SpecialToken": {"id": token, "type_id": 0}}))
        };
        sign(before).into_iter().chain([text]).chain(sign(after)).collect::<Vec<_>>()
    };
    let text = |name: &str, type_id: u32| json!({"Sequence": {"id": name, "type_id": type_id}});
    let mut signs = Map::new();
    for (token, id) in before.into_iter().chain(after) {
        signs.insert(token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]}));
    }
    let pair: Vec<_> = around(text("A", 0)).into_iter().chain(around(text("B", 1))).collect();
    described(json!({
        "type": "TemplateProcessing",
        "single": around(text("A", 0)),
        "pair": pair,
        "special_tokens": signs,
    }))
}
