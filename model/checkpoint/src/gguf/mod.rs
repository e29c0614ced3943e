//! GGUF model files: their configuration, their names for published tensors, and the files of a split model.

mod config;
mod files;
mod memory;
mod names;

pub(crate) use config::load_config;
pub use files::gguf_files;
pub use memory::gguf_memory_bytes;
pub(crate) use memory::log_widened;
pub(crate) use names::{Names, Place, ROPE_DIVISORS};
