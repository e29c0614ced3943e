//! The key file: TOML with a `[[key]]` for each key. A field that is not known is refused, as a misspelt limit would be none.

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU32,
    ops::Range,
};

use serde::{Deserialize, Deserializer, de::Error as _};
use toml::{Spanned, value::Datetime};

use crate::{KeyHash, KeyRole, QuotaLimits, date::system_time, holder::Key};

const MAX_NAME_BYTES: usize = 64;

/// A key file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct KeyFileError {
    /// From 1.
    pub line: usize,
    /// What is wrong there.
    pub message: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    key: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    name: Spanned<Name>,
    tenant: Option<Name>,
    #[serde(deserialize_with = "hash")]
    hash: Spanned<KeyHash>,
    #[serde(default)]
    role: KeyRole,
    requests_per_minute: Option<NonZeroU32>,
    tokens_per_minute: Option<NonZeroU32>,
    streams: Option<NonZeroU32>,
    expires: Option<Spanned<Datetime>>,
}

/// A name of a key or a tenant. It may appear in logs.
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct Name(String);

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(name: String) -> Result<Name, String> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_plain) {
            return Err(format!(
                "{name:?} is no name: it needs 1 to {MAX_NAME_BYTES} letters, digits, or characters of -_.@"
            ));
        }
        Ok(Name(name))
    }
}

fn hash<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Spanned<KeyHash>, D::Error> {
    let text = Spanned::<String>::deserialize(deserializer)?;
    let hash = text.get_ref().parse().map_err(D::Error::custom)?;
    Ok(Spanned::new(text.span(), hash))
}

/// The keys of a file, in its order.
pub(crate) fn parse(text: &str) -> Result<Vec<Key>, KeyFileError> {
    let wrong = |span: Range<usize>, message: String| {
        let line = 1 + text[..span.start.min(text.len())].matches('\n').count();
        KeyFileError { line, message }
    };
    let file: File = toml::from_str(text)
        .map_err(|error: toml::de::Error| wrong(error.span().unwrap_or(0..0), error.message().to_owned()))?;
    let mut keys: Vec<Key> = Vec::with_capacity(file.key.len());
    let (mut names, mut hashes) = (HashSet::new(), HashMap::new());
    for entry in file.key {
        let (name_span, name) = (entry.name.span(), entry.name.into_inner().0);
        let (hash_span, hash) = (entry.hash.span(), entry.hash.into_inner());
        if !names.insert(name.clone()) {
            return Err(wrong(name_span, format!("another key is called {name:?}, too")));
        }
        if let Some(other) = hashes.insert(hash, name.clone()) {
            return Err(wrong(hash_span, format!("{name:?} has the hash of {other:?}")));
        }
        let tenant = match (entry.tenant, entry.role) {
            (Some(tenant), _) => tenant.0,
            (None, KeyRole::Worker) => String::new(),
            (None, _) => return Err(wrong(name_span, format!("{name:?} has no tenant"))),
        };
        let expires = entry.expires.map(|expires| {
            let message = "expires is a date, or a date with a time and its offset from UTC";
            system_time(*expires.get_ref()).ok_or_else(|| wrong(expires.span(), message.to_owned()))
        });
        let limits = QuotaLimits {
            requests: entry.requests_per_minute.map(NonZeroU32::get),
            tokens: entry.tokens_per_minute.map(NonZeroU32::get),
            streams: entry.streams.map(NonZeroU32::get),
        };
        let expires = expires.transpose()?;
        keys.push(Key { hash, name, tenant, role: entry.role, limits, expires });
    }
    Ok(keys)
}
