//! Memory for streaming, in large pages if the system has them, so that there are few TLB misses. Rows of activations
//! are pages apart, and a tile writes to a page for each of its rows.

use memmap2::{Advice, MmapMut};

/// Bytes of a large page on most systems. Only whole ones at multiples of their size are large.
const LARGE_PAGE: usize = 2 << 20;

/// A buffer of numbers aligned to a cache line, so that no vector crosses two lines, and in large pages if it is large.
/// It grows and never shrinks.
#[derive(Default)]
pub struct Aligned {
    memory: Option<MmapMut>,
    /// Where the buffer is in the memory, in bytes.
    start: usize,
    num_bytes: usize,
}

impl Aligned {
    /// The first `len` numbers, with unspecified contents.
    #[inline]
    pub fn grown(&mut self, len: usize) -> &mut [f32] {
        if self.len() < len {
            // Doubles at least, because batches grow step by step. Pages that are not touched use no memory.
            let num_bytes = (4 * len).max(8 * self.len());
            // The old memory is freed before the new is mapped, so that the new may reuse its addresses.
            self.memory = None;
            let page = if num_bytes < LARGE_PAGE / 2 { 4096 } else { LARGE_PAGE };
            self.num_bytes = num_bytes.next_multiple_of(page);
            let memory = anonymous(self.num_bytes + page - 4096);
            self.start = memory.as_ptr().align_offset(page);
            self.memory = Some(memory);
        }
        &mut self[..len]
    }
}

impl std::ops::Deref for Aligned {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        let Some(memory) = &self.memory else { return &[] };
        let numbers = &memory[self.start..][..self.num_bytes];
        // SAFETY: pages are aligned, and any bytes are floats.
        unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len() / 4) }
    }
}

impl std::ops::DerefMut for Aligned {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        let Some(memory) = &mut self.memory else { return &mut [] };
        let numbers = &mut memory[self.start..][..self.num_bytes];
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len() / 4) }
    }
}

/// Zeroed memory, in large pages if the system has them.
///
/// # Panics
/// When no memory is available.
pub fn anonymous(num_bytes: usize) -> MmapMut {
    let map = MmapMut::map_anon(num_bytes).expect("memory for activations");
    // Systems without large pages return an error, which is ignored.
    #[cfg(target_os = "linux")]
    let _ = map.advise(Advice::HugePage);
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_grow_and_are_aligned_to_a_line() {
        let mut numbers = Aligned::default();
        assert!(numbers.is_empty());
        for len in [1, 1000, 1001, 1 << 20] {
            let grown = numbers.grown(len);
            assert_eq!((grown.len(), grown.as_ptr() as usize % 64), (len, 0));
            grown.fill(1.0);
            assert!(numbers.len() >= len);
        }
        assert_eq!(numbers.as_ptr() as usize % LARGE_PAGE, 0);
        let most = numbers.len();
        numbers.grown(5);
        assert_eq!(numbers.len(), most);
    }
}
