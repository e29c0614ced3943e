//! Memory of a device, and pinned host memory for copies.

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

    /// Like [`new`](Self::new), filled with zeros.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn zeroed(device: &Device, size_bytes: usize) -> Result<Allocation, CudaError> {
        let allocation = Allocation::new(device, size_bytes)?;
        // A stream of its own: a wait for all streams ends the captures of other threads with an error.
        let stream = device.stream()?;
        // SAFETY: the range is the whole allocation, which nothing else uses yet.
        unsafe { result::memset_d8_async(allocation.address, 0, size_bytes, stream.cu_stream()) }
            .and_then(|()| stream.synchronize())
            .map_err(|error| failed("cuMemsetD8Async", error))?;
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

/// Pinned host memory, which a device copies directly. Freed when dropped.
#[derive(Debug)]
pub struct Pinned {
    base: NonNull<u8>,
    size_bytes: usize,
    device: Device,
}

// SAFETY: the type owns plain memory.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates memory filled with zeros.
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

    /// The number of its bytes.
    pub fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// Its bytes. A caller whose device writes them must wait for the device first.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation has this many bytes, and they are initialised.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.size_bytes) }
    }

    /// Its bytes, mutable. A caller whose device reads them must wait for the device first.
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

/// Synchronous copies between a device and the host, with pinned memory and a stream.
#[derive(Debug)]
pub struct Copier {
    pinned: Pinned,
    stream: Arc<CudaStream>,
}

impl Copier {
    /// Copies in chunks of `chunk_bytes`.
    ///
    /// # Errors
    /// When there is not enough memory, or the driver fails.
    pub fn new(device: &Device, chunk_bytes: usize) -> Result<Copier, CudaError> {
        Ok(Copier { stream: device.stream()?, pinned: Pinned::new(device, chunk_bytes)? })
    }

    /// Fills `bytes` from the device.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// `from` points to as many bytes, and no thread writes them meanwhile.
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

    /// Copies `bytes` to the device and waits for the copy.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// `to` has room for the bytes, and no other thread uses it meanwhile.
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
