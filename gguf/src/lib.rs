//! The GGUF container, versions 2 and 3: metadata and an index of tensors, over the bytes of a file.
//!
//! [`Gguf::parse`] is a pure function over bytes that are not trusted: it returns what it found or
//! a [`GgufError`], and what it allocates is at most a few times what it was given. It does not know what keys
//! mean, nor how blocks become numbers.

mod parse;
mod reader;

mod file;

mod error;
mod tensor;
#[cfg(feature = "testing")]
pub mod testing;
mod value;

pub use error::GgufError;
pub use file::GgufFile;
pub use parse::Gguf;
pub use tensor::{Tensor, TensorType};
pub use value::{Array, Value};
