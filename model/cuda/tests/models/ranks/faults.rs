//! Ranks that fail on emulated devices: the error names the right rank, and no rank waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_checkpoint::DeviceModel;
use baton_cuda::CudaError;
use baton_cuda_emulator::emulated_device::{EmulatedDevice, Sums};
use baton_cuda_emulator::models::devices;
use baton_cuda_emulator::session::Threads;
use baton_cuda_kernels::device::{
    Fp8Product, Fp8Products, HostLoad, HostMemory, KernelDevice, Product, WgmmaKernels,
};
use baton_cuda_kernels::kernel::{Address, Kernel};
use baton_kv_cache::{BlockId, KvDtype};
use baton_model_cuda::error::StartError;
use baton_model_cuda::inputs::BatchLimits;
use baton_model_spec::{Batch, BatchSequence, ExecuteError, TokenSampling};

use super::{Machine, TIED, load_parts, prompt, started};

/// The smallest possible step, because these tests start ranks often.
const FEW: BatchLimits = BatchLimits { num_rows: 2, num_sequences: 1, context_length: 8, num_blended: 0 };

/// A device whose `fails_at`-th call fails.
struct Fragile {
    device: EmulatedDevice,
    name: String,
    num_asked: Arc<AtomicUsize>,
    fails_at: usize,
    panics: bool,
}

impl Fragile {
    fn count(&mut self) -> Result<(), CudaError> {
        if self.num_asked.fetch_add(1, Ordering::Relaxed) != self.fails_at {
            return Ok(());
        }
        assert!(!self.panics, "a fault on purpose");
        Err(CudaError::Failed { call: "cuLaunchKernel", why: "a fault on purpose".into() })
    }
}

impl KernelDevice for Fragile {
    const ROWS_TO_OVERLAP: usize = EmulatedDevice::ROWS_TO_OVERLAP;

    fn name(&self) -> &str {
        &self.name
    }

    fn free_bytes(&mut self) -> Result<usize, CudaError> {
        self.device.free_bytes()
    }

    fn allocate(&mut self, num_bytes: usize) -> Result<Address, CudaError> {
        self.device.allocate(num_bytes)
    }

    unsafe fn upload(&mut self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the caller has the same duties.
        unsafe { self.device.upload(to, bytes) }
    }

    unsafe fn download(&mut self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.download(from, bytes) }
    }

    fn allocate_on_host(&mut self, num_bytes: usize) -> Result<HostMemory, CudaError> {
        self.count()?;
        self.device.allocate_on_host(num_bytes)
    }

    unsafe fn copy(&mut self, to: Address, from: Address, num_bytes: usize) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.copy(to, from, num_bytes) }
    }

    unsafe fn begin_loads(&mut self, loads: &[HostLoad], place: usize) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.begin_loads(loads, place) }
    }

    fn await_loads(&mut self, place: usize) -> Result<(), CudaError> {
        self.count()?;
        self.device.await_loads(place)
    }

    unsafe fn send_back(&mut self, from: Address, num_bytes: usize, place: usize) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.send_back(from, num_bytes, place) }
    }

    fn has_returned(&mut self, place: usize) -> Result<bool, CudaError> {
        self.device.has_returned(place)
    }

    fn returned(&mut self, place: usize) -> Result<&[u8], CudaError> {
        self.device.returned(place)
    }

    unsafe fn launch<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.launch(kernel) }
    }

    unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.multiply(product) }
    }

    fn wgmma(&self) -> WgmmaKernels {
        self.device.wgmma()
    }

    fn fp8_products(&self) -> Fp8Products {
        self.device.fp8_products()
    }

    unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<bool, CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.multiply_fp8(product) }
    }

    fn fix_products(&mut self) {
        self.device.fix_products();
    }

    fn begin_choice(&mut self) {
        self.device.begin_choice();
    }

    fn end_choice(&mut self) {
        self.device.end_choice();
    }

    unsafe fn begin_sum(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.begin_sum(numbers, len) }
    }

    fn end_sums(&mut self) -> Result<(), CudaError> {
        self.count()?;
        self.device.end_sums()
    }

    unsafe fn gather(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.gather(numbers, len) }
    }

    unsafe fn broadcast(&mut self, words: Address, num_words: usize) -> Result<(), CudaError> {
        self.count()?;
        // SAFETY: as above.
        unsafe { self.device.broadcast(words, num_words) }
    }

    fn leave_ranks(&mut self) {
        self.device.leave_ranks();
    }

    fn mark(&mut self, mark_idx: usize) -> Result<(), CudaError> {
        self.device.mark(mark_idx)
    }

    fn has_passed(&mut self, mark_idx: usize) -> Result<bool, CudaError> {
        self.device.has_passed(mark_idx)
    }

    fn wait_for(&mut self, mark_idx: usize) -> Result<(), CudaError> {
        self.device.wait_for(mark_idx)
    }

    fn repeat(
        &mut self,
        _: u64,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        work(self)
    }
}

/// Ranks of which one fails, and the number of calls of each.
fn fragile(
    models: Vec<DeviceModel>,
    failing: usize,
    fails_at: usize,
    panics: bool,
) -> (Vec<(Fragile, DeviceModel)>, Arc<AtomicUsize>) {
    let num_asked = Arc::new(AtomicUsize::new(0));
    let wrapped = devices(models, Sums::Late).into_iter().enumerate().map(|(idx, (device, model))| {
        let is_failing = idx == failing;
        let device = Fragile {
            device,
            name: format!("cuda:{idx}"),
            num_asked: if is_failing { Arc::clone(&num_asked) } else { Arc::default() },
            fails_at: if is_failing { fails_at } else { usize::MAX },
            panics,
        };
        (device, model)
    });
    (wrapped.collect(), num_asked)
}

#[test]
fn a_rank_that_fails_in_a_step_is_named_and_ends_all_waits() {
    let dir = TIED.write();
    let tokens = prompt(2, 1);
    let step = |machine: &mut Machine| {
        let blocks = [BlockId(1)];
        machine.run(vec![BatchSequence { tokens: &tokens, start_idx: 0, blocks: &blocks, num_logits: 1 }])
    };
    let load = |num_ranks| load_parts(dir.path(), num_ranks, KvDtype::Bf16);
    // The first and last call of a step, as counted by the first rank and by another one.
    let [first, other] = [0, 1].map(|failing| {
        let (ranks, num_asked) = fragile(load(2), failing, usize::MAX, false);
        let mut machine = Machine::new(ranks, FEW);
        let begin = num_asked.load(Ordering::Relaxed);
        step(&mut machine).unwrap();
        begin..num_asked.load(Ordering::Relaxed)
    });
    for (num_ranks, failing) in [(2, 0), (2, 1), (4, 3)] {
        let span = if failing == 0 { &first } else { &other };
        for fails_at in span.clone().step_by(if num_ranks == 2 { 5 } else { 17 }) {
            let panics = fails_at % 2 == 0;
            let mut machine = Machine::new(fragile(load(num_ranks), failing, fails_at, panics).0, FEW);
            let error = step(&mut machine).unwrap_err().to_string();
            let how = if panics { "panicked: " } else { "cuLaunchKernel failed: " };
            assert_eq!(error, format!("cuda:{failing}, rank {failing}: {how}a fault on purpose"));
            let error = step(&mut machine).unwrap_err().to_string();
            assert_eq!(error, "cuda:0: a rank failed in an earlier step");
        }
    }
}

/// A step that samples, and a step that is launched before the first one is collected.
#[test]
fn a_rank_that_fails_in_a_step_ahead_is_named_and_ends_all_waits() {
    let dir = TIED.write();
    let tokens = prompt(2, 1);
    let steps = |machine: &mut Machine| -> Result<(), ExecuteError> {
        let (blocks, samplings) = ([BlockId(1)], [TokenSampling::default()]);
        let first = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &blocks, num_logits: 1 };
        let second = BatchSequence { tokens: &tokens[..1], start_idx: 2, blocks: &blocks, num_logits: 1 };
        let Machine { executor, storage, .. } = machine;
        let sampling = executor.sampling().unwrap();
        for (sequence, follows) in [(first, &[][..]), (second, &[0])] {
            let batch = Batch { sequences: vec![sequence] };
            // SAFETY: nothing else uses the storage.
            unsafe { sampling.launch(&batch, &samplings, follows, storage, &mut |_| {}) }?;
        }
        for _ in 0..2 {
            assert_eq!(sampling.collect(&mut |_| {})?.len(), 1);
        }
        Ok(())
    };
    let load = || load_parts(dir.path(), 2, KvDtype::Bf16);
    for failing in [0, 1] {
        let (ranks, num_asked) = fragile(load(), failing, usize::MAX, false);
        let mut machine = Machine::new(ranks, FEW);
        let begin = num_asked.load(Ordering::Relaxed);
        steps(&mut machine).unwrap();
        for fails_at in (begin..num_asked.load(Ordering::Relaxed)).step_by(17) {
            let panics = fails_at % 2 == 0;
            let mut machine = Machine::new(fragile(load(), failing, fails_at, panics).0, FEW);
            let error = steps(&mut machine).unwrap_err().to_string();
            let how = if panics { "panicked: " } else { "cuLaunchKernel failed: " };
            assert_eq!(error, format!("cuda:{failing}, rank {failing}: {how}a fault on purpose"));
        }
    }
}

#[test]
fn a_rank_that_cannot_start_ends_the_start_of_all() {
    let dir = TIED.write();
    let load = |num_ranks| load_parts(dir.path(), num_ranks, KvDtype::Bf16);
    for (num_ranks, failing) in [(2, 0), (2, 1), (4, 2)] {
        // During its allocations, and during the warm-up with the other ranks.
        let (ranks, _) = fragile(load(num_ranks), failing, 5, false);
        let error = started(ranks, FEW).err().expect("it fails").to_string();
        let expected = format!("rank {failing} on cuda:{failing}: cuLaunchKernel failed: a fault on purpose");
        assert_eq!(error, expected);
        let mut ranks = devices(load(num_ranks), Sums::Late);
        let small = EmulatedDevice::new(&[], 1 << 16, Threads::Shuffled);
        // Drops the old device, which leaves the ranks, as after a failure of its own.
        ranks[failing].0 = small;
        let error = started(ranks, FEW).err().expect("no memory");
        let StartError::Rank { rank, why, .. } = error else { panic!("{error}") };
        assert_eq!(rank, failing);
        assert!(matches!(*why, StartError::NoRoom { .. }), "{why}");
    }
}

#[test]
fn a_single_rank_is_not_named() {
    let dir = TIED.write();
    let (ranks, _) = fragile(load_parts(dir.path(), 1, KvDtype::Bf16), 0, 5, false);
    let error = started(ranks, FEW).err().expect("it fails").to_string();
    assert_eq!(error, "cuLaunchKernel failed: a fault on purpose");
}
