//! The table, its page, and what is said of fields that are not in it.

use std::fmt::Write;

use baton_request_fields::{Endpoint, FIELDS, Treatment, UnknownFields};
use serde_json::json;

const PAGE: &str = include_str!("../../../docs/guide/fields.md");
const ENDPOINTS: [Endpoint; 7] = [
    Endpoint::Chat,
    Endpoint::Completions,
    Endpoint::Responses,
    Endpoint::Messages,
    Endpoint::CountTokens,
    Endpoint::Tokenize,
    Endpoint::Detokenize,
];

/// In the table of the page.
fn name(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Chat => "chat",
        Endpoint::Completions => "completions",
        Endpoint::Responses => "responses",
        Endpoint::Messages => "messages",
        Endpoint::CountTokens => "count",
        Endpoint::Tokenize => "tokenize",
        Endpoint::Detokenize => "detokenize",
    }
}

#[test]
fn a_field_has_one_row_for_each_endpoint() {
    for endpoint in ENDPOINTS {
        let mut names: Vec<_> = FIELDS
            .iter()
            .filter(|field| field.endpoints.contains(&endpoint))
            .map(|field| field.name)
            .collect();
        let num = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), num, "{}", endpoint.path());
    }
}

#[test]
fn an_unknown_field_is_refused_with_the_nearest_name() {
    let refusal = |name: &str, unknown| {
        let rest = json!({name: 1}).as_object().unwrap().clone();
        Endpoint::Chat.check(&rest, unknown).err().map(|refusal| refusal.message)
    };
    let cases = [
        ("max_tokns", "did you mean max_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("Stop", "did you mean stop?"),
        ("prompt", "a field of /v1/completions, not of /v1/chat/completions"),
    ];
    for (name, expected) in cases {
        let message = refusal(name, UnknownFields::Refuse).unwrap();
        assert!(message.contains(expected), "{message}");
    }
    assert!(!refusal("qqq", UnknownFields::Refuse).unwrap().contains("did you mean"));
    assert_eq!(refusal("max_tokns", UnknownFields::Ignore), None);
    // A field that is known is no unknown one.
    assert!(refusal("grammar", UnknownFields::Ignore).is_some());
}

/// Token ids are what `/tokenize` answers with.
#[test]
fn a_prompt_that_is_tokenised_is_text() {
    let note = |endpoint: Endpoint| endpoint.field("prompt").map(|field| field.note);
    assert_eq!(note(Endpoint::Tokenize), Some("text"));
    assert_eq!(note(Endpoint::Completions), Some("text, token ids, or a list of them"));
}

/// A heading of the page, and what belongs below it.
type Group = (&'static str, fn(&Treatment) -> bool);

#[test]
fn the_page_is_the_table() {
    let mut page = String::from(
        "# Fields of requests\n\nA field that would change the answer is honoured or refused with a 400 that names it. \
         `null` is the same as an\nabsent field. A field that no API knows is refused with the nearest name; \
         `--unknown-fields ignore` accepts it.\n\n\
         `chat` is `/v1/chat/completions`, `completions` `/v1/completions`, `responses` `/v1/responses`, `messages` \
         `/v1/messages` and `count`\n`/v1/messages/count_tokens`.\n",
    );
    let groups: [Group; 4] = [
        ("Honoured", |treatment| matches!(treatment, Treatment::Honoured)),
        ("Accepted, without effect", |treatment| matches!(treatment, Treatment::Harmless)),
        ("Accepted with one value", |treatment| matches!(treatment, Treatment::Only(_))),
        ("Refused", |treatment| matches!(treatment, Treatment::Refused)),
    ];
    for (title, belongs) in groups {
        write!(page, "\n## {title}\n\n| field | of | |\n|---|---|---|\n").unwrap();
        for field in FIELDS.iter().filter(|field| belongs(&field.treatment)) {
            let of: Vec<_> = field.endpoints.iter().map(|endpoint| name(*endpoint)).collect();
            writeln!(page, "| `{}` | {} | {} |", field.name, of.join(", "), field.note).unwrap();
        }
    }
    assert!(PAGE == page, "docs/guide/fields.md differs from the table; it should be:\n{page}");
}
