//! Errors of parsing GGUF files.

use crate::TensorType;

/// What is wrong with a file. The caller adds its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The file does not start with the magic number.
    #[error("the file starts with {found:?}, expected \"GGUF\"")]
    Magic {
        /// The first bytes, up to four.
        found: String,
    },
    /// The version is not supported, or the file is big-endian.
    #[error("GGUF version is {found}, expected 2 or 3 in little-endian order")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// The file is truncated.
    #[error("the file has {len} bytes, expected {end} for {what}: truncated")]
    Truncated {
        /// What is truncated.
        what: String,
        /// Bytes of the file.
        len: usize,
        /// The end that it needs.
        end: u128,
    },
    /// A text is not UTF-8.
    #[error("{what} is not UTF-8")]
    Text {
        /// Which text.
        what: String,
    },
    /// A value has an unknown type, or a type that is not allowed in its place.
    #[error("{key} is of type {found}, expected a scalar, a string, or an array of these")]
    ValueType {
        /// The metadata key.
        key: String,
        /// The number of the type; 9 is an array.
        found: u32,
    },
    /// A key or a tensor occurs twice.
    #[error("{name} occurs twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A metadata value is missing or invalid.
    #[error("{key} is {found}, expected {expected}")]
    Value {
        /// The metadata key.
        key: String,
        /// Its value, shortened.
        found: String,
        /// What is valid.
        expected: String,
    },
    /// A tensor has an invalid shape.
    #[error(
        "tensor {tensor} has dimensions {found:?}, expected 1 to 4 of at least 1, the first a multiple of {block}"
    )]
    Dimensions {
        /// The tensor's name.
        tensor: String,
        /// The dimensions in the file's order, innermost first; empty if there are too many.
        found: Vec<u64>,
        /// Numbers in a block of the type.
        block: usize,
    },
    /// A tensor is of a type that is not supported.
    #[error("tensor {tensor} is of type {found}, expected one of {}", TensorType::names())]
    TensorType {
        /// The tensor's name.
        tensor: String,
        /// The type's name, or its number.
        found: String,
    },
    /// A tensor starts at an invalid offset.
    #[error("tensor {tensor} starts at {offset}, expected a multiple of {alignment}")]
    Misaligned {
        /// The tensor's name.
        tensor: String,
        /// Offset in the data part of the file.
        offset: u64,
        /// `general.alignment`
        alignment: usize,
    },
}
