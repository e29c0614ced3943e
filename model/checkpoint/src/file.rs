//! Weight files mapped into memory, and ranges of their bytes.
//!
//! It knows bytes, not what they stand for.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_model_spec::LoadError;
use memmap2::Mmap;

/// One mapped file. A file that is truncated while it is in use kills the process: replace it, do not rewrite it.
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

    /// Adds what identifies its contents without reading them all: header and size.
    pub(crate) fn hash_into(&self, hasher: &mut blake3::Hasher) {
        hasher.update(self.header.as_bytes());
        hasher.update(&(self.map.len() as u64).to_le_bytes());
    }

    /// Adds what tells it from others with the same header: its place, and when it was written.
    ///
    /// # Errors
    /// When the system does not say.
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

    /// Gives its pages back to the system. They come back by themselves when they are read again.
    pub(crate) fn release_pages(&self) {
        // SAFETY: the mapping is of a file and never written, so its pages can be read again.
        // Only a hint: pages that stay are no fault.
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// Bytes of a mapped file.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    file: Arc<WeightFile>,
    start: usize,
    len: usize,
}

impl Span {
    /// # Panics
    /// When the file ends before the range does.
    pub(crate) fn new(file: &Arc<WeightFile>, range: Range<usize>) -> Span {
        assert!(
            range.start <= range.end && range.end <= file.bytes().len(),
            "ranges are checked when files are opened"
        );
        Span { file: Arc::clone(file), start: range.start, len: range.len() }
    }

    /// One of `num_parts` equal parts.
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
