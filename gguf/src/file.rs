//! A memory-mapped GGUF file.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

use crate::{Gguf, GgufError};

/// A mapped file. Truncating a mapped file kills the process, so a file must be replaced, not rewritten.
#[derive(Debug)]
pub struct GgufFile {
    map: Mmap,
}

impl GgufFile {
    /// Maps the file without reading it.
    ///
    /// # Errors
    /// When it cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<GgufFile> {
        let file = File::open(path)?;
        // SAFETY: a read-only mapping; see above about truncation.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(GgufFile { map })
    }

    /// Parses the file.
    ///
    /// # Errors
    /// As [`Gguf::parse`].
    pub fn parse(&self) -> Result<Gguf<'_>, GgufError> {
        Gguf::parse(&self.map)
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}
