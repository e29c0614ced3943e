//! Metadata values. Strings and arrays borrow from the file.

use std::fmt;

use crate::{GgufError, reader::Reader};

const TEXT: u32 = 8;
const ARRAY: u32 = 9;

/// A metadata value. The widths of numbers are dropped: no caller needs them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// `f32` or `f64`.
    Float(f64),
    /// `true` or `false`.
    Bool(bool),
    /// A UTF-8 string.
    Text(&'a str),
    /// Scalars or strings of one type.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// Reads the value of the metadata key `key`.
    pub(crate) fn read(reader: &mut Reader<'a>, value_type: u32, key: &str) -> Result<Value<'a>, GgufError> {
        Ok(match value_type {
            0 => Value::Unsigned(u8::from_le_bytes(reader.array(key)?).into()),
            1 => Value::Signed(i8::from_le_bytes(reader.array(key)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(reader.array(key)?).into()),
            3 => Value::Signed(i16::from_le_bytes(reader.array(key)?).into()),
            4 => Value::Unsigned(u32::from_le_bytes(reader.array(key)?).into()),
            5 => Value::Signed(i32::from_le_bytes(reader.array(key)?).into()),
            6 => Value::Float(f32::from_le_bytes(reader.array(key)?).into()),
            7 => Value::Bool(reader.array(key)? != [0]),
            TEXT => Value::Text(reader.text(key)?),
            ARRAY => Value::Array(Array::skip_array(reader, key)?),
            10 => Value::Unsigned(reader.u64(key)?),
            11 => Value::Signed(i64::from_le_bytes(reader.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(reader.array(key)?)),
            found => return Err(GgufError::ValueType { key: key.to_owned(), found }),
        })
    }

    /// The string; `None` for other types.
    pub fn as_text(self) -> Option<&'a str> {
        if let Value::Text(text) = self { Some(text) } else { None }
    }

    /// The integer; `None` for other types and for negative numbers.
    pub fn as_unsigned(self) -> Option<u64> {
        match self {
            Value::Unsigned(number) => Some(number),
            Value::Signed(number) => number.try_into().ok(),
            _ => None,
        }
    }

    /// The number, integers included; `None` for other types.
    pub fn as_float(self) -> Option<f64> {
        match self {
            Value::Unsigned(number) => Some(number as f64),
            Value::Signed(number) => Some(number as f64),
            Value::Float(number) => Some(number),
            _ => None,
        }
    }

    /// The boolean; `None` for other types.
    pub fn as_bool(self) -> Option<bool> {
        if let Value::Bool(value) = self { Some(value) } else { None }
    }

    /// The array; `None` for other types.
    pub fn as_array(self) -> Option<Array<'a>> {
        if let Value::Array(array) = self { Some(array) } else { None }
    }
}

/// For messages: long values are shortened.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(number) => number.fmt(f),
            Value::Signed(number) => number.fmt(f),
            Value::Float(number) => number.fmt(f),
            Value::Bool(value) => value.fmt(f),
            Value::Text(text) if text.chars().nth(60).is_some() => {
                write!(f, "{:?}...", text.chars().take(57).collect::<String>())
            }
            Value::Text(text) => write!(f, "{text:?}"),
            Value::Array(array) => write!(f, "an array of {}", array.len()),
        }
    }
}

/// An array. It was checked when the file was parsed; its elements are read on demand.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    pub(crate) element_type: u32,
    pub(crate) len: usize,
    /// The bytes of the elements.
    pub(crate) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Checks an array without reading its elements, which may be many.
    fn skip_array(reader: &mut Reader<'a>, key: &str) -> Result<Array<'a>, GgufError> {
        let element_type = u32::from_le_bytes(reader.array(key)?);
        let len = reader.u64(key)?;
        let start = reader.position;
        match element_type {
            0 | 1 | 7 => reader.take_many(len, 1, key)?,
            2 | 3 => reader.take_many(len, 2, key)?,
            4..=6 => reader.take_many(len, 4, key)?,
            10..=12 => reader.take_many(len, 8, key)?,
            TEXT => {
                for _ in 0..len {
                    reader.text(key)?;
                }
                &[]
            }
            // Nested arrays would let a file determine the depth of recursion. No known file has them.
            found => return Err(GgufError::ValueType { key: key.to_owned(), found }),
        };
        Ok(Array { element_type, len: len as usize, bytes: &reader.bytes[start..reader.position] })
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the array is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, first to last.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (mut reader, element_type) = (Reader::new(self.bytes), self.element_type);
        (0..self.len).map(move |_| {
            Value::read(&mut reader, element_type, "").expect("checked when the file was parsed")
        })
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
