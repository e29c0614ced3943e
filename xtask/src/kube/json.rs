//! Parts of Kubernetes' objects.

use serde_json::Value;

/// The items of a list, or none.
pub(super) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// A text, or nothing.
pub(super) fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
