//! CUDA devices through cudarc's driver API, loaded at run time: whether there are any, block memory on them, and
//! memory of the host that they can reach.
//!
//! cudarc's functions panic where the driver is absent, so that everything here begins with [`num_devices`] or
//! [`Device::open`]. Everything that is called is older than CUDA 11, so that any driver in use has it.
//!
//! What was run: that a missing driver and a missing device are said. The rest needs a device; `nccl/cuda_tests.rs`,
//! `shm/devices.rs` and `rdma/devices.rs` have what is to be run on one.

use std::{
    ffi::c_void,
    fmt, io,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use baton_kv_cache::{BlockStorage, DeviceMemory, KvLayout};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError,
    result::{self, device},
    sys,
};
use thiserror::Error;

/// Why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CudaError {
    /// The host has no driver of NVIDIA's, or this process (this container) cannot see it.
    #[error("no CUDA driver: libcuda.so.1 not found")]
    NoDriver,
    /// A driver without a device, or all of them hidden (CUDA_VISIBLE_DEVICES).
    #[error("no device: the CUDA driver finds none")]
    NoDevice,
    /// Fewer devices than that.
    #[error("no device {device}: there are {num_devices}")]
    NoSuchDevice {
        /// Asked for.
        device: u32,
        /// There are.
        num_devices: usize,
    },
    /// A call failed.
    #[error("{call} failed: {why}")]
    Failed {
        /// Of the driver.
        call: &'static str,
        /// Its words.
        why: String,
    },
}

/// How many devices this process can use: at least one.
///
/// # Errors
/// What is missing.
pub fn num_devices() -> Result<usize, CudaError> {
    // SAFETY: loads the driver, if there is one, as any CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let count = result::init().and_then(|()| device::get_count());
    match count {
        Ok(count @ 1..) => Ok(count as usize),
        Ok(_) | Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Err(CudaError::NoDevice),
        Err(error) => Err(failed("cuInit", error)),
    }
}

/// One device, by its primary context: the one that the CUDA runtime, and so NCCL, uses.
#[derive(Clone, Debug)]
pub(crate) struct Device(Arc<CudaContext>);

impl Device {
    /// The `ordinal`th that this process sees.
    pub(crate) fn open(ordinal: u32) -> Result<Device, CudaError> {
        let num_devices = num_devices()?;
        if ordinal as usize >= num_devices {
            return Err(CudaError::NoSuchDevice { device: ordinal, num_devices });
        }
        let context =
            CudaContext::new(ordinal as usize).map_err(|error| failed("cuDevicePrimaryCtxRetain", error))?;
        Ok(Device(context))
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.0
    }

    /// Makes it the calling thread's device.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.0.bind_to_thread().map_err(|error| failed("cuCtxSetCurrent", error))
    }

    /// A stream of its own, ordered after nothing else.
    pub(crate) fn stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        self.0.new_stream().map_err(|error| failed("cuStreamCreate", error))
    }
}

/// Zeroed blocks in a device's memory. Plain memory (`cuMemAlloc`), which other processes can open.
///
/// # Errors
/// When there is no such device, or no such amount of memory.
pub fn blocks_on_device(ordinal: u32, layout: KvLayout, num_blocks: usize) -> io::Result<BlockStorage> {
    let size_bytes = BlockStorage::bytes_of(&layout, num_blocks)?;
    let device = Device::open(ordinal).map_err(io::Error::other)?;
    let region = Region::new(device, size_bytes).map_err(io::Error::other)?;
    Ok(BlockStorage::on_device(Box::new(region), layout, num_blocks))
}

/// Blocks of another process, by the handle that it gave; of the same device, or of one that `ordinal` reaches.
pub(crate) fn blocks_of_handle(
    device: &Device,
    handle: [u8; 64],
    layout: KvLayout,
    num_blocks: usize,
) -> io::Result<BlockStorage> {
    BlockStorage::bytes_of(&layout, num_blocks)?;
    let region = Region::open(device.clone(), handle).map_err(io::Error::other)?;
    Ok(BlockStorage::on_device(Box::new(region), layout, num_blocks))
}

/// Bytes of a piece that are copied at a time.
const PINNED_BYTES: usize = 1 << 20;

/// How often is looked whether a device has copied.
const COPY_PAUSE: Duration = Duration::from_micros(20);

/// Memory of a device.
struct Region {
    base: sys::CUdeviceptr,
    origin: Origin,
    copier: Mutex<Copier>,
    device: Device,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Allocated,
    /// Another process's.
    Opened,
}

/// What copies between the device and processors: memory that both see, and a stream.
struct Copier {
    pinned: NonNull<u8>,
    stream: Arc<CudaStream>,
}

// SAFETY: the pinned memory is the copier's own, and is used by whoever has it mutably.
unsafe impl Send for Copier {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:?} at {:#x} of device {})", self.origin, self.base, self.device.0.ordinal())
    }
}

impl Region {
    fn new(device: Device, size_bytes: usize) -> Result<Region, CudaError> {
        device.bind()?;
        let copier = Copier::new(&device)?;
        // SAFETY: a new allocation, which is owned from here on.
        let base = unsafe { result::malloc_sync(size_bytes) }.map_err(|error| failed("cuMemAlloc", error))?;
        let region = Region { base, origin: Origin::Allocated, copier: Mutex::new(copier), device };
        // SAFETY: the whole of the allocation; nobody else knows it yet.
        unsafe { result::memset_d8_sync(base, 0, size_bytes) }
            .map_err(|error| failed("cuMemsetD8", error))?;
        // It may return before it is done.
        result::ctx::synchronize().map_err(|error| failed("cuCtxSynchronize", error))?;
        Ok(region)
    }

    fn open(device: Device, handle: [u8; 64]) -> Result<Region, CudaError> {
        device.bind()?;
        let copier = Copier::new(&device)?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: the out pointer is valid. Bytes that are no handle are an error, by the driver's word.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, flags) };
        opened.result().map_err(|error| failed("cuIpcOpenMemHandle", error))?;
        Ok(Region { base, origin: Origin::Opened, copier: Mutex::new(copier), device })
    }

    fn copier(&self) -> std::sync::MutexGuard<'_, Copier> {
        self.copier.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Nothing can be done about a failure: the process's end frees it, too.
        let _ = self.device.bind();
        // SAFETY: made by `new` or `open`, and not used after this.
        unsafe {
            match self.origin {
                Origin::Allocated => drop(result::free_sync(self.base)),
                Origin::Opened => drop(sys::cuIpcCloseMemHandle(self.base).result()),
            }
        }
    }
}

// SAFETY: the allocation, or the mapping of another process's, stays where it is until the drop.
unsafe impl DeviceMemory for Region {
    fn device(&self) -> u32 {
        self.device.0.ordinal() as u32
    }

    fn address(&self) -> u64 {
        self.base
    }

    fn bind(&self) -> io::Result<()> {
        self.device.bind().map_err(io::Error::other)
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.device.bind().map_err(io::Error::other)?;
        let copier = self.copier();
        let first = self.base + offset as u64;
        for (nth, chunk) in bytes.chunks_mut(PINNED_BYTES).enumerate() {
            // SAFETY: the pinned memory has so many bytes and is ours while the copier is locked.
            let pinned = unsafe { std::slice::from_raw_parts_mut(copier.pinned.as_ptr(), chunk.len()) };
            let source = first + (nth * PINNED_BYTES) as u64;
            // SAFETY: in the region by the caller's word; waited for before the lock is given back.
            let copied = unsafe { result::memcpy_dtoh_async(pinned, source, copier.stream.cu_stream()) };
            copied
                .and_then(|()| copier.stream.synchronize())
                .map_err(|error| other("cuMemcpyDtoH", error))?;
            chunk.copy_from_slice(pinned);
        }
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.device.bind().map_err(io::Error::other)?;
        let copier = self.copier();
        let first = self.base + offset as u64;
        for (nth, chunk) in bytes.chunks(PINNED_BYTES).enumerate() {
            // SAFETY: as in `read`.
            let pinned = unsafe { std::slice::from_raw_parts_mut(copier.pinned.as_ptr(), chunk.len()) };
            pinned.copy_from_slice(chunk);
            let target = first + (nth * PINNED_BYTES) as u64;
            // SAFETY: as in `read`.
            let copied = unsafe { result::memcpy_htod_async(target, pinned, copier.stream.cu_stream()) };
            copied
                .and_then(|()| copier.stream.synchronize())
                .map_err(|error| other("cuMemcpyHtoD", error))?;
        }
        Ok(())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        self.device.bind().ok()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the out pointer is valid, and the allocation alive. What was opened cannot be passed on.
        let got = unsafe { sys::cuIpcGetMemHandle(&mut handle, self.base) };
        got.result().ok().map(|()| handle.reserved.map(|byte| byte as u8))
    }
}

impl Copier {
    fn new(device: &Device) -> Result<Copier, CudaError> {
        let stream = device.stream()?;
        // SAFETY: a new allocation, which the copier owns.
        let pinned = unsafe { result::malloc_host(PINNED_BYTES, 0) };
        let pinned = pinned.map_err(|error| failed("cuMemHostAlloc", error))?;
        let pinned = NonNull::new(pinned.cast())
            .ok_or(CudaError::Failed { call: "cuMemHostAlloc", why: "no memory".into() })?;
        Ok(Copier { pinned, stream })
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // SAFETY: made by `new`; no copy is under way, as each is waited for.
        let _ = unsafe { result::free_host(self.pinned.as_ptr().cast()) };
    }
}

/// Memory of the host that a device reads and writes, until dropped. Its pages stay where they are.
pub(crate) struct HostRegistration {
    base: *mut c_void,
    device: Device,
    /// Where the device sees it.
    pub(crate) address: u64,
}

// SAFETY: the pointer is a name for the driver; the memory is not touched through it.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// # Safety
    /// The memory is there until the registration is dropped.
    pub(crate) unsafe fn new(
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

/// Copies between memories of devices, on a stream of its own, and the event behind them.
pub(crate) struct DeviceCopies {
    stream: Arc<CudaStream>,
    event: CudaEvent,
    device: Device,
}

impl DeviceCopies {
    pub(crate) fn new(device: Device) -> Result<DeviceCopies, CudaError> {
        let stream = device.stream()?;
        let event = device.0.new_event(None).map_err(|error| failed("cuEventCreate", error))?;
        Ok(DeviceCopies { stream, event, device })
    }

    /// Begins to copy.
    ///
    /// # Safety
    /// Both are memory that the device reaches. Nobody writes the source, or uses the target, before
    /// [`finish`](Self::finish) has returned.
    pub(crate) unsafe fn begin(&self, target: u64, source: u64, len: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: by the caller's word.
        let begun = unsafe { result::memcpy_dtod_async(target, source, len, self.stream.cu_stream()) };
        begun.map_err(|error| failed("cuMemcpyDtoDAsync", error))
    }

    /// Waits until what was begun is done. No peer takes part in it, so that there is no deadline.
    pub(crate) fn finish(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        self.event.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
        while !self.event.try_is_complete().map_err(|error| failed("cuEventQuery", error))? {
            std::thread::sleep(COPY_PAUSE);
        }
        Ok(())
    }
}

pub(crate) fn failed(call: &'static str, error: DriverError) -> CudaError {
    CudaError::Failed { call, why: error.to_string() }
}

fn other(call: &'static str, error: DriverError) -> io::Error {
    io::Error::other(failed(call, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::LAYOUT;

    #[test]
    fn what_is_missing_is_said() {
        match num_devices() {
            Ok(num_devices) => {
                let device = num_devices as u32;
                let error = Device::open(device).unwrap_err();
                assert_eq!(error, CudaError::NoSuchDevice { device, num_devices });
            }
            Err(error @ (CudaError::NoDriver | CudaError::NoDevice)) => {
                let text = error.to_string();
                assert!(
                    text.contains("no CUDA driver: libcuda.so.1") || text.contains("no device"),
                    "{text}"
                );
                let refused = blocks_on_device(0, LAYOUT, 4).unwrap_err();
                assert_eq!(refused.to_string(), text);
            }
            Err(error) => panic!("{error}"),
        }
    }
}
