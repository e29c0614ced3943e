//! A GGUF file, mapped into memory.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

use crate::{Gguf, GgufError};

/// A mapped file. Truncating it while it is in use kills the process: replace files, do not rewrite them.
#[derive(Debug)]
pub struct GgufFile {
    map: Mmap,
}

impl GgufFile {
    /// Maps the file; reads nothing yet.
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

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}
