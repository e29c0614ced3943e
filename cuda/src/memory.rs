//! Memory of a device, and pinned memory of the host for its copies.

use std::{ptr::NonNull, sync::Arc};

use cudarc::driver::{CudaStream, result};

use crate::{CudaError, Device, error::refused, failed};

/// Plain memory of a device (`cuMemAlloc`, aligned to 256 bytes), which other processes can open. Freed when dropped.
#[derive(Debug)]
pub struct Allocation {
    address: u64,
    size_bytes: usize,
    device: Device,
}

impl Allocation {
    /// Allocates memory with undefined contents.
    ///
    /// # Errors
    /// When the device has not enough memory, or the driver fails.
    pub fn new(device: &Device, size_bytes: usize) -> Result<Allocation, CudaError> {
        device.bind()?;
        // SAFETY: a new allocation, which is owned from here on. The driver rejects allocations of 0 bytes.
        let address = unsafe { result::malloc_sync(size_bytes.max(1)) }
            .map_err(|error| refused("cuMemAlloc", error, size_bytes))?;
        Ok(Allocation { address, size_bytes, device: device.clone() })
    }

    /// Zeroed.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn zeroed(device: &Device, size_bytes: usize) -> Result<Allocation, CudaError> {
        let allocation = Allocation::new(device, size_bytes)?;
        // SAFETY: the whole allocation, which only this function knows yet.
        unsafe { result::memset_d8_sync(allocation.address, 0, size_bytes) }
            .map_err(|error| failed("cuMemsetD8", error))?;
        // It may return before it is done.
        result::ctx::synchronize().map_err(|error| failed("cuCtxSynchronize", error))?;
        Ok(allocation)
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes, as requested.
    pub fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// The device that holds it.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A failure cannot be handled here; the end of the process frees the memory.
        let _ = self.device.bind();
        // SAFETY: made by `new`, and not used after this.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Pinned memory of the host, which a device copies directly. Freed when dropped.
#[derive(Debug)]
pub struct Pinned {
    base: NonNull<u8>,
    size_bytes: usize,
    device: Device,
}

// SAFETY: plain memory that it owns.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Zeroed.
    ///
    /// # Errors
    /// When the host has not enough memory, or the driver fails.
    pub fn new(device: &Device, size_bytes: usize) -> Result<Pinned, CudaError> {
        device.bind()?;
        // SAFETY: a new allocation, which is owned from here on.
        let base =
            unsafe { result::malloc_host(size_bytes, 0) }.map_err(|error| failed("cuMemHostAlloc", error))?;
        let base = NonNull::new(base.cast())
            .ok_or(CudaError::Failed { call: "cuMemHostAlloc", why: "no memory".into() })?;
        let mut pinned = Pinned { base, size_bytes, device: device.clone() };
        pinned.bytes_mut().fill(0);
        Ok(pinned)
    }

    /// Its bytes. A caller that had a device write them waits for that first.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation has this many bytes, and they are initialised.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.size_bytes) }
    }

    /// Its bytes, mutable. A caller that has a device read them waits for that first.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` owns them.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.size_bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made by `new`, and not used after this.
        let _ = unsafe { result::free_host(self.base.as_ptr().cast()) };
    }
}

/// Copies between a device and the host, and waits for them: pinned memory and a stream.
#[derive(Debug)]
pub struct Copier {
    pinned: Pinned,
    stream: Arc<CudaStream>,
}

impl Copier {
    /// Copies of `chunk_bytes` at a time.
    ///
    /// # Errors
    /// When there is no such memory, or the driver fails.
    pub fn new(device: &Device, chunk_bytes: usize) -> Result<Copier, CudaError> {
        Ok(Copier { stream: device.stream()?, pinned: Pinned::new(device, chunk_bytes)? })
    }

    /// Fills `bytes` from the device.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// `from` points to so many bytes, and no thread writes them meanwhile.
    pub unsafe fn read(&mut self, from: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.pinned.device.bind()?;
        let mut source = from;
        for chunk in bytes.chunks_mut(self.pinned.size_bytes) {
            let pinned = &mut self.pinned.bytes_mut()[..chunk.len()];
            // SAFETY: valid by the caller's contract; the copy ends before the memory is used again.
            unsafe { result::memcpy_dtoh_async(pinned, source, self.stream.cu_stream()) }
                .and_then(|()| self.stream.synchronize())
                .map_err(|error| failed("cuMemcpyDtoH", error))?;
            chunk.copy_from_slice(&self.pinned.bytes()[..chunk.len()]);
            source += chunk.len() as u64;
        }
        Ok(())
    }

    /// Copies `bytes` to the device; they are there when it returns.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// `to` has room for them, and no other thread uses it meanwhile.
    pub unsafe fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        self.pinned.device.bind()?;
        let mut target = to;
        for chunk in bytes.chunks(self.pinned.size_bytes) {
            let pinned = &mut self.pinned.bytes_mut()[..chunk.len()];
            pinned.copy_from_slice(chunk);
            // SAFETY: as in `read`.
            unsafe { result::memcpy_htod_async(target, pinned, self.stream.cu_stream()) }
                .and_then(|()| self.stream.synchronize())
                .map_err(|error| failed("cuMemcpyHtoD", error))?;
            target += chunk.len() as u64;
        }
        Ok(())
    }
}
