//! Blocks in CUDA device memory, host memory that devices reach, and copies between devices. It uses `baton-cuda`,
//! which reports a missing driver or device.
//!
//! What was run: that a missing driver and a missing device are said. The rest needs a device; `nccl/cuda_tests.rs`,
//! `shm/devices.rs` and `rdma/devices.rs` have what is to be run on one.

use std::{
    ffi::c_void,
    fmt, io,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use baton_cuda::{Allocation, Copier};
pub use baton_cuda::{CudaError, Device, failed, num_devices};
use baton_kv_cache::{
    BlockKernels, BlockStorage, DeviceCopy, DeviceMemory, DividedMemory, HostAccess, KvLayout, KvShard,
};
use cudarc::driver::{CudaEvent, CudaStream, result, sys};

/// Zeroed blocks in a device's memory (`cuMemAlloc`), which other processes can open. `kernels` belong to that device.
/// Without them, pieces are copied to the host one by one, and processors compute their checksums.
///
/// # Errors
/// When the device does not exist or has too little memory.
pub fn blocks_on_device(
    ordinal: u32,
    layout: KvLayout,
    num_blocks: usize,
    kernels: Option<Box<dyn BlockKernels>>,
) -> io::Result<BlockStorage> {
    let size_bytes = BlockStorage::bytes_of(&layout, num_blocks)?;
    let device = Device::open(ordinal).map_err(io::Error::other)?;
    let region = Region::new(device, size_bytes, kernels).map_err(io::Error::other)?;
    Ok(BlockStorage::on_device(Box::new(region), layout, num_blocks))
}

/// Zeroed blocks of a model with several ranks, on these devices, in the order of ranks. Each device holds the blocks
/// of its own KV heads. `kernels` belong to the devices, in the same order. Without them, pieces are copied to the host
/// head by head.
///
/// # Errors
/// As [`blocks_on_device`], and when the heads cannot be divided among the devices.
///
/// # Panics
/// When only some ranks have kernels.
pub fn blocks_on_devices(
    ordinals: &[u32],
    layout: KvLayout,
    num_blocks: usize,
    kernels: Vec<Box<dyn BlockKernels>>,
) -> io::Result<BlockStorage> {
    let of_rank = |(rank, &ordinal): (usize, &u32)| -> io::Result<Box<dyn DeviceMemory>> {
        let shard = KvShard::new(&layout, ordinals.len(), rank).map_err(io::Error::other)?;
        let size_bytes = BlockStorage::bytes_of(shard.layout(), num_blocks)?;
        let region = Device::open(ordinal).and_then(|device| Region::new(device, size_bytes, None));
        Ok(Box::new(region.map_err(io::Error::other)?))
    };
    let parts = ordinals.iter().enumerate().map(of_rank).collect::<io::Result<_>>()?;
    let memory = DividedMemory::new(layout, parts).map_err(io::Error::other)?;
    let memory = if kernels.is_empty() { memory } else { memory.with_kernels(kernels) };
    Ok(BlockStorage::on_device(Box::new(memory), layout, num_blocks))
}

/// Opens memory of another process by its handle. It has at least `size_bytes` bytes, on `device` or on a device that
/// `device` reaches.
///
/// # Errors
/// When the handle is invalid, or its memory is smaller.
pub fn memory_of_handle(
    device: &Device,
    handle: [u8; 64],
    size_bytes: usize,
) -> io::Result<Box<dyn DeviceMemory>> {
    let region = Region::open(device.clone(), handle).map_err(io::Error::other)?;
    let opened_bytes = region.size_bytes().map_err(io::Error::other)?;
    if opened_bytes < size_bytes {
        let message =
            format!("the peer's memory has {opened_bytes} bytes, its blocks would take {size_bytes}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    Ok(Box::new(region))
}

/// Bytes that are copied at a time.
const PINNED_BYTES: usize = 1 << 20;

/// The driver's allocation unit. Smaller allocations may share a unit, and a handle opens the whole unit.
const UNIT_BYTES: usize = 2 << 20;

/// How often to check whether a device has finished a copy.
const COPY_PAUSE: Duration = Duration::from_micros(20);

/// Memory on a device.
struct Region {
    memory: Owned,
    copier: Mutex<Copier>,
    kernels: Option<Mutex<Box<dyn BlockKernels>>>,
    device: Device,
}

#[derive(Debug)]
enum Owned {
    Allocated(Allocation),
    Opened(OpenedMemory),
}

/// Memory of another process. Dropping it closes the handle.
#[derive(Debug)]
struct OpenedMemory {
    address: u64,
    device: Device,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:?})", self.memory)
    }
}

impl Region {
    fn new(
        device: Device,
        size_bytes: usize,
        kernels: Option<Box<dyn BlockKernels>>,
    ) -> Result<Region, CudaError> {
        let copier = Mutex::new(Copier::new(&device, PINNED_BYTES)?);
        let memory = Owned::Allocated(Allocation::zeroed(&device, size_bytes.next_multiple_of(UNIT_BYTES))?);
        Ok(Region { memory, copier, kernels: kernels.map(Mutex::new), device })
    }

    fn open(device: Device, handle: [u8; 64]) -> Result<Region, CudaError> {
        device.bind()?;
        let copier = Mutex::new(Copier::new(&device, PINNED_BYTES)?);
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the out pointer is valid. Bytes that are no handle are an error, by the driver's word.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) };
        opened.result().map_err(|error| failed("cuIpcOpenMemHandle", error))?;
        let memory = Owned::Opened(OpenedMemory { address, device: device.clone() });
        Ok(Region { memory, copier, kernels: None, device })
    }

    fn base(&self) -> u64 {
        match &self.memory {
            Owned::Allocated(memory) => memory.address(),
            Owned::Opened(memory) => memory.address,
        }
    }

    /// Of the whole allocation, as the driver knows it.
    fn size_bytes(&self) -> Result<usize, CudaError> {
        let mut size_bytes = 0;
        // SAFETY: the out pointers are valid or null; the address is one that the driver gave.
        let found =
            unsafe { sys::cuMemGetAddressRange_v2(std::ptr::null_mut(), &mut size_bytes, self.base()) };
        found.result().map_err(|error| failed("cuMemGetAddressRange", error))?;
        Ok(size_bytes)
    }

    fn copier(&self) -> MutexGuard<'_, Copier> {
        self.copier.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        // Nothing can be done about a failure: the process's end closes it, too.
        let _ = self.device.bind();
        // SAFETY: made by `open`, and not used after this.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) }.result();
    }
}

// SAFETY: the allocation, or the mapping of another process's, stays where it is until the drop.
unsafe impl DeviceMemory for Region {
    fn device(&self) -> u32 {
        self.device.ordinal()
    }

    fn address(&self) -> Option<u64> {
        Some(self.base())
    }

    fn bind(&self) -> io::Result<()> {
        self.device.bind().map_err(io::Error::other)
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: in the region, and not written, by the caller's word.
        unsafe { self.copier().read(self.base() + offset as u64, bytes) }.map_err(io::Error::other)
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: in the region, and not used, by the caller's word.
        unsafe { self.copier().write(self.base() + offset as u64, bytes) }.map_err(io::Error::other)
    }

    fn kernels(&self) -> Option<&Mutex<Box<dyn BlockKernels>>> {
        self.kernels.as_ref()
    }

    unsafe fn access_host(&self, base: NonNull<u8>, size_bytes: usize) -> io::Result<Option<HostAccess>> {
        // SAFETY: by the caller's word.
        let registration = unsafe { HostRegistration::new(&self.device, base, size_bytes) };
        let registration = registration.map_err(io::Error::other)?;
        let is_unified = registration.address == base.as_ptr() as u64;
        Ok(is_unified.then(|| Box::new(registration) as HostAccess))
    }

    fn handle(&self) -> Option<[u8; 64]> {
        self.device.bind().ok()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the out pointer is valid, and the allocation alive. What was opened cannot be passed on.
        let got = unsafe { sys::cuIpcGetMemHandle(&mut handle, self.base()) };
        got.result().ok().map(|()| handle.reserved.map(|byte| byte as u8))
    }
}

/// Host memory that a device reads and writes, until this is dropped. Its pages are pinned.
#[derive(Debug)]
pub struct HostRegistration {
    base: *mut c_void,
    device: Device,
    /// The address at which the device sees it.
    pub address: u64,
}

// SAFETY: the pointer is a name for the driver; the memory is not touched through it.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// # Safety
    /// The memory outlives the registration.
    pub unsafe fn new(
        device: &Device,
        base: NonNull<u8>,
        size_bytes: usize,
    ) -> Result<HostRegistration, CudaError> {
        device.bind()?;
        let base: *mut c_void = base.as_ptr().cast();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the memory is there by the caller's word.
        let registered = unsafe { sys::cuMemHostRegister_v2(base, size_bytes, flags) };
        registered.result().map_err(|error| failed("cuMemHostRegister", error))?;
        let mut registration = HostRegistration { base, device: device.clone(), address: 0 };
        // SAFETY: the out pointer is valid, and the memory registered.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut registration.address, base, 0) };
        mapped.result().map_err(|error| failed("cuMemHostGetDevicePointer", error))?;
        Ok(registration)
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: registered by `new`. Nothing can be done about a failure.
        let _ = unsafe { sys::cuMemHostUnregister(self.base) }.result();
    }
}

/// Copies between device memories, on a stream of their own, with an event behind them.
pub struct DeviceCopies {
    stream: Arc<CudaStream>,
    event: CudaEvent,
    device: Device,
}

impl DeviceCopies {
    /// On a stream of its own.
    pub fn new(device: Device) -> Result<DeviceCopies, CudaError> {
        let stream = device.stream()?;
        let event = device.context().new_event(None).map_err(|error| failed("cuEventCreate", error))?;
        Ok(DeviceCopies { stream, event, device })
    }

    /// Begins to copy.
    ///
    /// # Safety
    /// The device reaches both memories. The source is not written and the target is not used before
    /// [`finish`](Self::finish) has returned.
    pub unsafe fn begin(&self, &DeviceCopy { source, target, len }: &DeviceCopy) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: by the caller's word.
        let begun = unsafe { result::memcpy_dtod_async(target, source, len, self.stream.cu_stream()) };
        begun.map_err(|error| failed("cuMemcpyDtoDAsync", error))
    }

    /// Waits until all copies are done. No peer takes part in them, so there is no deadline.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        self.event.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
        while !self.event.try_is_complete().map_err(|error| failed("cuEventQuery", error))? {
            std::thread::sleep(COPY_PAUSE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::LAYOUT;

    #[test]
    fn blocks_on_a_device_that_is_missing_are_refused() {
        if let Err(error @ (CudaError::NoDriver | CudaError::NoDevice)) = num_devices() {
            let refused = blocks_on_device(0, LAYOUT, 4, None).unwrap_err();
            assert_eq!(refused.to_string(), error.to_string());
        }
    }
}
