//! The seam between the forward pass and a device: memory, kernels, matrix products, and sums over the devices of
//! other ranks.
//!
//! A device executes its calls in the order in which they were made. A call returns without waiting for the device,
//! except where its comment says that it waits.

use std::any::Any;

use baton_cuda::CudaError;

use crate::kernel::{Address, Kernel};

/// A device and one queue of work on it. Its allocations live until the device is dropped.
pub trait KernelDevice: Send {
    /// Products of at least this many rows are queued in two halves. The sum of the first half then overlaps the
    /// product of the second.
    const ROWS_TO_OVERLAP: usize;

    /// "cuda:0".
    fn name(&self) -> &str;

    /// Bytes that can still be allocated.
    fn free_bytes(&mut self) -> Result<usize, CudaError>;

    /// Allocates memory, aligned to 256 bytes. Its contents are undefined.
    ///
    /// # Errors
    /// When the device has less free memory.
    fn allocate(&mut self, num_bytes: usize) -> Result<Address, CudaError>;

    /// Allocates memory and copies `bytes` into it.
    ///
    /// # Errors
    /// When the device has less free memory.
    fn allocate_holding(&mut self, bytes: &[u8]) -> Result<Address, CudaError> {
        let at = self.allocate(bytes.len())?;
        // SAFETY: the allocation has the length of `bytes`.
        unsafe { self.upload(at, bytes) }?;
        Ok(at)
    }

    /// Copies `bytes` to the device. The caller may change them when the call returns.
    ///
    /// # Safety
    /// The memory at `to` has room for `bytes`.
    unsafe fn upload(&mut self, to: Address, bytes: &[u8]) -> Result<(), CudaError>;

    /// Fills `bytes` from the device and waits for the copy.
    ///
    /// # Safety
    /// The memory at `from` holds as many bytes.
    unsafe fn download(&mut self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError>;

    /// Allocates memory of the host that kernels and [`begin_loads`](Self::begin_loads) reach. It is freed with the result.
    ///
    /// # Errors
    /// When the host has too little memory.
    fn allocate_on_host(&mut self, num_bytes: usize) -> Result<HostMemory, CudaError>;

    /// Queues a copy. Each side is memory of the device, or of the host that the device reaches. A copy engine does it, so kernels keep
    /// the multiprocessors.
    ///
    /// # Safety
    /// Both ranges are valid and do not overlap.
    unsafe fn copy(&mut self, to: Address, from: Address, num_bytes: usize) -> Result<(), CudaError>;

    /// Queues copies from memory of the host, and marks them with a number below [`NUM_LOADS`], which replaces an older mark. They start
    /// when all work queued so far and all earlier loads are done, and may overlap the work that is queued before
    /// [`await_loads`](Self::await_loads); that work does not touch the targets.
    ///
    /// # Safety
    /// Sources are in memory of [`allocate_on_host`](Self::allocate_on_host), which stays until the copies are done. Both sides have
    /// as many bytes.
    unsafe fn begin_loads(&mut self, loads: &[HostLoad], place: usize) -> Result<(), CudaError>;

    /// Work queued after this call starts when the loads with this mark are done.
    fn await_loads(&mut self, place: usize) -> Result<(), CudaError>;

    /// Queues a copy of `num_bytes` bytes to one of [`NUM_RETURNS`] places in host memory. It overwrites what the
    /// place held.
    ///
    /// # Safety
    /// The memory at `from` holds `num_bytes` bytes.
    unsafe fn send_back(&mut self, from: Address, num_bytes: usize, place: usize) -> Result<(), CudaError>;

    /// Whether the last copy to this place is done.
    fn has_returned(&mut self, place: usize) -> Result<bool, CudaError>;

    /// Waits for the last copy to this place, and so for all work queued before that copy. Returns its bytes.
    fn returned(&mut self, place: usize) -> Result<&[u8], CudaError>;

    /// Runs a kernel of the sources with which the device was opened.
    ///
    /// # Safety
    /// The memory that the arguments point to is valid until the kernel has run.
    unsafe fn launch<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError>;

    /// Queues a matrix product.
    ///
    /// # Safety
    /// The three matrices are valid until the product is done.
    unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError>;

    /// Which kernels with warpgroup products (`kernels/warpgroup.cuh`) the device has.
    fn wgmma(&self) -> WgmmaKernels;

    /// Which products of E4M3 numbers the device has.
    fn fp8_products(&self) -> Fp8Products;

    /// Queues a matrix product of E4M3 numbers. Returns `false` if the device does not have it for this shape; then
    /// nothing was queued.
    ///
    /// # Safety
    /// The matrices and scales are valid until the product is done.
    unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<bool, CudaError>;

    /// From now on the bits of a row of [`multiply`](Self::multiply) do not depend on the number of rows.
    fn fix_products(&mut self);

    /// The device may run the products that follow several times, to find out how they are fastest.
    fn begin_choice(&mut self);

    /// Products are as they were chosen from now on.
    fn end_choice(&mut self);

    /// Queues a sum of `len` bf16 numbers over all ranks. Every rank calls this with the same `len`, and every rank
    /// gets the same bits. The sum may overlap other work that is queued before [`end_sums`](Self::end_sums); that
    /// work does not touch these numbers.
    ///
    /// # Safety
    /// The numbers are valid until the sum is done.
    unsafe fn begin_sum(&mut self, numbers: Address, len: usize) -> Result<(), CudaError>;

    /// Work queued after this call starts when all sums queued before it are done.
    fn end_sums(&mut self) -> Result<(), CudaError>;

    /// Collects `len` f32 numbers of each rank at the first rank. The first rank has room for all of them at
    /// `numbers` and its own numbers first. The other ranks have theirs at `numbers`.
    ///
    /// # Safety
    /// As for [`begin_sum`](Self::begin_sum).
    unsafe fn gather(&mut self, numbers: Address, len: usize) -> Result<(), CudaError>;

    /// Sends `num_words` words of 32 bits from the first rank to all others. Every rank has its words, or room for
    /// them, at `words`.
    ///
    /// # Safety
    /// As for [`begin_sum`](Self::begin_sum).
    unsafe fn broadcast(&mut self, words: Address, num_words: usize) -> Result<(), CudaError>;

    /// Leaves the group of ranks. The other ranks fail with [`CudaError::RankGone`] instead of waiting.
    fn leave_ranks(&mut self);

    /// Marks the current end of the queue with a number below [`NUM_MARKS`]. It replaces an older mark of the same
    /// number.
    fn mark(&mut self, mark_idx: usize) -> Result<(), CudaError>;

    /// Whether all work queued before the mark is done.
    fn has_passed(&mut self, mark_idx: usize) -> Result<bool, CudaError>;

    /// Waits until all work queued before the mark is done.
    fn wait_for(&mut self, mark_idx: usize) -> Result<(), CudaError>;

    /// Queues the work that `work` queues. Work under one key is the same every time, so the device may record and
    /// replay it. `work` does not allocate, copy, mark or wait.
    fn repeat(
        &mut self,
        key: u64,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError>;
}

/// A device that has a clock.
pub trait TimedDevice: KernelDevice + 'static {
    /// A point in time in the queue.
    type Stamp;

    /// Takes the time when all work queued so far is done.
    fn stamp(&mut self) -> Result<Self::Stamp, CudaError>;

    /// Waits for both stamps.
    fn seconds_between(&mut self, from: &Self::Stamp, to: &Self::Stamp) -> Result<f64, CudaError>;
}

/// A copy from memory of the host.
#[derive(Clone, Copy, Debug)]
pub struct HostLoad {
    pub to: Address,
    pub from: Address,
    pub num_bytes: usize,
}

/// Memory of the host at an address that the device reaches, too.
pub struct HostMemory {
    pub at: Address,
    /// Frees it.
    _owner: Box<dyn Any + Send + Sync>,
}

impl HostMemory {
    /// The memory at `at`, which is freed with its owner.
    pub fn new(at: Address, owner: impl Any + Send + Sync) -> HostMemory {
        HostMemory { at, _owner: Box::new(owner) }
    }
}

/// Marks of one device. No model has more layers.
pub const NUM_MARKS: usize = 1024;

/// Marks of loads of one device.
pub const NUM_LOADS: usize = 8;

/// Steps that can be in flight at a time.
pub const NUM_RETURNS: usize = 2;

/// `out = left right^T + beta out`, with sums in f32. Rows of all matrices are aligned to 16 bytes.
///
/// Takes `2 rows out in` operations and moves each matrix about once. With few rows it is bound by the memory
/// bandwidth of the right side, with many rows by arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Product {
    /// `[rows][left_stride]`, bf16. The product reads the first `in` numbers of each row.
    pub left: Address,
    /// `[out][in]`, bf16.
    pub right: Address,
    /// `[rows][out_stride]`. The product writes the first `out` numbers of each row.
    pub out: Address,
    pub num_rows: u64,
    pub num_out: u64,
    pub num_in: u64,
    pub left_stride: u64,
    pub out_stride: u64,
    /// 1: `out` is f32. 0: `out` is bf16.
    pub is_out_f32: u32,
    /// 0 or 1.
    pub beta: f32,
}

/// Kernels with warpgroup products. Each is tested by itself when a device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WgmmaKernels {
    /// [`WgmmaAttention`](crate::attention::WgmmaAttention)
    pub attention: bool,
    /// [`WgmmaExpertProduct`](crate::expert_products::WgmmaExpertProduct)
    pub experts: bool,
}

impl WgmmaKernels {
    /// All of them, or none.
    pub fn all(has_wgmma: bool) -> WgmmaKernels {
        WgmmaKernels { attention: has_wgmma, experts: has_wgmma }
    }
}

/// Products of E4M3 numbers that a device has. Each level includes the levels before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fp8Products {
    /// No such products.
    None,
    /// Unscaled products. The caller scales the result.
    Plain,
    /// Products with a scale for each row of both sides.
    Scaled,
    /// Products with a scale for each block of both sides.
    Blocks,
}

/// Scales of a product of E4M3 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u64)]
pub enum Fp8Scaling {
    /// No scales. Both addresses are null.
    None = 0,
    /// A scale for each row of both sides: `[rows]` and `[out]`.
    Rows = 1,
    /// The left side has a scale for each row and [`FP8_BLOCK`] columns, `[in / 128][rows]`. The right side has a
    /// scale for each block of [`FP8_BLOCK`] rows and columns, `[out / 128][in / 128]`; its last dimension is padded
    /// to a multiple of 4. `in` is a multiple of 128, `rows` is a multiple of 4.
    Blocks = 2,
}

/// Rows, and columns, of a block of [`Fp8Scaling::Blocks`].
pub const FP8_BLOCK: usize = 128;

/// `out[row][n] = sum over k of left[row][k] right[n][k]`, each number times its scale if there are scales. Sums are
/// in f32. Rows of all matrices are aligned to 16 bytes. `in` and `out` are multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Fp8Product {
    /// `[rows][in]`, E4M3.
    pub left: Address,
    /// `[out][in]`, E4M3.
    pub right: Address,
    /// `[rows][out]`, bf16.
    pub out: Address,
    /// f32, in the shape of [`Fp8Scaling`].
    pub left_scales: Address,
    pub right_scales: Address,
    pub num_rows: u64,
    pub num_out: u64,
    pub num_in: u64,
    pub scaling: Fp8Scaling,
}
