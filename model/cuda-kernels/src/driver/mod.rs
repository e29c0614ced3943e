//! A device of NVIDIA's behind the seam: one stream, kernels compiled by NVRTC, products by cuBLASLt, graphs; and a second
//! stream for what it does with other ranks, by NCCL.
//!
//! Sums begin behind what was asked for before them, and the first stream waits for them where they end, both by events:
//! so they are part of graphs, too. One rank of several never waits for its device without looking whether the others
//! are still there, as its device may be waiting for them.
//!
//! Not run on a GPU yet: what is checked is that it gets along with a fake driver (`baton-cuda-emulator`), and that
//! missing libraries are said.

use std::sync::Arc;

use baton_cuda::{Allocation, CudaError, Pinned, failed};
use baton_model_spec::Rank;
use cudarc::driver::{CudaEvent, CudaStream, result, sys};
use fp8_trial::fp8_products;
use graphs::{Graphs, repeat};
use loaded::LoadedKernels;
use lt::Products;
use nccl::{NcclGroup, NcclMember};
use wgmma_trial::wgmma_works;

use crate::attention::WGMMA_FILE;
use crate::device::{Fp8Product, Fp8Products, KernelDevice, NUM_MARKS, NUM_RETURNS, Product, TimedDevice};
use crate::kernel::{Address, Kernel, KernelCode, KernelSource};

pub use error::OpenError;

mod error;
pub mod fp8_trial;
pub mod graphs;
mod loaded;
mod lt;
pub mod nccl;
pub mod wgmma_trial;

/// Bytes that are copied between the host and the device at a time.
const STAGED_BYTES: usize = 4 << 20;

/// Bytes that there is room for at first in what is sent back: sampled tokens, and some log-probabilities.
const RETURNED_BYTES: usize = 64 << 10;

/// Looks at an event between two looks at NCCL's state.
const LOOKS: u32 = 256;

/// One device, and one stream of work on it.
pub struct DriverDevice {
    name: String,
    /// Before what they refer to.
    graphs: Graphs,
    /// Unless none are asked for.
    products: Option<Products>,
    pub fp8_products: Fp8Products,
    has_wgmma: bool,
    kernels: LoadedKernels,
    marks: Vec<Option<CudaEvent>>,
    /// `None` where it computes a whole model, or has left.
    others: Option<Others>,
    uploads: [Staging; 2],
    next_upload: usize,
    downloads: Staging,
    returns: [Returned; NUM_RETURNS],
    allocations: Vec<Allocation>,
    stream: Arc<CudaStream>,
    device: baton_cuda::Device,
}

// SAFETY: handles of cuBLASLt and of graphs may be used by any thread, one at a time; who has the device mutably is the
// only one.
unsafe impl Send for DriverDevice {}

/// The ranks that it computes with.
struct Others {
    membership: NcclMember,
    stream: Arc<CudaStream>,
    /// Behind what sums begin behind, and behind the sums.
    asked: CudaEvent,
    done: CudaEvent,
}

/// Memory that bytes wait in, and when the device has them.
struct Staging {
    pinned: Pinned,
    copied: CudaEvent,
}

/// What was sent to the host last.
struct Returned {
    staging: Staging,
    num_bytes: usize,
}

impl DriverDevice {
    /// Opens the device and loads the kernels of `sources`; those that the cache does not hold are compiled and kept
    /// there.
    ///
    /// # Errors
    /// What is missing, or broken.
    pub fn open(ordinal: u32, sources: &[KernelSource], code: KernelCode) -> Result<DriverDevice, OpenError> {
        let mut device = DriverDevice::without_products(ordinal, sources, code)?;
        device.products = Some(Products::new(&device.device, &device.stream)?);
        // Ada is the first that multiplies E4M3.
        if device.capability()? >= (8, 9) {
            device.fp8_products = device.try_out(fp8_products)?;
            tracing::info!(products = ?device.fp8_products, "products in fp8 were tried");
        }
        if let Some(source) = sources.iter().find(|source| source.file == WGMMA_FILE && device.has_wgmma) {
            device.has_wgmma = device.try_wgmma(source)?;
        }
        Ok(device)
    }

    fn capability(&self) -> Result<(i32, i32), CudaError> {
        let capability = self.device.context().compute_capability();
        capability.map_err(|error| failed("cuDeviceGetAttribute", error))
    }

    /// Whether attention by products of warpgroups finds what it should.
    fn try_wgmma(&mut self, source: &KernelSource) -> Result<bool, CudaError> {
        let head_dim = source.defines.iter().find(|(name, _)| *name == "HEAD_DIM").expect("it is defined").1;
        let works = self.try_out(|device| wgmma_works(device, head_dim as usize))?;
        match works {
            true => tracing::info!("prefill attention is multiplied by warpgroups"),
            false => tracing::error!(
                "prefill attention by warpgroups is wrong on this device and is not used: please report this"
            ),
        }
        Ok(works)
    }

    /// Does something; the memory that it took is free again.
    fn try_out<T>(
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

    /// The same, for kernels alone: cuBLASLt need not be there.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn without_products(
        ordinal: u32,
        sources: &[KernelSource],
        code: KernelCode,
    ) -> Result<DriverDevice, OpenError> {
        let device = baton_cuda::Device::open(ordinal)?;
        let kernels = LoadedKernels::new(&device, sources, code)?;
        let stream = device.stream()?;
        let staging = |num_bytes| -> Result<Staging, CudaError> {
            let copied = device.context().new_event(None).map_err(|error| failed("cuEventCreate", error))?;
            Ok(Staging { pinned: Pinned::new(&device, num_bytes)?, copied })
        };
        let returned = || Ok::<_, CudaError>(Returned { staging: staging(RETURNED_BYTES)?, num_bytes: 0 });
        let mut device = DriverDevice {
            name: format!("cuda:{ordinal}"),
            graphs: Graphs::new(&stream),
            products: None,
            fp8_products: Fp8Products::None,
            has_wgmma: false,
            kernels,
            marks: (0..NUM_MARKS).map(|_| None).collect(),
            uploads: [staging(STAGED_BYTES)?, staging(STAGED_BYTES)?],
            next_upload: 0,
            others: None,
            downloads: staging(STAGED_BYTES)?,
            returns: [returned()?, returned()?],
            allocations: vec![],
            stream,
            device,
        };
        // Neither before Hopper nor after it.
        device.has_wgmma = device.capability()? == (9, 0);
        Ok(device)
    }

    /// The graphs of what is repeated.
    pub fn graphs(&mut self) -> &mut Graphs {
        &mut self.graphs
    }

    /// Joins the other ranks, each of which does so on a thread of its own.
    ///
    /// # Errors
    /// When they do not come, or NCCL fails.
    pub fn join(&mut self, group: &NcclGroup, rank: Rank) -> Result<(), CudaError> {
        self.device.bind()?;
        let event = || self.device.context().new_event(None).map_err(|error| failed("cuEventCreate", error));
        let (stream, asked, done) = (self.device.stream()?, event()?, event()?);
        self.others = Some(Others { membership: group.join(rank)?, stream, asked, done });
        Ok(())
    }

    /// The ranks that it computes with; what is asked of their stream comes behind what was asked for so far.
    fn behind(&mut self) -> Result<&mut Others, CudaError> {
        self.device.bind()?;
        let others = self.others.as_mut().expect("one of several ranks");
        others.asked.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
        others.stream.wait(&others.asked).map_err(|error| failed("cuStreamWaitEvent", error))?;
        Ok(others)
    }

    /// Fills memory with `byte`.
    ///
    /// # Safety
    /// There are so many bytes.
    pub unsafe fn fill(&mut self, at: Address, byte: u8, num_bytes: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: there by the caller's word.
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

    unsafe fn copy(&mut self, to: Address, from: Address, num_bytes: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: there by the caller's word.
        unsafe { result::memcpy_dtod_async(to.0, from.0, num_bytes, self.stream.cu_stream()) }
            .map_err(|error| failed("cuMemcpyDtoDAsync", error))
    }
}

impl Drop for DriverDevice {
    fn drop(&mut self) {
        // Kernels that wait for other ranks end.
        self.leave_ranks();
        if let Some(others) = &self.others {
            let _ = others.stream.synchronize();
        }
        // Nothing is under way when its memory goes. A failure was told to the caller that asked for the work.
        let _ = self.stream.synchronize();
    }
}

/// Waits for an event, unless another rank is gone: then it may never come.
fn wait(event: &CudaEvent, others: Option<&mut Others>) -> Result<(), CudaError> {
    let Some(others) = others else {
        return event.synchronize().map_err(|error| failed("cuEventSynchronize", error));
    };
    let mut num_looks = 0u32;
    while !event.try_is_complete().map_err(|error| failed("cuEventQuery", error))? {
        num_looks = num_looks.wrapping_add(1);
        match num_looks.is_multiple_of(LOOKS) {
            true => others.membership.check()?,
            false => others.membership.check_others()?,
        }
        std::hint::spin_loop();
    }
    Ok(())
}

impl KernelDevice for DriverDevice {
    // A guess: a product of half as many rows still fills a device, and its sum takes longer than to begin it.
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
            // One that was never recorded is complete.
            wait(&staging.copied, self.others.as_mut())?;
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
            let Staging { pinned, copied } = &mut self.downloads;
            let room = &mut pinned.bytes_mut()[..chunk.len()];
            // SAFETY: there by the caller's word; waited for before the memory is looked at.
            unsafe { result::memcpy_dtoh_async(room, source, self.stream.cu_stream()) }
                .map_err(|error| failed("cuMemcpyDtoHAsync", error))?;
            copied.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
            wait(copied, self.others.as_mut())?;
            chunk.copy_from_slice(&pinned.bytes()[..chunk.len()]);
            source += chunk.len() as u64;
        }
        Ok(())
    }

    unsafe fn send_back(&mut self, from: Address, num_bytes: usize, place: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        let Returned { staging, num_bytes: len } = &mut self.returns[place];
        // What was sent there before is still to be written otherwise. One that was never recorded is complete.
        wait(&staging.copied, self.others.as_mut())?;
        if staging.pinned.bytes().len() < num_bytes {
            staging.pinned = Pinned::new(&self.device, num_bytes.next_power_of_two())?;
        }
        *len = num_bytes;
        if num_bytes > 0 {
            let pinned = &mut staging.pinned.bytes_mut()[..num_bytes];
            // SAFETY: there by the caller's word; it is read when the event has passed.
            unsafe { result::memcpy_dtoh_async(pinned, from.0, self.stream.cu_stream()) }
                .map_err(|error| failed("cuMemcpyDtoHAsync", error))?;
        }
        staging.copied.record(&self.stream).map_err(|error| failed("cuEventRecord", error))
    }

    fn returned(&mut self, place: usize) -> Result<&[u8], CudaError> {
        let Returned { staging, num_bytes } = &self.returns[place];
        wait(&staging.copied, self.others.as_mut())?;
        Ok(&staging.pinned.bytes()[..*num_bytes])
    }

    unsafe fn launch<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError> {
        // SAFETY: by the caller's word.
        unsafe { self.kernels.launch(kernel, &self.stream) }
    }

    unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError> {
        if product.num_rows == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: by the caller's word.
        unsafe { self.products.as_mut().expect("opened for products").multiply(product) }
    }

    fn has_wgmma(&self) -> bool {
        self.has_wgmma
    }

    fn fp8_products(&self) -> Fp8Products {
        self.fp8_products
    }

    unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<(), CudaError> {
        if product.num_rows == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: by the caller's word.
        unsafe { self.products.as_mut().expect("opened for products").multiply_fp8(product) }
    }

    unsafe fn begin_sum(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        let others = self.behind()?;
        // SAFETY: the stream lives as long as the membership; the numbers by the caller's word.
        unsafe { others.membership.sum(numbers, len, others.stream.cu_stream().cast()) }
    }

    fn end_sums(&mut self) -> Result<(), CudaError> {
        let others = self.others.as_ref().expect("one of several ranks");
        others.done.record(&others.stream).map_err(|error| failed("cuEventRecord", error))?;
        self.stream.wait(&others.done).map_err(|error| failed("cuStreamWaitEvent", error))
    }

    unsafe fn gather(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        let others = self.behind()?;
        // SAFETY: as above.
        unsafe { others.membership.gather(numbers, len * 4, others.stream.cu_stream().cast()) }?;
        self.end_sums()
    }

    unsafe fn hand_on(&mut self, words: Address, num_words: usize) -> Result<(), CudaError> {
        let others = self.behind()?;
        // SAFETY: as above.
        unsafe { others.membership.hand_on(words, num_words * 4, others.stream.cu_stream().cast()) }?;
        self.end_sums()
    }

    fn leave_ranks(&mut self) {
        // A communicator ends when the graphs that have its operations have.
        self.graphs.clear();
        if let Some(others) = &mut self.others {
            others.membership.leave();
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
