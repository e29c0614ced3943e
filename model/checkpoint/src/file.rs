//! Memory-mapped weight files and byte ranges in them.
//!
//! It knows bytes, not their meaning.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_model_spec::LoadError;
use memmap2::Mmap;

/// One mapped file. Truncating a mapped file kills the process, so a file must be replaced, not rewritten.
#[derive(Debug)]
pub(crate) struct WeightFile {
    path: PathBuf,
    map: Mmap,
    /// Hash of the header.
    header: blake3::Hash,
}

impl WeightFile {
    pub(crate) fn new(path: PathBuf, map: Mmap, header: blake3::Hash) -> Arc<WeightFile> {
        Arc::new(WeightFile { path, map, header })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Hashes the header and the size: they identify the contents without reading all of them.
    pub(crate) fn hash_into(&self, hasher: &mut blake3::Hasher) {
        hasher.update(self.header.as_bytes());
        hasher.update(&(self.map.len() as u64).to_le_bytes());
    }

    /// Hashes what tells this file from others with the same header: its path and its time of modification.
    ///
    /// # Errors
    /// When the system does not report them.
    pub(crate) fn hash_place_into(&self, hasher: &mut blake3::Hasher) -> Result<(), LoadError> {
        let path = &self.path;
        let modified = path.metadata().and_then(|metadata| metadata.modified());
        let modified = modified.map_err(|source| LoadError::io(path, source))?;
        let modified = modified.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let whole = path.canonicalize().map_err(|source| LoadError::io(path, source))?;
        hasher.update(whole.as_os_str().as_encoded_bytes());
        hasher.update(&modified.as_nanos().to_le_bytes());
        Ok(())
    }

    /// Returns the pages to the system. They are mapped in again when they are read.
    pub(crate) fn release_pages(&self) {
        // SAFETY: the file mapping is never written, so its pages can be read again.
        // It is only a hint, so an error is ignored.
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// A range of bytes of a mapped file.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    file: Arc<WeightFile>,
    start: usize,
    len: usize,
}

impl Span {
    /// # Panics
    /// When the range exceeds the file.
    pub(crate) fn new(file: &Arc<WeightFile>, range: Range<usize>) -> Span {
        assert!(
            range.start <= range.end && range.end <= file.bytes().len(),
            "ranges are checked when files are opened"
        );
        Span { file: Arc::clone(file), start: range.start, len: range.len() }
    }

    /// Part `part_idx` of `num_parts` equal parts.
    pub(crate) fn part(&self, part_idx: usize, num_parts: usize) -> Span {
        let len = self.len / num_parts;
        assert!(part_idx < num_parts, "part {part_idx} of {num_parts}");
        Span { file: Arc::clone(&self.file), start: self.start + part_idx * len, len }
    }

    pub(crate) fn file(&self) -> &WeightFile {
        &self.file
    }
}

impl Deref for Span {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.file.bytes()[self.start..self.start + self.len]
    }
}

/// Maps a whole file.
pub(crate) fn map(path: &Path) -> Result<Mmap, LoadError> {
    let file = File::open(path).map_err(|source| LoadError::io(path, source))?;
    // SAFETY: a read-only mapping; see `WeightFile` about truncation.
    unsafe { Mmap::map(&file) }.map_err(|source| LoadError::io(path, source))
}
