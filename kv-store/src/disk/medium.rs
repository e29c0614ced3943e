//! What the disk tier does to a file, so that a test can crash in the middle of it.

use std::{fmt, fs::File, io, os::unix::fs::FileExt};

/// A file of fixed length.
pub trait Medium: Send + Sync + fmt::Debug {
    /// Reads all of `bytes` from this offset.
    ///
    /// # Errors
    /// When the device refuses, or the file ends before.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` to this offset. A crash leaves any part of them written.
    ///
    /// # Errors
    /// When the device refuses. Any part may be written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
}

impl Medium for File {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }
}
