//! An NVIDIA device behind the seam: one stream of work, kernels compiled by NVRTC, products by cuBLASLt, and graphs.
//! A second stream carries the NCCL operations with other ranks.
//!
//! An event makes each NCCL operation wait for the work queued before it. Another event makes the first stream wait
//! for the operation. Both events are part of graphs. A thread of NCCL queues the operation; a graph captures it
//! nevertheless, because this thread waits until it is queued, and captures what all threads queue. While a rank waits for its device, it also checks that the
//! other ranks are still there: the device may be waiting for them.
//!
//! It has run on an H100 (docs/benchmarks/gpu.md). Without a GPU, the tests run it against a fake driver (`baton-cuda-emulator`)
//! and check the errors for missing libraries.

use std::sync::Arc;

use baton_cuda::{Allocation, CudaError, Pinned, failed};
use baton_kv_cache::KvDtype;
use baton_model_spec::Rank;
use cudarc::driver::{CudaEvent, CudaStream, result, sys};
use fp8_trial::fp8_products;
use graphs::{Graphs, repeat};
use host::FreeMemory;
use loaded::LoadedKernels;
use lt::Products;
use nccl::{NcclGroup, NcclMember};
use wgmma_trial::{wgmma_experts_work, wgmma_works};

use crate::device::{
    Fp8Product, Fp8Products, HostLoad, HostMemory, KernelDevice, NUM_LOADS, NUM_MARKS, NUM_RETURNS, Product,
    TimedDevice, WgmmaKernels,
};
use crate::kernel::{Address, Kernel, KernelCode, KernelSource};
use crate::{attention, expert_products};

pub use error::OpenError;

mod choices;
mod error;
pub mod fp8_trial;
pub mod graphs;
mod host;
mod loaded;
mod lt;
pub mod nccl;
mod plan;
mod shape;
pub mod wgmma_trial;

/// Bytes of one staged copy between the host and the device.
const STAGED_BYTES: usize = 4 << 20;

/// Initial size of the memory for returned bytes: sampled tokens and some log-probabilities.
const RETURNED_BYTES: usize = 64 << 10;

/// Event queries between two queries of NCCL's state.
const LOOKS: u32 = 256;

/// One device and one stream of work on it.
pub struct DriverDevice {
    name: String,
    /// Dropped before the resources that they refer to.
    graphs: Graphs,
    /// `None`: the device was opened without products.
    products: Option<Products>,
    pub fp8_products: Fp8Products,
    wgmma: WgmmaKernels,
    kernels: LoadedKernels,
    marks: Vec<Option<CudaEvent>>,
    /// `None`: this device computes a whole model.
    others: Option<Others>,
    /// `None`: nothing was loaded yet.
    loads: Option<Loads>,
    free_memory: FreeMemory,
    uploads: [Staging; 2],
    next_upload: usize,
    downloads: Staging,
    returns: [Returned; NUM_RETURNS],
    allocations: Vec<Allocation>,
    stream: Arc<CudaStream>,
    device: baton_cuda::Device,
}

// SAFETY: handles of cuBLASLt and of graphs may move between threads as long as one thread uses them at a time.
// `&mut` guarantees that.
unsafe impl Send for DriverDevice {}

/// The link to the other ranks.
struct Others {
    member: NcclMember,
    stream: Arc<CudaStream>,
    /// The end of the work queued before an operation.
    asked: CudaEvent,
    /// The end of an operation.
    done: CudaEvent,
}

/// The stream of copies from memory of the host, beside the stream of work.
struct Loads {
    stream: Arc<CudaStream>,
    /// The end of the work queued before a copy.
    asked: CudaEvent,
    /// The ends of marked copies.
    marks: [CudaEvent; NUM_LOADS],
}

/// Pinned memory of a copy, and the event of its end.
struct Staging {
    pinned: Pinned,
    copied: CudaEvent,
}

/// The last bytes that were sent to a place in host memory.
struct Returned {
    staging: Staging,
    num_bytes: usize,
}

impl DriverDevice {
    /// Opens the device and loads the kernels of `sources`. Kernels that the cache does not hold are compiled and
    /// added to it.
    ///
    /// # Errors
    /// When something is missing or broken.
    pub fn open(ordinal: u32, sources: &[KernelSource], code: KernelCode) -> Result<DriverDevice, OpenError> {
        let cache_dir = code.cache_dir.clone();
        let mut device = DriverDevice::without_products(ordinal, sources, code)?;
        device.products = Some(Products::new(&device.device, &device.stream, cache_dir.as_deref())?);
        // Ada is the first architecture with E4M3 products.
        if device.capability()? >= (8, 9) {
            device.fp8_products = device.with_temporary_memory(fp8_products)?;
            tracing::info!(products = ?device.fp8_products, "fp8 products were tested");
        }
        device.try_wgmma(sources)?;
        Ok(device)
    }

    fn capability(&self) -> Result<(i32, i32), CudaError> {
        let capability = self.device.context().compute_capability();
        capability.map_err(|error| failed("cuDeviceGetAttribute", error))
    }

    /// Finds out which kernels with warpgroup products compute correct results.
    fn try_wgmma(&mut self, sources: &[KernelSource]) -> Result<(), CudaError> {
        let source_of = |file| sources.iter().find(|source| source.file == file);
        if let Some(source) = source_of(attention::WGMMA_FILE).filter(|_| self.wgmma.attention) {
            let (head_dim, dtype) = (source.defined("HEAD_DIM"), source.defined("KV_TYPE"));
            let dtype = KvDtype::ALL[dtype as usize];
            let work = |device: &mut DriverDevice| wgmma_works(device, dtype, head_dim as usize);
            self.wgmma.attention = self.with_temporary_memory(work)?;
            log_trial("prefill attention", self.wgmma.attention);
        }
        for source in sources.iter().filter(|source| source.file == expert_products::WGMMA_FILE) {
            if !self.wgmma.experts {
                break;
            }
            let gated = source.defined("GATED");
            let is_other =
                |it: &&KernelSource| it.file == expert_products::FILE && it.defined("GATED") == gated;
            let other = sources.iter().find(is_other).expect("the kernel that all cards have");
            let tile_rows = other.defined("TILE_ROWS") as u32;
            let work = |device: &mut DriverDevice| wgmma_experts_work(device, tile_rows, gated != 0);
            self.wgmma.experts = self.with_temporary_memory(work)?;
            let which = if gated != 0 { "gated products of experts" } else { "products of experts" };
            log_trial(which, self.wgmma.experts);
        }
        Ok(())
    }

    /// Does some work, then frees the memory that it allocated.
    fn with_temporary_memory<T>(
        &mut self,
        work: impl FnOnce(&mut DriverDevice) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let num_allocations = self.allocations.len();
        let done = work(self);
        self.device.bind()?;
        self.stream.synchronize().map_err(|error| failed("cuStreamSynchronize", error))?;
        self.allocations.truncate(num_allocations);
        done
    }

    /// Like [`open`](Self::open), but for kernels only: cuBLASLt need not be installed.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn without_products(
        ordinal: u32,
        sources: &[KernelSource],
        code: KernelCode,
    ) -> Result<DriverDevice, OpenError> {
        let device = baton_cuda::Device::open(ordinal)?;
        let stream = device.stream()?;
        DriverDevice::on_stream(device, stream, sources, code)
    }

    /// Like [`without_products`](Self::without_products), for work beside steps that others wait for: blocks of its kernels start
    /// before further blocks of a step's.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn beside_steps(
        ordinal: u32,
        sources: &[KernelSource],
        code: KernelCode,
    ) -> Result<DriverDevice, OpenError> {
        let device = baton_cuda::Device::open(ordinal)?;
        let stream = device.urgent_stream()?;
        DriverDevice::on_stream(device, stream, sources, code)
    }

    fn on_stream(
        device: baton_cuda::Device,
        stream: Arc<CudaStream>,
        sources: &[KernelSource],
        code: KernelCode,
    ) -> Result<DriverDevice, OpenError> {
        let kernels = LoadedKernels::new(&device, sources, code)?;
        let staging = |num_bytes| -> Result<Staging, CudaError> {
            let copied = device.context().new_event(None).map_err(|error| failed("cuEventCreate", error))?;
            Ok(Staging { pinned: Pinned::new(&device, num_bytes)?, copied })
        };
        let returned = || Ok::<_, CudaError>(Returned { staging: staging(RETURNED_BYTES)?, num_bytes: 0 });
        let mut device = DriverDevice {
            name: format!("cuda:{}", device.ordinal()),
            graphs: Graphs::new(&stream),
            products: None,
            fp8_products: Fp8Products::None,
            wgmma: WgmmaKernels::all(false),
            kernels,
            marks: (0..NUM_MARKS).map(|_| None).collect(),
            uploads: [staging(STAGED_BYTES)?, staging(STAGED_BYTES)?],
            next_upload: 0,
            others: None,
            loads: None,
            free_memory: FreeMemory::default(),
            downloads: staging(STAGED_BYTES)?,
            returns: [returned()?, returned()?],
            allocations: vec![],
            stream,
            device,
        };
        // Only Hopper has wgmma; later architectures do not.
        device.wgmma = WgmmaKernels::all(device.capability()? == (9, 0));
        Ok(device)
    }

    /// The graphs of repeated work.
    pub fn graphs(&mut self) -> &mut Graphs {
        &mut self.graphs
    }

    /// Joins the other ranks. Each rank calls this on a thread of its own.
    ///
    /// # Errors
    /// When a rank does not join, or NCCL fails.
    pub fn join(&mut self, group: &NcclGroup, rank: Rank) -> Result<(), CudaError> {
        self.device.bind()?;
        let event = || self.device.context().new_event(None).map_err(|error| failed("cuEventCreate", error));
        let (stream, asked, done) = (self.device.stream()?, event()?, event()?);
        self.graphs.capture_all_threads();
        self.others = Some(Others { member: group.join(rank)?, stream, asked, done });
        Ok(())
    }

    /// The link to the other ranks. Its stream now waits for all work queued so far.
    fn link_to_others(&mut self) -> Result<&mut Others, CudaError> {
        self.device.bind()?;
        let others = self.others.as_mut().expect("one of several ranks");
        others.asked.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
        others.stream.wait(&others.asked).map_err(|error| failed("cuStreamWaitEvent", error))?;
        Ok(others)
    }

    fn loads(&mut self) -> Result<&Loads, CudaError> {
        if self.loads.is_none() {
            let event =
                || self.device.context().new_event(None).map_err(|error| failed("cuEventCreate", error));
            let marks = (0..NUM_LOADS).map(|_| event()).collect::<Result<Vec<_>, _>>()?;
            let marks = marks.try_into().expect("as many as there are numbers");
            self.loads = Some(Loads { stream: self.device.stream()?, asked: event()?, marks });
        }
        Ok(self.loads.as_ref().expect("just made"))
    }

    /// Sets `num_bytes` bytes to `byte`.
    ///
    /// # Safety
    /// The memory at `at` has `num_bytes` bytes.
    pub unsafe fn fill(&mut self, at: Address, byte: u8, num_bytes: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: the caller guarantees the memory.
        unsafe { result::memset_d8_async(at.0, byte, num_bytes, self.stream.cu_stream()) }
            .map_err(|error| failed("cuMemsetD8Async", error))
    }
}

impl TimedDevice for DriverDevice {
    type Stamp = CudaEvent;

    fn stamp(&mut self) -> Result<CudaEvent, CudaError> {
        let event = self.device.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let event = event.map_err(|error| failed("cuEventCreate", error))?;
        event.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
        Ok(event)
    }

    fn seconds_between(&mut self, from: &CudaEvent, to: &CudaEvent) -> Result<f64, CudaError> {
        let elapsed = from.elapsed_ms(to).map_err(|error| failed("cuEventElapsedTime", error))?;
        Ok(f64::from(elapsed) / 1e3)
    }
}

impl Drop for DriverDevice {
    fn drop(&mut self) {
        // Ends kernels that wait for other ranks.
        self.leave_ranks();
        if let Some(others) = &self.others {
            let _ = others.stream.synchronize();
        }
        if let Some(loads) = &self.loads {
            let _ = loads.stream.synchronize();
        }
        // The device must be idle before its memory is freed. Earlier calls have reported failures to their callers.
        let _ = self.stream.synchronize();
    }
}

fn log_trial(kernels: &str, works: bool) {
    match works {
        true => tracing::info!(kernels, "warpgroup products were tested"),
        false => tracing::error!(
            kernels,
            "warpgroup products compute wrong results on this device and are not used: please report this"
        ),
    }
}

/// Waits for an event. Fails if another rank is gone, because the event may then never happen.
fn wait(event: &CudaEvent, others: Option<&mut Others>) -> Result<(), CudaError> {
    let Some(others) = others else {
        return event.synchronize().map_err(|error| failed("cuEventSynchronize", error));
    };
    let mut num_looks = 0u32;
    while !event.try_is_complete().map_err(|error| failed("cuEventQuery", error))? {
        num_looks = num_looks.wrapping_add(1);
        match num_looks.is_multiple_of(LOOKS) {
            true => others.member.check()?,
            false => others.member.check_others()?,
        }
        std::hint::spin_loop();
    }
    Ok(())
}

impl KernelDevice for DriverDevice {
    // A guess, not measured: half of the rows still fill a device, and the sum takes longer than its launch.
    // Two GPUs with NVLink decide it: a prompt's step with and without the overlap. gpu-check is for one GPU.
    const ROWS_TO_OVERLAP: usize = 1024;

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
            // An event that was never recorded counts as complete.
            wait(&staging.copied, self.others.as_mut())?;
            let pinned = &mut staging.pinned.bytes_mut()[..chunk.len()];
            pinned.copy_from_slice(chunk);
            // SAFETY: the caller guarantees the room. The staging memory is reused only after the copy.
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
            let Staging { pinned, copied } = &mut self.downloads;
            let room = &mut pinned.bytes_mut()[..chunk.len()];
            // SAFETY: the caller guarantees the memory. The bytes are read only after the copy.
            unsafe { result::memcpy_dtoh_async(room, source, self.stream.cu_stream()) }
                .map_err(|error| failed("cuMemcpyDtoHAsync", error))?;
            copied.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
            wait(copied, self.others.as_mut())?;
            chunk.copy_from_slice(&pinned.bytes()[..chunk.len()]);
            source += chunk.len() as u64;
        }
        Ok(())
    }

    fn allocate_on_host(&mut self, num_bytes: usize) -> Result<HostMemory, CudaError> {
        self.free_memory.allocate(&self.device, num_bytes)
    }

    unsafe fn copy(&mut self, to: Address, from: Address, num_bytes: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: the caller guarantees the memory. Unified addresses tell which side is the host's.
        unsafe { sys::cuMemcpyAsync(to.0, from.0, num_bytes, self.stream.cu_stream()) }
            .result()
            .map_err(|error| failed("cuMemcpyAsync", error))
    }

    unsafe fn begin_loads(&mut self, loads: &[HostLoad], place: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        let work = self.stream.clone();
        let Loads { stream, asked, marks } = self.loads()?;
        asked.record(&work).map_err(|error| failed("cuEventRecord", error))?;
        stream.wait(asked).map_err(|error| failed("cuStreamWaitEvent", error))?;
        for &HostLoad { to, from, num_bytes } in loads {
            // SAFETY: the caller guarantees both sides until the copy is done.
            unsafe {
                let bytes = std::slice::from_raw_parts(from.0 as *const u8, num_bytes);
                result::memcpy_htod_async(to.0, bytes, stream.cu_stream())
            }
            .map_err(|error| failed("cuMemcpyHtoDAsync", error))?;
        }
        marks[place].record(stream).map_err(|error| failed("cuEventRecord", error))
    }

    fn await_loads(&mut self, place: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        let stream = self.stream.clone();
        stream.wait(&self.loads()?.marks[place]).map_err(|error| failed("cuStreamWaitEvent", error))
    }

    unsafe fn send_back(&mut self, from: Address, num_bytes: usize, place: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        let Returned { staging, num_bytes: len } = &mut self.returns[place];
        // The last copy to this place must end first. An event that was never recorded counts as complete.
        wait(&staging.copied, self.others.as_mut())?;
        if staging.pinned.bytes().len() < num_bytes {
            staging.pinned = Pinned::new(&self.device, num_bytes.next_power_of_two())?;
        }
        *len = num_bytes;
        if num_bytes > 0 {
            let pinned = &mut staging.pinned.bytes_mut()[..num_bytes];
            // SAFETY: the caller guarantees the memory. The bytes are read only after the event.
            unsafe { result::memcpy_dtoh_async(pinned, from.0, self.stream.cu_stream()) }
                .map_err(|error| failed("cuMemcpyDtoHAsync", error))?;
        }
        staging.copied.record(&self.stream).map_err(|error| failed("cuEventRecord", error))
    }

    fn has_returned(&mut self, place: usize) -> Result<bool, CudaError> {
        let copied = &self.returns[place].staging.copied;
        copied.try_is_complete().map_err(|error| failed("cuEventQuery", error))
    }

    fn returned(&mut self, place: usize) -> Result<&[u8], CudaError> {
        let Returned { staging, num_bytes } = &self.returns[place];
        wait(&staging.copied, self.others.as_mut())?;
        Ok(&staging.pinned.bytes()[..*num_bytes])
    }

    unsafe fn launch<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { self.kernels.launch(kernel, &self.stream) }
    }

    unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError> {
        if product.num_rows == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the caller guarantees it.
        unsafe { self.products.as_mut().expect("opened for products").multiply(product) }
    }

    fn wgmma(&self) -> WgmmaKernels {
        self.wgmma
    }

    fn fp8_products(&self) -> Fp8Products {
        self.fp8_products
    }

    unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<bool, CudaError> {
        if product.num_rows == 0 {
            return Ok(true);
        }
        self.device.bind()?;
        // SAFETY: the caller guarantees it.
        unsafe { self.products.as_mut().expect("opened for products").multiply_fp8(product) }
    }

    fn fix_products(&mut self) {
        self.products.as_mut().expect("opened for products").fix();
    }

    fn begin_choice(&mut self) {
        self.products.as_mut().expect("opened for products").begin_choice();
    }

    fn end_choice(&mut self) {
        self.products.as_mut().expect("opened for products").end_choice();
    }

    unsafe fn begin_sum(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        let others = self.link_to_others()?;
        // SAFETY: the stream lives as long as the member of the group. The caller guarantees the numbers.
        unsafe { others.member.sum(numbers, len, others.stream.cu_stream().cast()) }
    }

    fn end_sums(&mut self) -> Result<(), CudaError> {
        let others = self.others.as_ref().expect("one of several ranks");
        others.done.record(&others.stream).map_err(|error| failed("cuEventRecord", error))?;
        self.stream.wait(&others.done).map_err(|error| failed("cuStreamWaitEvent", error))
    }

    unsafe fn gather(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        let others = self.link_to_others()?;
        // SAFETY: as above.
        unsafe { others.member.gather(numbers, len * 4, others.stream.cu_stream().cast()) }?;
        self.end_sums()
    }

    unsafe fn broadcast(&mut self, words: Address, num_words: usize) -> Result<(), CudaError> {
        let others = self.link_to_others()?;
        // SAFETY: as above.
        unsafe { others.member.broadcast(words, num_words * 4, others.stream.cu_stream().cast()) }?;
        self.end_sums()
    }

    fn leave_ranks(&mut self) {
        // NCCL requires that graphs with its operations are destroyed before the communicator.
        self.graphs.clear();
        if let Some(others) = &mut self.others {
            others.member.leave();
        }
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
        wait(event, self.others.as_mut())
    }

    fn repeat(
        &mut self,
        key: u64,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        repeat(self, DriverDevice::graphs, key, work)
    }
}
