//! Pinned memory of the host that is given back and used again. To allocate it takes longer than to fill it: some milliseconds
//! for ten megabytes.

use std::sync::{Arc, Mutex, PoisonError};

use baton_cuda::{CudaError, Device, Pinned};

use crate::device::HostMemory;
use crate::kernel::Address;

/// Sizes are rounded up to this, so that more of them are alike.
const ROUNDED_TO: usize = 1 << 20;

/// Free memory that is kept at most. The rest is given to the system.
const MAX_FREE_BYTES: usize = 1 << 30;

/// Memory that was given back.
#[derive(Clone, Default)]
pub(super) struct FreeMemory(Arc<Mutex<Vec<Pinned>>>);

/// Memory in use. It is given back when it is dropped.
struct Used {
    /// `None` only while it is dropped.
    pinned: Option<Pinned>,
    free: FreeMemory,
}

impl FreeMemory {
    /// At least `num_bytes` bytes.
    ///
    /// # Errors
    /// When the host has not enough memory, or the driver fails.
    pub(super) fn allocate(&self, device: &Device, num_bytes: usize) -> Result<HostMemory, CudaError> {
        let size_bytes = num_bytes.next_multiple_of(ROUNDED_TO);
        let pinned = match self.take(size_bytes) {
            Some(pinned) => pinned,
            None => Pinned::new(device, size_bytes)?,
        };
        let at = Address(pinned.bytes().as_ptr() as u64);
        Ok(HostMemory::new(at, Used { pinned: Some(pinned), free: self.clone() }))
    }

    /// The smallest that is large enough, and not twice as large.
    fn take(&self, size_bytes: usize) -> Option<Pinned> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting =
            (0..free.len()).filter(|&idx| (size_bytes..2 * size_bytes).contains(&free[idx].size_bytes()));
        let idx = fitting.min_by_key(|&idx| free[idx].size_bytes())?;
        Some(free.swap_remove(idx))
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        let pinned = self.pinned.take().expect("dropped once");
        let mut free = self.free.0.lock().unwrap_or_else(PoisonError::into_inner);
        let num_free: usize = free.iter().map(Pinned::size_bytes).sum();
        if num_free + pinned.size_bytes() <= MAX_FREE_BYTES {
            free.push(pinned);
        }
    }
}
