//! Scratch memory of the compute threads.

use crate::memory::Aligned;
use crate::shared::SharedMut;

/// Scratch memory of the compute threads, used by one operation at a time.
#[derive(Default)]
pub struct ComputeScratch {
    memory: Aligned,
}

/// One operation's view of the scratch memory.
#[derive(Clone, Copy)]
pub struct ThreadScratch {
    memory: SharedMut<f32>,
    stride: usize,
}

impl ComputeScratch {
    /// Reserves at least `len` elements, with unspecified contents, in whole pages for each of `num_threads`.
    pub fn reserve(&mut self, num_threads: usize, len: usize) -> ThreadScratch {
        let stride = len.next_multiple_of(1024);
        let memory = SharedMut::new(self.memory.grown(stride * num_threads));
        ThreadScratch { memory, stride }
    }
}

impl ThreadScratch {
    /// The memory of one thread.
    pub fn of(&self, thread_idx: usize) -> *mut f32 {
        // SAFETY: `reserve` made room for every thread.
        unsafe { self.memory.ptr().add(thread_idx * self.stride) }
    }
}
