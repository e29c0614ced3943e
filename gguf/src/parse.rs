//! Parses a GGUF file: header, metadata and the index of tensors.
//!
//! ```text
//! "GGUF" version num_tensors num_values | key type value ... | name dimensions type offset ... | padding | data
//! ```
//! Numbers are little-endian. Strings and arrays start with their length.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::{GgufError, Tensor, TensorType, Value, reader::Reader};

const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_DIMENSIONS: u32 = 4;

/// The metadata and tensor index of a file. Borrows its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Gguf<'a> {
    metadata: BTreeMap<&'a str, Value<'a>>,
    tensors: BTreeMap<&'a str, Tensor>,
    header: &'a [u8],
}

impl<'a> Gguf<'a> {
    /// Parses a whole file and checks every string, value and range.
    ///
    /// # Errors
    /// When the bytes are not a complete GGUF file with tensors of known types.
    pub fn parse(bytes: &'a [u8]) -> Result<Gguf<'a>, GgufError> {
        let mut reader = Reader::new(bytes);
        let magic = &bytes[..bytes.len().min(MAGIC.len())];
        if magic != MAGIC {
            return Err(GgufError::Magic { found: String::from_utf8_lossy(magic).into_owned() });
        }
        reader.take(MAGIC.len(), "the header")?;
        let version = u32::from_le_bytes(reader.array("the header")?);
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version { found: version });
        }
        let num_tensors = reader.u64("the header")?;
        let num_values = reader.u64("the header")?;
        // No memory is reserved for these counts: parsing with a wrong count fails at the end of the file.
        let mut metadata = BTreeMap::new();
        for _ in 0..num_values {
            let key = reader.text("a metadata key")?;
            let value_type = u32::from_le_bytes(reader.array(key)?);
            let value = Value::read(&mut reader, value_type, key)?;
            insert_new(&mut metadata, key, value)?;
        }
        let alignment = alignment(&metadata)?;
        let mut tensors = BTreeMap::new();
        for _ in 0..num_tensors {
            let (name, tensor) = tensor(&mut reader, alignment)?;
            insert_new(&mut tensors, name, tensor)?;
        }
        let header = &bytes[..reader.position];
        let data_start = header.len().next_multiple_of(alignment);
        for (name, tensor) in &mut tensors {
            let end = data_start as u128 + tensor.start as u128 + tensor.size_bytes as u128;
            if end > bytes.len() as u128 {
                return Err(GgufError::Truncated { what: format!("tensor {name}"), len: bytes.len(), end });
            }
            tensor.start += data_start;
        }
        Ok(Gguf { metadata, tensors, header })
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        self.metadata.get(key).copied()
    }

    /// The value of a metadata key, converted by `read`; `None` if absent.
    ///
    /// # Errors
    /// [`GgufError::Value`] when `read` returns `None`; `expected` describes valid values.
    pub fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        self.get(key).map(|value| read(value).ok_or_else(|| self.refuse(key, expected))).transpose()
    }

    /// The error that refuses a metadata value.
    pub fn refuse(&self, key: &str, expected: &str) -> GgufError {
        let found = self.get(key).map_or_else(|| "missing".to_owned(), |value| value.to_string());
        GgufError::Value { key: key.to_owned(), found, expected: expected.to_owned() }
    }

    /// All metadata, by key.
    pub fn metadata(&self) -> &BTreeMap<&'a str, Value<'a>> {
        &self.metadata
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<&'a str, Tensor> {
        &self.tensors
    }

    /// The part of the file before the data.
    pub fn header(&self) -> &'a [u8] {
        self.header
    }
}

fn insert_new<'a, T>(map: &mut BTreeMap<&'a str, T>, name: &'a str, value: T) -> Result<(), GgufError> {
    match map.entry(name) {
        Entry::Vacant(entry) => {
            entry.insert(value);
            Ok(())
        }
        Entry::Occupied(_) => Err(GgufError::Duplicate { name: name.to_owned() }),
    }
}

fn alignment(metadata: &BTreeMap<&str, Value<'_>>) -> Result<usize, GgufError> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment =
        value.as_unsigned().filter(|alignment| alignment.is_power_of_two() && *alignment <= 1 << 20);
    alignment.map(|alignment| alignment as usize).ok_or_else(|| GgufError::Value {
        key: ALIGNMENT_KEY.to_owned(),
        found: value.to_string(),
        expected: "a power of two up to 2^20".to_owned(),
    })
}

/// A tensor whose `start` is counted from the start of the data.
fn tensor<'a>(reader: &mut Reader<'a>, alignment: usize) -> Result<(&'a str, Tensor), GgufError> {
    let name = reader.text("the name of a tensor")?;
    let num_dimensions = u32::from_le_bytes(reader.array(name)?);
    let refuse = |found: Vec<u64>, block| GgufError::Dimensions { tensor: name.to_owned(), found, block };
    if !(1..=MAX_DIMENSIONS).contains(&num_dimensions) {
        return Err(refuse(vec![], 1));
    }
    let dimensions = (0..num_dimensions).map(|_| reader.u64(name)).collect::<Result<Vec<_>, _>>()?;
    let id = u32::from_le_bytes(reader.array(name)?);
    let offset = reader.u64(name)?;
    let tensor_type =
        TensorType::from_id(id).map_err(|found| GgufError::TensorType { tensor: name.to_owned(), found })?;
    let block = tensor_type.block_len();
    let sized = dimensions.iter().try_fold(1usize, |product, &dimension| {
        product.checked_mul(usize::try_from(dimension).ok()?).filter(|product| *product > 0)
    });
    let size_bytes = sized
        .filter(|_| dimensions[0].is_multiple_of(block as u64))
        .and_then(|count| (count / block).checked_mul(tensor_type.block_bytes()))
        .ok_or_else(|| refuse(dimensions.clone(), block))?;
    if !offset.is_multiple_of(alignment as u64) {
        return Err(GgufError::Misaligned { tensor: name.to_owned(), offset, alignment });
    }
    let what = || format!("tensor {name}");
    let len = reader.bytes.len();
    let start = usize::try_from(offset).ok().filter(|start| *start <= len).ok_or_else(|| {
        GgufError::Truncated { what: what(), len, end: u128::from(offset) + size_bytes as u128 }
    })?;
    let shape = dimensions.iter().rev().map(|&dimension| dimension as usize).collect();
    Ok((name, Tensor { tensor_type, shape, start, size_bytes }))
}
