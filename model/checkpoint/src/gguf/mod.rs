//! GGUF model files: their configuration, their names for published tensors, and the files of a split model.

mod config;
mod files;
mod names;

pub(crate) use config::load_config;
pub use files::gguf_files;
pub(crate) use names::{Names, Place, ROPE_DIVISORS};
