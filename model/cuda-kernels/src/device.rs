//! The seam between the forward pass and a device: memory, kernels, products, and sums with other ranks' devices.
//!
//! What is asked for is done in that order, and nothing is waited for, except where a method says so.

use baton_cuda::CudaError;

use crate::kernel::{Address, Kernel};

/// A device and one queue of work on it. What it allocated lives until the device is dropped.
pub trait KernelDevice: Send {
    /// Rows of a product from which on it pays to ask for it in two halves, and to sum up one beside the other.
    const ROWS_TO_OVERLAP: usize;

    /// "cuda:0".
    fn name(&self) -> &str;

    /// Bytes that can still be allocated.
    fn free_bytes(&mut self) -> Result<usize, CudaError>;

    /// New memory with any contents, aligned to 256 bytes.
    ///
    /// # Errors
    /// When there is not so much.
    fn allocate(&mut self, num_bytes: usize) -> Result<Address, CudaError>;

    /// New memory that holds `bytes`.
    ///
    /// # Errors
    /// When there is not so much.
    fn allocate_holding(&mut self, bytes: &[u8]) -> Result<Address, CudaError> {
        let at = self.allocate(bytes.len())?;
        // SAFETY: allocated for them.
        unsafe { self.upload(at, bytes) }?;
        Ok(at)
    }

    /// Copies `bytes` to the device; they may be changed when it returns.
    ///
    /// # Safety
    /// There is room for them.
    unsafe fn upload(&mut self, to: Address, bytes: &[u8]) -> Result<(), CudaError>;

    /// Fills `bytes` from the device, and waits for that.
    ///
    /// # Safety
    /// There are so many.
    unsafe fn download(&mut self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError>;

    /// Asks for a copy of so many bytes to the host, to one of [`NUM_RETURNS`] places there. What was there before is gone.
    ///
    /// # Safety
    /// There are so many.
    unsafe fn send_back(&mut self, from: Address, num_bytes: usize, place: usize) -> Result<(), CudaError>;

    /// Waits for what was last sent to the place, and so for all that was asked for before it.
    fn returned(&mut self, place: usize) -> Result<&[u8], CudaError>;

    /// Runs a kernel of the sources that the device was opened with.
    ///
    /// # Safety
    /// What its arguments point to is there, until the kernel has run.
    unsafe fn launch<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError>;

    /// # Safety
    /// The three matrices are there, until the product is done.
    unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError>;

    /// Whether its kernels can multiply by warpgroups (`kernels/warpgroup.cuh`).
    fn has_wgmma(&self) -> bool;

    /// How it multiplies numbers in E4M3.
    fn fp8_products(&self) -> Fp8Products;

    /// # Safety
    /// The matrices and scales are there, until the product is done.
    ///
    /// # Errors
    /// Where the device has no such products, too.
    unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<(), CudaError>;

    /// Sums up `len` numbers in bf16 over the ranks, all of which ask for it with as many; each then has the same bits. It
    /// may run beside what is asked for before [`end_sums`](Self::end_sums), which leaves these numbers alone.
    ///
    /// # Safety
    /// They are there, until the sum is done.
    unsafe fn begin_sum(&mut self, numbers: Address, len: usize) -> Result<(), CudaError>;

    /// What is asked for from here on is done after every sum that was begun.
    fn end_sums(&mut self) -> Result<(), CudaError>;

    /// Collects `len` numbers in f32 of each rank: the first has room for all at `numbers`, its own first, and the others
    /// have theirs there.
    ///
    /// # Safety
    /// As of [`begin_sum`](Self::begin_sum).
    unsafe fn gather(&mut self, numbers: Address, len: usize) -> Result<(), CudaError>;

    /// Gives `num_words` words of 32 bits of the first rank to the others, which have room for them at `words`.
    ///
    /// # Safety
    /// As of [`begin_sum`](Self::begin_sum).
    unsafe fn hand_on(&mut self, words: Address, num_words: usize) -> Result<(), CudaError>;

    /// Takes no part in sums any more: the other ranks are told ([`CudaError::RankGone`]) instead of waiting.
    fn leave_ranks(&mut self);

    /// Marks this place of the queue by a number below [`NUM_MARKS`], in place of an older mark of that number.
    fn mark(&mut self, mark_idx: usize) -> Result<(), CudaError>;

    /// Whether all that was asked for before the mark is done.
    fn has_passed(&mut self, mark_idx: usize) -> Result<bool, CudaError>;

    /// Waits until it is.
    fn wait_for(&mut self, mark_idx: usize) -> Result<(), CudaError>;

    /// Asks for what `work` asks for: it is the same each time under the same key, and may be remembered. It neither
    /// allocates, copies, marks nor waits.
    fn repeat(
        &mut self,
        key: u64,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError>;
}

/// A device with a clock, that copies within its memory.
pub trait TimedDevice: KernelDevice + 'static {
    /// A place of the queue.
    type Stamp;

    /// Looks at the clock when all that was asked for is done.
    fn stamp(&mut self) -> Result<Self::Stamp, CudaError>;

    /// Waits for both.
    fn seconds_between(&mut self, from: &Self::Stamp, to: &Self::Stamp) -> Result<f64, CudaError>;

    /// # Safety
    /// Both places are there, and do not overlap.
    unsafe fn copy(&mut self, to: Address, from: Address, num_bytes: usize) -> Result<(), CudaError>;
}

/// More than any model has layers.
pub const NUM_MARKS: usize = 1024;

/// Steps that may be under way at a time.
pub const NUM_RETURNS: usize = 2;

/// `out = left right^T + beta out`, sums in f32. Rows of all matrices are aligned to 16 bytes.
///
/// 2 rows out in operations; reads and writes each matrix about once: bound by the memory that the right side is read
/// from while rows are few, by arithmetic when they are many.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Product {
    /// `[rows][left_stride]`, bf16, of which the first `in` of each row.
    pub left: Address,
    /// `[out][in]`, bf16.
    pub right: Address,
    /// `[rows][out_stride]`, of which the first `out` of each row.
    pub out: Address,
    pub num_rows: u64,
    pub num_out: u64,
    pub num_in: u64,
    pub left_stride: u64,
    pub out_stride: u64,
    /// f32, or else bf16.
    pub is_out_f32: u32,
    /// 0 or 1.
    pub beta: f32,
}

/// How a device multiplies numbers in E4M3; who can do more can do less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fp8Products {
    /// Not at all.
    None,
    /// As they are: the caller scales the result.
    Plain,
    /// With a scale for each row of both sides.
    Scaled,
    /// Also with one for each block of both sides.
    Blocks,
}

/// Scales of a product in E4M3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Fp8Scaling {
    /// Both are null.
    None = 0,
    /// `[rows]` and `[out]`.
    Rows = 1,
    /// Of the left side one for each row and [`FP8_BLOCK`] columns, `[in / 128][rows]`; of the right side one for as many rows
    /// and columns, `[out / 128][in / 128]`, where the last is a multiple of 4. `in` is a multiple of 128, `rows` of 4.
    Blocks = 2,
}

/// Numbers of a block of [`Fp8Scaling::Blocks`], in a row and in a column.
pub const FP8_BLOCK: usize = 128;

/// `out[row][n] = sum of left[row][k] right[n][k]`, each with its scales if there are any; sums in f32. Rows of all matrices
/// are aligned to 16 bytes, `in` and `out` are multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Fp8Product {
    /// `[rows][in]`, E4M3.
    pub left: Address,
    /// `[out][in]`, E4M3.
    pub right: Address,
    /// `[rows][out]`, bf16.
    pub out: Address,
    /// f32.
    pub left_scales: Address,
    pub right_scales: Address,
    pub num_rows: u64,
    pub num_out: u64,
    pub num_in: u64,
    pub scaling: Fp8Scaling,
}
