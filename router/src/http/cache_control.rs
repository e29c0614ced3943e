//! `cache_control`, as in Anthropic's API: how long the KV of a prompt is kept. `priority` and other times than 5m and 1h are ours.

use std::time::Duration;

use baton_router_core::{CacheControl, MessageTexts};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{RefOr, Schema},
};

use super::error::ApiError;

/// The field of a body, not read yet: an error is to name the place in it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(transparent)]
pub(crate) struct CacheControlField(pub(crate) Value);

impl PartialSchema for CacheControlField {
    fn schema() -> RefOr<Schema> {
        let schema = json!({"type": "object", "properties": {
            "type": {"type": "string", "enum": ["ephemeral"]},
            "ttl": {"type": "string", "pattern": "^[0-9]+[smh]$"},
            "priority": {"type": "string", "enum": ["low", "normal", "high"]},
        }});
        serde_json::from_value(schema).expect("a schema")
    }
}

impl ToSchema for CacheControlField {}

const TIMES: &str = "a time such as \"30s\", \"5m\" or \"1h\", at most \"24h\"";

/// What the value asks for; `None`: nothing. `at` is where it is.
pub(crate) fn parse(at: &str, value: &Value) -> Result<Option<CacheControl>, ApiError> {
    if value.is_null() {
        return Ok(None);
    }
    let wrong = |param: String, expected: &str| {
        let message = format!("{param}: expected {expected}");
        Err(ApiError::invalid(param, message))
    };
    let Some(fields) = value.as_object() else {
        return wrong(at.to_owned(), "an object such as {\"type\": \"ephemeral\", \"ttl\": \"5m\"}");
    };
    let (mut ttl, mut priority) = (None, "high");
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let param = format!("{at}.{name}");
        match (name.as_str(), value.as_str()) {
            ("type", Some("ephemeral")) => {}
            // Tenants share no prefixes, whatever it says.
            ("scope", Some(_)) => {}
            ("type", _) => return wrong(param, "\"ephemeral\""),
            ("priority", Some(given @ ("low" | "normal" | "high"))) => priority = given,
            ("priority", _) => return wrong(param, "\"low\", \"normal\" or \"high\""),
            ("ttl", given) => match given.and_then(time) {
                Some(given) => ttl = Some(given),
                None => return wrong(param, TIMES),
            },
            _ => return wrong(param, "no such field, only type, ttl and priority"),
        }
    }
    match (priority, ttl) {
        ("high", ttl) => Ok(Some(CacheControl::High(ttl.unwrap_or(CacheControl::DEFAULT_TTL)))),
        (_, Some(_)) => wrong(format!("{at}.ttl"), "no time, unless the priority is \"high\""),
        ("low", None) => Ok(Some(CacheControl::Low)),
        _ => Ok(None),
    }
}

/// Reads the `cache_control` of a part whose text, if it has one, was appended last.
pub(crate) fn keep(texts: &mut MessageTexts, at: &str, part: &Value) -> Result<(), ApiError> {
    let at = format!("{at}.cache_control");
    match parse(&at, &part["cache_control"])? {
        Some(CacheControl::High(ttl)) => texts.keep(ttl),
        Some(CacheControl::Low) => {
            let param = format!("{at}.priority");
            let message =
                format!("{param}: \"low\" is for a whole prompt: give cache_control beside the messages");
            return Err(ApiError::invalid(param, message));
        }
        None => {}
    }
    Ok(())
}

fn time(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return None,
    };
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = number.parse::<u64>().ok().filter(|_| is_number)?.checked_mul(seconds)?;
    (1..=24 * 3600).contains(&seconds).then(|| Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_accepted_means_what_it_says() {
        let high = |seconds| Some(CacheControl::High(Duration::from_secs(seconds)));
        for (value, expected) in [
            (json!(null), None),
            (json!({"type": "ephemeral"}), high(300)),
            (json!({"type": "ephemeral", "scope": "global"}), high(300)),
            (json!({"type": "ephemeral", "ttl": "1h"}), high(3600)),
            (json!({"type": "ephemeral", "ttl": "30s", "priority": "high"}), high(30)),
            (json!({"ttl": "24h", "priority": null}), high(86400)),
            (json!({"priority": "low"}), Some(CacheControl::Low)),
            (json!({"type": "ephemeral", "priority": "normal"}), None),
        ] {
            assert_eq!(parse("cache_control", &value).expect("accepted"), expected, "{value}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_accepted() {
        for (value, expected) in [
            (json!("ephemeral"), "cache_control: expected an object such as {\"type\": \"ephemeral\""),
            (json!({"type": "persistent"}), "cache_control.type: expected \"ephemeral\""),
            (json!({"priority": 1}), "cache_control.priority: expected \"low\", \"normal\" or \"high\""),
            (json!({"ttl": "25h"}), "cache_control.ttl: expected a time such as \"30s\""),
            (json!({"ttl": "0s"}), "cache_control.ttl: expected a time"),
            (json!({"ttl": "+5m"}), "cache_control.ttl: expected a time"),
            (json!({"ttl": "m"}), "cache_control.ttl: expected a time"),
            (json!({"ttl": "5\u{b5}"}), "cache_control.ttl: expected a time"),
            (json!({"ttl": 300}), "cache_control.ttl: expected a time"),
            (json!({"ttl": "99999999999999999999h"}), "cache_control.ttl: expected a time"),
            (json!({"ttl": "5m", "priority": "low"}), "cache_control.ttl: expected no time, unless"),
            (json!({"prioritiy": "low"}), "cache_control.prioritiy: expected no such field"),
        ] {
            let message = parse("cache_control", &value).expect_err("refused").detail.message;
            assert!(message.starts_with(expected), "{message:?} does not say {expected:?}");
        }
    }
}
