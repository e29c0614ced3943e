//! Populates the memory of a pool a little ahead of its use. So neither the engine nor a transfer into these blocks
//! waits for the kernel to supply pages.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use crate::BlockStorage;

/// Bytes per system call: enough to share its fixed cost, and few enough to end within milliseconds.
const STRIDE: usize = 32 << 20;

/// Bytes after the blocks in use that are kept populated. Memory that is never used is never taken.
const AHEAD: usize = 64 << 20;

/// Tells the thread to end.
const STOP: usize = usize::MAX;

/// A thread that keeps pages populated a little ahead of the blocks in use. It ends when this is dropped.
#[derive(Debug)]
pub struct PagesAhead {
    /// Bytes from the front that shall be populated.
    wanted: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
    block_bytes: usize,
    num_used: usize,
}

impl PagesAhead {
    /// Starts at the front of `storage`.
    ///
    /// # Errors
    /// When the thread is refused.
    pub fn start(storage: Arc<BlockStorage>) -> io::Result<PagesAhead> {
        let block_bytes = storage.layout().block_bytes();
        let wanted = Arc::new(AtomicUsize::new(AHEAD));
        let thread = {
            let wanted = wanted.clone();
            thread::Builder::new().name("kv-pages".into()).spawn(move || keep_ready(&storage, &wanted))?
        };
        Ok(PagesAhead { wanted, thread: Some(thread), block_bytes, num_used: 0 })
    }

    /// The first `num_blocks` have been used.
    pub fn used(&mut self, num_blocks: usize) {
        if num_blocks > self.num_used {
            self.num_used = num_blocks;
            self.wanted.store(num_blocks * self.block_bytes + AHEAD, Ordering::Relaxed);
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for PagesAhead {
    fn drop(&mut self) {
        self.wanted.store(STOP, Ordering::Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}

fn keep_ready(storage: &BlockStorage, wanted: &AtomicUsize) {
    let size = storage.size_bytes();
    let mut ready = 0;
    while ready < size {
        match wanted.load(Ordering::Relaxed) {
            STOP => return,
            wanted if wanted <= ready => thread::park(),
            _ => {
                let end = size.min(ready + STRIDE);
                if storage.populate(ready..end).is_err() {
                    // Pages come on first touch.
                    return;
                }
                ready = end;
            }
        }
    }
}
