//! An emulated device: a whole forward pass on a machine without a GPU.

use std::collections::{HashMap, VecDeque};

use baton_cuda::CudaError;
use baton_cuda_kernels::device::{
    Fp8Product, Fp8Products, Fp8Scaling, HostLoad, HostMemory, KernelDevice, NUM_LOADS, NUM_MARKS,
    NUM_RETURNS, Product, TimedDevice, WgmmaKernels,
};
use baton_cuda_kernels::kernel::{Address, Kernel, KernelSource};
use baton_model_spec::{Communicator, CommunicatorError, ThreadCommunicator};

use crate::numbers::{bf16, floats, widened};
use crate::session::{KernelWork, Session, Threads};

/// Does all work at once, when it is queued.
pub struct EmulatedDevice {
    session: Session,
    /// Bytes that can still be allocated.
    num_free: usize,
    /// The fp8 products that it claims to have.
    pub fp8_products: Fp8Products,
    /// A number of rows for which it refuses them nevertheless.
    pub refused_rows: Option<u64>,
    /// The marks that were set.
    marks: Vec<bool>,
    returns: [Vec<u8>; NUM_RETURNS],
    is_repeating: bool,
    /// `None`: it computes a whole model, or has left the ranks.
    ranks: Option<ThreadCommunicator>,
    sums: Sums,
    /// Sums that were queued and are not done.
    begun: Vec<(Address, Vec<f32>)>,
    /// Copies from memory of the host that were queued and are not done.
    loads: VecDeque<HostLoad>,
    /// The number of copies that were queued before each mark, and that are done.
    load_marks: [usize; NUM_LOADS],
    num_loaded: usize,
    /// Number of sums in two halves, of which the first could overlap a product.
    pub num_overlapped: usize,
    /// Keys of repeated work, and how often each was repeated.
    pub repeated: HashMap<u64, usize>,
    pub counts: Counts,
}

/// When sums are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// At once, when they are queued.
    Early,
    /// As late as possible. Until then the numbers are unusable.
    Late,
}

/// What was asked of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes that were copied to the device.
    pub num_uploaded: usize,
    /// Launches of kernels, and products, outside of repeated work.
    pub num_launches: usize,
    /// Launches and products of repeated work.
    pub num_repeated: usize,
}

impl EmulatedDevice {
    fn count_launch(&mut self) {
        let Counts { num_launches, num_repeated, .. } = &mut self.counts;
        *(if self.is_repeating { num_repeated } else { num_launches }) += 1;
    }

    /// The link to the other ranks.
    pub fn join(mut self, end: ThreadCommunicator, sums: Sums) -> EmulatedDevice {
        (self.ranks, self.sums) = (Some(end), sums);
        self
    }

    fn ranks(&mut self) -> &mut ThreadCommunicator {
        self.ranks.as_mut().expect("one of several ranks")
    }

    fn sum(&mut self, at: Address, mut numbers: Vec<f32>) -> Result<(), CudaError> {
        self.ranks().all_reduce_sum(&mut numbers).map_err(gone)?;
        self.session.write(at, &bf16(&numbers).0);
        Ok(())
    }

    /// A device with `memory_bytes` bytes and the kernels of `sources`.
    pub fn new(sources: &[KernelSource], memory_bytes: usize, threads: Threads) -> EmulatedDevice {
        EmulatedDevice {
            session: Session::new(sources, threads),
            num_free: memory_bytes,
            fp8_products: Fp8Products::None,
            refused_rows: None,
            marks: vec![false; NUM_MARKS],
            returns: Default::default(),
            is_repeating: false,
            ranks: None,
            sums: Sums::Early,
            begun: vec![],
            loads: VecDeque::new(),
            load_marks: [0; NUM_LOADS],
            num_loaded: 0,
            num_overlapped: 0,
            repeated: HashMap::new(),
            counts: Counts::default(),
        }
    }

    /// What its kernels have done so far.
    pub fn work(&mut self) -> KernelWork {
        self.session.work()
    }

    /// Checks, until `end_repeating`, that the work under this key is the work that was recorded for it.
    pub fn begin_repeating(&mut self, key: u64) {
        *self.repeated.entry(key).or_default() += 1;
        self.is_repeating = true;
    }

    pub fn end_repeating(&mut self) {
        self.is_repeating = false;
    }
}

fn gone(error: CommunicatorError) -> CudaError {
    match error {
        CommunicatorError::Lost { rank } => CudaError::RankGone { rank },
        CommunicatorError::Differs { .. } => CudaError::Failed { call: "sum", why: error.to_string() },
    }
}

impl KernelDevice for EmulatedDevice {
    const ROWS_TO_OVERLAP: usize = 8;

    fn name(&self) -> &str {
        "emulated"
    }

    fn free_bytes(&mut self) -> Result<usize, CudaError> {
        Ok(self.num_free)
    }

    fn allocate(&mut self, num_bytes: usize) -> Result<Address, CudaError> {
        assert!(!self.is_repeating, "memory is allocated before");
        let num_free = self.num_free;
        self.num_free =
            num_free.checked_sub(num_bytes).ok_or(CudaError::OutOfMemory { num_bytes, num_free })?;
        Ok(self.session.allocate(num_bytes))
    }

    unsafe fn upload(&mut self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        assert!(!self.is_repeating, "what is repeated does not copy");
        self.counts.num_uploaded += bytes.len();
        self.session.write(to, bytes);
        Ok(())
    }

    unsafe fn download(&mut self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        assert!(!self.is_repeating, "what is repeated does not wait");
        self.session.read(from, bytes);
        Ok(())
    }

    fn allocate_on_host(&mut self, num_bytes: usize) -> Result<HostMemory, CudaError> {
        // Freed with the session.
        Ok(HostMemory::new(self.session.allocate(num_bytes), ()))
    }

    unsafe fn copy(&mut self, to: Address, from: Address, num_bytes: usize) -> Result<(), CudaError> {
        let mut bytes = vec![0; num_bytes];
        // SAFETY: the caller guarantees it.
        unsafe {
            self.download(from, &mut bytes)?;
            self.upload(to, &bytes)
        }
    }

    // As late as possible. Until then the targets are unusable.
    unsafe fn begin_loads(&mut self, loads: &[HostLoad], place: usize) -> Result<(), CudaError> {
        assert!(!self.is_repeating, "what is repeated does not copy");
        for load in loads {
            self.session.write(load.to, &vec![0xff; load.num_bytes]);
            self.loads.push_back(*load);
        }
        self.load_marks[place] = self.num_loaded + self.loads.len();
        Ok(())
    }

    fn await_loads(&mut self, place: usize) -> Result<(), CudaError> {
        while self.num_loaded < self.load_marks[place] {
            let HostLoad { to, from, num_bytes } = self.loads.pop_front().expect("it was queued");
            let mut bytes = vec![0; num_bytes];
            self.session.read(from, &mut bytes);
            self.session.write(to, &bytes);
            self.num_loaded += 1;
        }
        Ok(())
    }

    unsafe fn send_back(&mut self, from: Address, num_bytes: usize, place: usize) -> Result<(), CudaError> {
        assert!(!self.is_repeating, "what is repeated does not copy");
        self.returns[place].resize(num_bytes, 0);
        self.session.read(from, &mut self.returns[place]);
        Ok(())
    }

    fn has_returned(&mut self, _: usize) -> Result<bool, CudaError> {
        Ok(true)
    }

    fn returned(&mut self, place: usize) -> Result<&[u8], CudaError> {
        Ok(&self.returns[place])
    }

    unsafe fn launch<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError> {
        self.count_launch();
        self.session.launch(kernel);
        Ok(())
    }

    unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError> {
        self.count_launch();
        self.session.multiply(product);
        Ok(())
    }

    fn wgmma(&self) -> WgmmaKernels {
        WgmmaKernels::all(true)
    }

    fn fp8_products(&self) -> Fp8Products {
        self.fp8_products
    }

    unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<bool, CudaError> {
        let needed = match product.scaling {
            Fp8Scaling::None => Fp8Products::Plain,
            Fp8Scaling::Rows => Fp8Products::Scaled,
            Fp8Scaling::Blocks => Fp8Products::Blocks,
        };
        assert!(self.fp8_products >= needed, "a product that the device does not have");
        if self.refused_rows == Some(product.num_rows) {
            return Ok(false);
        }
        self.count_launch();
        self.session.multiply_fp8(product);
        Ok(true)
    }

    // Products here always add in one order.
    fn fix_products(&mut self) {}

    fn begin_choice(&mut self) {}

    fn end_choice(&mut self) {}

    unsafe fn begin_sum(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        let mut bytes = vec![0; len * 2];
        self.session.read(numbers, &mut bytes);
        let values = widened(&bytes);
        match self.sums {
            Sums::Early => self.sum(numbers, values),
            Sums::Late => {
                self.session.write(numbers, &vec![0xff; bytes.len()]);
                self.begun.push((numbers, values));
                Ok(())
            }
        }
    }

    fn end_sums(&mut self) -> Result<(), CudaError> {
        self.num_overlapped += usize::from(self.begun.len() > 1);
        std::mem::take(&mut self.begun).into_iter().try_for_each(|(at, numbers)| self.sum(at, numbers))
    }

    unsafe fn gather(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        let mut part = vec![0; len * 4];
        self.session.read(numbers, &mut part);
        let ranks = self.ranks();
        let mut all = vec![0.0; ranks.rank().num_ranks * len];
        let room = ranks.rank().is_first().then_some(&mut *all);
        let is_first = room.is_some();
        ranks.gather(&floats(&part), room).map_err(gone)?;
        if is_first {
            self.session.write(numbers, bytemuck::cast_slice(&all));
        }
        Ok(())
    }

    unsafe fn broadcast(&mut self, words: Address, num_words: usize) -> Result<(), CudaError> {
        assert!(!self.is_repeating, "not a part of what is repeated");
        let mut bytes = vec![0; num_words * 4];
        let is_first = self.ranks().rank().is_first();
        if is_first {
            self.session.read(words, &mut bytes);
        }
        // f32 holds a byte exactly. A sum of a byte and zeros is the byte.
        let mut numbers: Vec<f32> = bytes.iter().map(|&byte| byte.into()).collect();
        self.ranks().all_reduce_sum(&mut numbers).map_err(gone)?;
        if !is_first {
            let handed: Vec<u8> = numbers.iter().map(|&number| number as u8).collect();
            self.session.write(words, &handed);
        }
        Ok(())
    }

    fn leave_ranks(&mut self) {
        self.ranks = None;
    }

    fn mark(&mut self, mark_idx: usize) -> Result<(), CudaError> {
        assert!(!self.is_repeating, "what is repeated is not marked");
        self.marks[mark_idx] = true;
        Ok(())
    }

    fn has_passed(&mut self, mark_idx: usize) -> Result<bool, CudaError> {
        assert!(self.marks[mark_idx], "no mark {mark_idx}");
        Ok(true)
    }

    fn wait_for(&mut self, mark_idx: usize) -> Result<(), CudaError> {
        self.has_passed(mark_idx).map(drop)
    }

    fn repeat(
        &mut self,
        key: u64,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.begin_repeating(key);
        let done = work(self);
        self.end_repeating();
        done
    }
}

/// Everything takes one second.
impl TimedDevice for EmulatedDevice {
    type Stamp = ();

    fn stamp(&mut self) -> Result<(), CudaError> {
        Ok(())
    }

    fn seconds_between(&mut self, (): &(), (): &()) -> Result<f64, CudaError> {
        Ok(1.0)
    }
}
