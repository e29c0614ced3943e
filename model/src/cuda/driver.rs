//! A device of NVIDIA's behind the seam: one stream, kernels compiled by NVRTC, products by cuBLASLt, graphs.
//!
//! Not run on a GPU yet: what is checked is that it compiles against cudarc and that missing libraries are said.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

use baton_cuda::{Allocation, CudaError, Pinned, failed};
use cudarc::driver::{CudaEvent, CudaFunction, CudaGraph, CudaModule, CudaStream, result, sys};
use cudarc::nvrtc::Ptx;

use super::compile::{Architecture, CubinCache};
use super::device::{Device, NUM_MARKS, Product};
use super::kernel::{Address, Kernel, Source};
use super::lt::Products;
use super::start::StartError;

/// Bytes that are copied between the host and the device at a time.
const STAGED_BYTES: usize = 4 << 20;

/// More dynamic shared memory than that must be asked for.
const SHARED_BYTES: u32 = 48 << 10;

/// One device, and one stream of work on it.
pub(crate) struct DriverDevice {
    name: String,
    /// Before what they refer to.
    graphs: HashMap<u64, Repeated>,
    /// Unless none are asked for.
    products: Option<Products>,
    modules: Vec<Arc<CudaModule>>,
    functions: HashMap<&'static str, Function>,
    marks: Vec<Option<CudaEvent>>,
    uploads: [Staging; 2],
    next_upload: usize,
    downloads: Pinned,
    allocations: Vec<Allocation>,
    stream: Arc<CudaStream>,
    device: baton_cuda::Device,
}

// SAFETY: handles of cuBLASLt and of graphs may be used by any thread, one at a time; who has the device mutably is the
// only one.
unsafe impl Send for DriverDevice {}

struct Function {
    function: CudaFunction,
    /// That it may use.
    shared_bytes: u32,
}

/// Work that was asked for under one key.
enum Repeated {
    /// Once: what it needed at first is there, such as plans of products.
    Seen,
    Captured(CudaGraph),
}

/// Memory that bytes wait in, and when the device has them.
struct Staging {
    pinned: Pinned,
    copied: CudaEvent,
}

impl DriverDevice {
    /// Opens the device and loads the kernels of `sources`; those that `cache_dir` does not hold are compiled and kept
    /// there.
    ///
    /// # Errors
    /// What is missing, or broken.
    pub(crate) fn open(
        ordinal: u32,
        sources: &[Source],
        cache_dir: Option<PathBuf>,
    ) -> Result<DriverDevice, StartError> {
        let mut device = DriverDevice::without_products(ordinal, sources, cache_dir)?;
        device.products = Some(Products::new(&device.device, &device.stream)?);
        Ok(device)
    }

    /// The same, for kernels alone: cuBLASLt need not be there.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn without_products(
        ordinal: u32,
        sources: &[Source],
        cache_dir: Option<PathBuf>,
    ) -> Result<DriverDevice, StartError> {
        let device = baton_cuda::Device::open(ordinal)?;
        let (major, minor) =
            device.context().compute_capability().map_err(|error| failed("cuDeviceGetAttribute", error))?;
        if major < 8 {
            return Err(StartError::TooOld { device: ordinal, major: major as u32, minor: minor as u32 });
        }
        let architecture = Architecture::new(major as u32, minor as u32);
        let cache = CubinCache::new(cache_dir);
        let mut modules = Vec::with_capacity(sources.len());
        for source in sources {
            let cubin = cache.get(source, architecture)?;
            let module = device.context().load_module(Ptx::from_binary(cubin.code));
            modules.push(module.map_err(|error| failed("cuModuleLoadData", error))?);
        }
        let stream = device.stream()?;
        let staging = || -> Result<Staging, CudaError> {
            let copied = device.context().new_event(None).map_err(|error| failed("cuEventCreate", error))?;
            Ok(Staging { pinned: Pinned::new(&device, STAGED_BYTES)?, copied })
        };
        Ok(DriverDevice {
            name: format!("cuda:{ordinal}"),
            graphs: HashMap::new(),
            products: None,
            modules,
            functions: HashMap::new(),
            marks: (0..NUM_MARKS).map(|_| None).collect(),
            uploads: [staging()?, staging()?],
            next_upload: 0,
            downloads: Pinned::new(&device, STAGED_BYTES)?,
            allocations: vec![],
            stream,
            device,
        })
    }

    /// The kernel of that name, allowed so much shared memory.
    fn function(&mut self, name: &'static str, shared_bytes: u32) -> Result<sys::CUfunction, CudaError> {
        if !self.functions.contains_key(name) {
            let found = self.modules.iter().find_map(|module| module.load_function(name).ok());
            let function = found.ok_or_else(|| CudaError::Failed {
                call: "cuModuleGetFunction",
                why: format!("no kernel {name} in the sources"),
            })?;
            self.functions.insert(name, Function { function, shared_bytes: SHARED_BYTES });
        }
        let found = self.functions.get_mut(name).expect("just loaded");
        if shared_bytes > found.shared_bytes {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let set = found.function.set_attribute(attribute, shared_bytes as i32);
            set.map_err(|error| failed("cuFuncSetAttribute", error))?;
            found.shared_bytes = shared_bytes;
        }
        Ok(found.function.cu_function())
    }

    /// What `work` asks for, as a graph.
    fn capture(
        &mut self,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<CudaGraph, CudaError> {
        // Other threads of this process, such as those of handoffs, may allocate meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(|error| failed("cuStreamBeginCapture", error))?;
        let asked = work(self);
        let flags = sys::CUgraphInstantiate_flags(0);
        // Also after a failure: the stream is of no use while it is captured.
        let graph = self.stream.end_capture(flags);
        asked?;
        let empty = || CudaError::Failed { call: "cuStreamEndCapture", why: "no work".into() };
        graph.map_err(|error| failed("cuStreamEndCapture", error))?.ok_or_else(empty)
    }
}

impl Drop for DriverDevice {
    fn drop(&mut self) {
        // Nothing is under way when its memory goes. A failure was told to whoever asked for the work.
        let _ = self.stream.synchronize();
    }
}

impl Device for DriverDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn free_bytes(&mut self) -> Result<usize, CudaError> {
        self.device.memory().map(|(free, _)| free)
    }

    fn allocate(&mut self, num_bytes: usize) -> Result<Address, CudaError> {
        let allocation = Allocation::new(&self.device, num_bytes)?;
        let at = allocation.address();
        self.allocations.push(allocation);
        Ok(Address(at))
    }

    unsafe fn upload(&mut self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        self.device.bind()?;
        let mut target = to.0;
        for chunk in bytes.chunks(STAGED_BYTES) {
            let staging = &mut self.uploads[self.next_upload];
            self.next_upload = 1 - self.next_upload;
            // One that was never recorded is complete.
            staging.copied.synchronize().map_err(|error| failed("cuEventSynchronize", error))?;
            let pinned = &mut staging.pinned.bytes_mut()[..chunk.len()];
            pinned.copy_from_slice(chunk);
            // SAFETY: there is room by the caller's word; the memory is used again when the copy is done.
            unsafe { result::memcpy_htod_async(target, pinned, self.stream.cu_stream()) }
                .map_err(|error| failed("cuMemcpyHtoDAsync", error))?;
            staging.copied.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
            target += chunk.len() as u64;
        }
        Ok(())
    }

    unsafe fn download(&mut self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.device.bind()?;
        let mut source = from.0;
        for chunk in bytes.chunks_mut(STAGED_BYTES) {
            let pinned = &mut self.downloads.bytes_mut()[..chunk.len()];
            // SAFETY: there by the caller's word; waited for before the memory is looked at.
            unsafe { result::memcpy_dtoh_async(pinned, source, self.stream.cu_stream()) }
                .and_then(|()| self.stream.synchronize())
                .map_err(|error| failed("cuMemcpyDtoHAsync", error))?;
            chunk.copy_from_slice(&self.downloads.bytes()[..chunk.len()]);
            source += chunk.len() as u64;
        }
        Ok(())
    }

    unsafe fn launch<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError> {
        let shape = kernel.shape();
        let [x, y, z] = shape.grid;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        self.device.bind()?;
        let function = self.function(K::NAME, shape.shared_bytes)?;
        let mut params = [(&raw const *kernel).cast_mut().cast::<c_void>()];
        let (threads, stream) = ((shape.threads, 1, 1), self.stream.cu_stream());
        // SAFETY: the one parameter is what the kernel takes, by the word of its type; it is copied by the call. What it
        // points to is there by the caller's word.
        unsafe {
            result::launch_kernel(function, (x, y, z), threads, shape.shared_bytes, stream, &mut params)
        }
        .map_err(|error| failed("cuLaunchKernel", error))
    }

    unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError> {
        if product.num_rows == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: by the caller's word.
        unsafe { self.products.as_mut().expect("opened for products").multiply(product) }
    }

    fn mark(&mut self, mark_idx: usize) -> Result<(), CudaError> {
        if self.marks[mark_idx].is_none() {
            let event = self.device.context().new_event(None);
            self.marks[mark_idx] = Some(event.map_err(|error| failed("cuEventCreate", error))?);
        }
        let event = self.marks[mark_idx].as_ref().expect("just made");
        event.record(&self.stream).map_err(|error| failed("cuEventRecord", error))
    }

    fn has_passed(&mut self, mark_idx: usize) -> Result<bool, CudaError> {
        let event = self.marks[mark_idx].as_ref().expect("marked before");
        event.try_is_complete().map_err(|error| failed("cuEventQuery", error))
    }

    fn wait_for(&mut self, mark_idx: usize) -> Result<(), CudaError> {
        let event = self.marks[mark_idx].as_ref().expect("marked before");
        event.synchronize().map_err(|error| failed("cuEventSynchronize", error))
    }

    fn repeat(
        &mut self,
        key: u64,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        match self.graphs.get(&key) {
            None => {
                work(self)?;
                self.graphs.insert(key, Repeated::Seen);
                return Ok(());
            }
            Some(Repeated::Seen) => {
                let graph = self.capture(work)?;
                self.graphs.insert(key, Repeated::Captured(graph));
            }
            Some(Repeated::Captured(_)) => {}
        }
        let Some(Repeated::Captured(graph)) = self.graphs.get(&key) else { unreachable!("captured above") };
        graph.launch().map_err(|error| failed("cuGraphLaunch", error))
    }
}
