//! Typed access to the fields of a JSON object. Messages name the field.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::LoadError;

/// The largest size a file may state. Products of a few such sizes do not overflow.
pub const MAX_SIZE: usize = 1 << 31;

/// The fields of one JSON object of a file. A `null` field counts as absent.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    path: &'a Path,
    /// Prefix of field names in messages: empty or "rope_scaling.".
    prefix: String,
    values: &'a Map<String, Value>,
}

/// Reads a file that contains one JSON object.
///
/// # Errors
/// When the file cannot be read or contains something else.
pub fn read_object(path: &Path) -> Result<Map<String, Value>, LoadError> {
    let text = std::fs::read(path).map_err(|source| LoadError::io(path, source))?;
    parse_object(path, &text)
}

/// Parses a text that contains one JSON object; `path` is for messages.
///
/// # Errors
/// When the text contains something else.
pub fn parse_object(path: &Path, text: &[u8]) -> Result<Map<String, Value>, LoadError> {
    let json = |message: String| LoadError::Json { path: path.to_owned(), message };
    match serde_json::from_slice(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(json(format!("found {}, expected a JSON object", kind(&other)))),
        Err(error) => Err(json(format!("not valid JSON: {error}"))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

impl<'a> Fields<'a> {
    /// The fields of an object in the file at `path`.
    pub fn new(path: &'a Path, values: &'a Map<String, Value>) -> Fields<'a> {
        Fields { path, prefix: String::new(), values }
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.path.to_owned()
    }

    /// All values.
    pub(crate) fn values(&self) -> &'a Map<String, Value> {
        self.values
    }

    /// The same object of the file with other values, such as defaults of absent fields.
    pub(crate) fn with_values<'b>(&self, values: &'b Map<String, Value>) -> Fields<'b>
    where
        'a: 'b,
    {
        Fields { path: self.path, prefix: self.prefix.clone(), values }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The value; `None` if absent or `null`.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.values.get(field).filter(|value| !value.is_null())
    }

    /// Whether the field is there and `null`: it states that there is none, where an absent field has a default.
    pub fn is_null(&self, field: &str) -> bool {
        self.values.get(field).is_some_and(Value::is_null)
    }

    /// The error that refuses a field's value.
    pub fn refuse(&self, field: &str, expected: impl Into<String>) -> LoadError {
        let mut found = self.get(field).map_or_else(|| "missing".into(), Value::to_string);
        if found.len() > 80 {
            let end = (0..=77).rev().find(|&end| found.is_char_boundary(end)).unwrap_or(0);
            found.truncate(end);
            found.push_str("...");
        }
        LoadError::Config {
            path: self.path(),
            field: format!("{}{field}", self.prefix),
            found,
            expected: expected.into(),
        }
    }

    fn read<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, LoadError> {
        self.get(field).map(|value| read(value).ok_or_else(|| self.refuse(field, expected))).transpose()
    }

    /// An integer from 1 to [`MAX_SIZE`]; `None` if the field is absent.
    ///
    /// # Errors
    /// When the field has another value; the message names it.
    pub fn size(&self, field: &str) -> Result<Option<usize>, LoadError> {
        self.read(field, "a whole number from 1 to 2^31", |value| {
            value.as_u64().filter(|size| (1..=MAX_SIZE as u64).contains(size)).map(|size| size as usize)
        })
    }

    /// As [`size`](Self::size), with a default for an absent field.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn size_or(&self, field: &str, default: usize) -> Result<usize, LoadError> {
        Ok(self.size(field)?.unwrap_or(default))
    }

    /// As [`size`](Self::size), for a required field.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn need_size(&self, field: &str) -> Result<usize, LoadError> {
        self.size(field)?.ok_or_else(|| self.refuse(field, "a whole number from 1 to 2^31"))
    }

    /// A finite number.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn number(&self, field: &str) -> Result<Option<f64>, LoadError> {
        self.read(field, "a number", |value| value.as_f64().filter(|x| x.is_finite()))
    }

    /// A finite number above zero.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn positive(&self, field: &str) -> Result<Option<f64>, LoadError> {
        match self.number(field)? {
            Some(x) if x <= 0.0 => Err(self.refuse(field, "a positive number")),
            found => Ok(found),
        }
    }

    /// As [`positive`](Self::positive), for a required field.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn need_positive(&self, field: &str) -> Result<f64, LoadError> {
        self.positive(field)?.ok_or_else(|| self.refuse(field, "a positive number"))
    }

    /// A boolean.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn flag(&self, field: &str) -> Result<Option<bool>, LoadError> {
        self.read(field, "true or false", Value::as_bool)
    }

    /// As [`flag`](Self::flag), with a default for an absent field.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn flag_or(&self, field: &str, default: bool) -> Result<bool, LoadError> {
        Ok(self.flag(field)?.unwrap_or(default))
    }

    /// A string.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn text(&self, field: &str) -> Result<Option<&'a str>, LoadError> {
        self.read(field, "a string", Value::as_str)
    }

    /// A list.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn list(&self, field: &str) -> Result<Option<&'a Vec<Value>>, LoadError> {
        self.read(field, "a list", Value::as_array)
    }

    /// One token id or a list of them.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn token_ids(&self, field: &str) -> Result<Vec<u32>, LoadError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.read(field, "a token id or a list of token ids", |value| match value {
            Value::Array(values) => values.iter().map(id).collect::<Option<Vec<u32>>>(),
            value => Some(vec![id(value)?]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// The full names of those that are not `known`.
    pub(crate) fn names_besides(&self, known: &[&str]) -> Vec<String> {
        let is_unknown = |name: &&String| !known.contains(&name.as_str()) && !self.is_null(name);
        self.values.keys().filter(is_unknown).map(|name| format!("{}{name}", self.prefix)).collect()
    }

    /// The fields of each nested object.
    pub fn objects(&self) -> impl Iterator<Item = Fields<'a>> {
        let (path, prefix) = (self.path, self.prefix.clone());
        self.values.iter().filter_map(move |(field, value)| {
            let values = value.as_object()?;
            Some(Fields { path, prefix: format!("{prefix}{field}."), values })
        })
    }

    /// The fields of the nested object `field`.
    ///
    /// # Errors
    /// As [`size`](Self::size).
    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>, LoadError> {
        let object = self.read(field, "an object", Value::as_object)?;
        Ok(object.map(|values| Fields {
            path: self.path,
            prefix: format!("{}{field}.", self.prefix),
            values,
        }))
    }
}
