//! Reads numbers, strings and byte ranges from the front of a file's bytes.
//!
//! It does not know values or tensors.

use crate::GgufError;

/// Reads from the front.
pub(crate) struct Reader<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) position: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, position: 0 }
    }

    pub(crate) fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], GgufError> {
        self.take_many(len as u64, 1, what)
    }

    pub(crate) fn take_many(
        &mut self,
        count: u64,
        size_bytes: usize,
        what: &str,
    ) -> Result<&'a [u8], GgufError> {
        let end = self.position as u128 + u128::from(count) * size_bytes as u128;
        if end > self.bytes.len() as u128 {
            return Err(GgufError::Truncated { what: what.to_owned(), len: self.bytes.len(), end });
        }
        let taken = &self.bytes[self.position..end as usize];
        self.position = end as usize;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        Ok(self.take(N, what)?.try_into().expect("take returns N bytes"))
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn text(&mut self, what: &str) -> Result<&'a str, GgufError> {
        let len = self.u64(what)?;
        let text = self.take_many(len, 1, what)?;
        std::str::from_utf8(text).map_err(|_| GgufError::Text { what: what.to_owned() })
    }
}
