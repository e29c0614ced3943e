//! The GGUF container, versions 2 and 3: metadata and tensor index over the bytes of a file.
//!
//! [`Gguf::parse`] is a pure function over untrusted bytes. It returns the contents or a [`GgufError`], and allocates
//! at most a few times the size of its input. It does not know the meaning of keys or how blocks are dequantised.

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
