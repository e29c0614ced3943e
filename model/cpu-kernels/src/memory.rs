//! Memory that is streamed through: in large pages, where the system has them, so that few addresses need translating.
//! A matrix of activations has rows pages apart; a tile writes to a page for each of its rows.

use memmap2::{Advice, MmapMut};

/// Numbers that begin at a cache line, so that vectors do not lie across two; grows, never shrinks.
#[derive(Default)]
pub struct Aligned {
    memory: Option<MmapMut>,
}

impl Aligned {
    /// The first `len`, with any contents.
    #[inline]
    pub fn grown(&mut self, len: usize) -> &mut [f32] {
        if self.len() < len {
            // Twice as much, for batches grow by and by; what is not touched takes no memory.
            let num_bytes = (4 * len).max(8 * self.len());
            // Before the new memory comes, which then may lie where the old was.
            self.memory = None;
            self.memory = Some(anonymous(num_bytes.next_multiple_of(4096)));
        }
        &mut self[..len]
    }
}

impl std::ops::Deref for Aligned {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        let Some(memory) = &self.memory else { return &[] };
        // SAFETY: pages are aligned, and any bytes are floats.
        unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), memory.len() / 4) }
    }
}

impl std::ops::DerefMut for Aligned {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        let Some(memory) = &mut self.memory else { return &mut [] };
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), memory.len() / 4) }
    }
}

/// Memory of zeroes, in large pages where the system has them.
///
/// # Panics
/// When there is none.
pub fn anonymous(num_bytes: usize) -> MmapMut {
    let map = MmapMut::map_anon(num_bytes).expect("memory for activations");
    // Systems without large pages refuse.
    #[cfg(target_os = "linux")]
    let _ = map.advise(Advice::HugePage);
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_grow_and_begin_at_a_line() {
        let mut numbers = Aligned::default();
        assert!(numbers.is_empty());
        for len in [1, 1000, 1001, 1 << 20] {
            let grown = numbers.grown(len);
            assert_eq!((grown.len(), grown.as_ptr() as usize % 64), (len, 0));
            grown.fill(1.0);
            assert!(numbers.len() >= len);
        }
        let most = numbers.len();
        numbers.grown(5);
        assert_eq!(numbers.len(), most);
    }
}
