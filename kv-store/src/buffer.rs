//! Memory that a file may be read into, and written from, without the page cache.

/// Addresses, lengths and offsets of such input and output are multiples of this, in bytes.
pub(crate) const PAGE: usize = 4096;

/// Zeroed bytes that begin at a multiple of [`PAGE`]. The last page is whole.
#[derive(Debug)]
pub(crate) struct PageBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl PageBuffer {
    /// At least `len` bytes.
    pub(crate) fn new(len: usize) -> PageBuffer {
        let len = len.next_multiple_of(PAGE);
        let bytes = vec![0; len + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        PageBuffer { bytes, start, len }
    }

    /// All of them.
    pub(crate) fn pages(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }

    /// All of them, mutable.
    pub(crate) fn pages_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_whole_pages_at_the_start_of_a_page() {
        for len in [1, 4095, 4096, 4097, 100_000] {
            let mut buffer = PageBuffer::new(len);
            assert!(buffer.pages().as_ptr().addr().is_multiple_of(PAGE), "{len}");
            assert!(buffer.pages().len() >= len && buffer.pages().len() < len + PAGE);
            buffer.pages_mut().fill(7);
            assert!(buffer.pages().iter().all(|&byte| byte == 7));
        }
    }
}
