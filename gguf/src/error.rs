//! Why bytes are not a GGUF file.

use crate::TensorType;

/// What is wrong with a file, without its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The file does not begin with the magic number.
    #[error("the file begins with {found:?}, expected \"GGUF\"")]
    Magic {
        /// The first bytes, up to four.
        found: String,
    },
    /// The version is not supported, or the bytes are in big-endian order.
    #[error("GGUF version is {found}, expected 2 or 3 with the low byte first")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// The file is truncated.
    #[error("the file has {len} bytes, expected {end} for {what}: truncated")]
    Truncated {
        /// What does not fit.
        what: String,
        /// Bytes of the file.
        len: usize,
        /// Where it would end.
        end: u128,
    },
    /// A text is not UTF-8.
    #[error("{what} is not UTF-8")]
    Text {
        /// Which text.
        what: String,
    },
    /// A value has a type that does not exist, or one that may not be where it is.
    #[error("{key} is of type {found}, expected a scalar, a text, or an array of these")]
    ValueType {
        /// The metadata key.
        key: String,
        /// The number of the type; 9 is an array.
        found: u32,
    },
    /// A key or a tensor occurs twice.
    #[error("{name} is there twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A metadata value is missing, or not what it should be.
    #[error("{key} is {found}, expected {expected}")]
    Value {
        /// The metadata key.
        key: String,
        /// Its value, shortened.
        found: String,
        /// What is valid.
        expected: String,
    },
    /// A tensor has a shape that no tensor has.
    #[error(
        "tensor {tensor} has dimensions {found:?}, expected 1 to 4 of at least 1, the first a multiple of {block}"
    )]
    Dimensions {
        /// Its name.
        tensor: String,
        /// As they stand in the file, innermost first; empty if there are too many.
        found: Vec<u64>,
        /// Numbers in a block of the tensor's type.
        block: usize,
    },
    /// A tensor is of a type that is not supported.
    #[error("tensor {tensor} is of type {found}, expected one of {}", TensorType::names())]
    TensorType {
        /// Its name.
        tensor: String,
        /// The type's name, or its number.
        found: String,
    },
    /// A tensor does not begin where it may.
    #[error("tensor {tensor} begins at {offset}, expected a multiple of {alignment}")]
    Misaligned {
        /// Its name.
        tensor: String,
        /// In the tensors' part of the file.
        offset: u64,
        /// `general.alignment`
        alignment: usize,
    },
}
