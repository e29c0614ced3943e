//! The device of tests: the emulator, or the device that `BATON_KERNELS_ON` names ("cuda:0"), with guards around its
//! buffers.

use std::collections::HashMap;
use std::sync::OnceLock;

use baton_cuda::CudaError;
use baton_cuda_kernels::device::{
    Fp8Product, Fp8Products, HostLoad, HostMemory, KernelDevice, Product, WgmmaKernels,
};
use baton_cuda_kernels::driver::graphs::{self, Graphs};
use baton_cuda_kernels::driver::{DriverDevice, OpenError};
use baton_cuda_kernels::kernel::{Address, Kernel, KernelCode, KernelSource};
use baton_cuda_kernels::shipped;

use crate::emulated_device::{Counts, EmulatedDevice};
use crate::files::kernel_files;
use crate::session::Threads;
use crate::tested;

/// Bytes of the guards before and after each buffer. Buffers are aligned to as many bytes.
const GUARD_BYTES: usize = 256;

/// NaN in every type, and an invalid index. New buffers and all guards hold this byte, so that wrong reads show as
/// well as wrong writes.
const POISON: u8 = 0xff;

/// The index of the device that tests run on. `None`: tests are emulated.
pub fn ordinal() -> Option<u32> {
    let name = std::env::var("BATON_KERNELS_ON").ok()?;
    let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
    Some(ordinal.unwrap_or_else(|| panic!("BATON_KERNELS_ON is {name:?}, expected cuda:N")))
}

/// The device of a test.
#[allow(clippy::large_enum_variant)] // one a test
pub enum TestDevice {
    Emulated(EmulatedDevice),
    Guarded(GuardedDevice),
}

impl TestDevice {
    /// A device with these kernels. `memory_bytes` and `threads` apply to the emulator only.
    pub fn new(sources: &[KernelSource], memory_bytes: usize, threads: Threads) -> TestDevice {
        tested::check(sources);
        match ordinal() {
            None => TestDevice::Emulated(EmulatedDevice::new(sources, memory_bytes, threads)),
            Some(ordinal) => TestDevice::Guarded(GuardedDevice::open(ordinal, |code| {
                DriverDevice::open(ordinal, sources, code)
            })),
        }
    }

    /// A device for kernels only, without products.
    pub fn of_kernels(sources: &[KernelSource]) -> TestDevice {
        tested::check(sources);
        match ordinal() {
            None => TestDevice::Emulated(EmulatedDevice::new(sources, usize::MAX, Threads::Compared)),
            Some(ordinal) => TestDevice::Guarded(GuardedDevice::open(ordinal, |code| {
                DriverDevice::without_products(ordinal, sources, code)
            })),
        }
    }

    /// Runs a kernel twice and compares the results.
    ///
    /// # Panics
    /// When the results differ, a kernel left its buffers, or the device failed.
    pub fn launch_twice<K: Kernel>(&mut self, kernel: &K) {
        // SAFETY: a test passes its own buffers. The guards detect the tests that do not.
        let launched = unsafe {
            match self {
                // The emulator runs each kernel twice by itself.
                TestDevice::Emulated(device) => device.launch(kernel),
                TestDevice::Guarded(device) => device.launch_twice(kernel),
            }
        };
        launched.unwrap_or_else(|error| panic!("{}: {error}", kernel.name()));
    }

    fn graphs(&mut self) -> &mut Graphs {
        match self {
            TestDevice::Guarded(device) => device.driver.graphs(),
            TestDevice::Emulated(_) => unreachable!("only asked of the other"),
        }
    }

    /// Sets the E4M3 products of the device. Returns `false` if it does not have them.
    pub fn limit_fp8(&mut self, products: Fp8Products) -> bool {
        let said = match self {
            TestDevice::Emulated(device) => &mut device.fp8_products,
            TestDevice::Guarded(GuardedDevice { driver, .. }) => {
                if products > driver.fp8_products {
                    return false;
                }
                &mut driver.fp8_products
            }
        };
        *said = products;
        true
    }

    /// Makes the device refuse E4M3 products of this many rows. A fake library reads `FAKE_REFUSED_ROWS` instead. Returns
    /// whether it refuses them now.
    pub fn refuse_fp8(&mut self, num_rows: usize) -> bool {
        match self {
            TestDevice::Emulated(device) => {
                device.refused_rows = Some(num_rows as u64);
                true
            }
            TestDevice::Guarded(_) => std::env::var("FAKE_REFUSED_ROWS")
                .is_ok_and(|rows| rows.split(',').any(|it| it == num_rows.to_string())),
        }
    }

    /// How often work was repeated under each key.
    pub fn repeated(&self) -> Vec<usize> {
        let repeated = match self {
            TestDevice::Emulated(device) => &device.repeated,
            TestDevice::Guarded(device) => &device.repeated,
        };
        repeated.values().copied().collect()
    }

    /// What was asked of the emulated device.
    ///
    /// # Panics
    /// When it is another device.
    pub fn counts(&self) -> Counts {
        match self {
            TestDevice::Emulated(device) => device.counts,
            TestDevice::Guarded(_) => panic!("only the emulated device counts"),
        }
    }

    /// # Panics
    /// When a kernel left its buffers.
    pub fn check(&mut self) {
        match self {
            TestDevice::Emulated(_) => {}
            TestDevice::Guarded(device) => device.check().expect("the device works"),
        }
    }
}

/// Calls the same method on both variants.
macro_rules! of_either {
    ($test_device:expr, $device:ident => $call:expr) => {
        match $test_device {
            TestDevice::Emulated($device) => $call,
            TestDevice::Guarded(GuardedDevice { driver: $device, .. }) => $call,
        }
    };
}

impl KernelDevice for TestDevice {
    const ROWS_TO_OVERLAP: usize = EmulatedDevice::ROWS_TO_OVERLAP;

    fn name(&self) -> &str {
        of_either!(self, device => device.name())
    }

    fn free_bytes(&mut self) -> Result<usize, CudaError> {
        of_either!(self, device => device.free_bytes())
    }

    fn allocate(&mut self, num_bytes: usize) -> Result<Address, CudaError> {
        match self {
            TestDevice::Emulated(device) => device.allocate(num_bytes),
            TestDevice::Guarded(device) => device.allocate(num_bytes),
        }
    }

    unsafe fn upload(&mut self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.upload(to, bytes)) }
    }

    unsafe fn download(&mut self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.download(from, bytes)) }
    }

    fn allocate_on_host(&mut self, num_bytes: usize) -> Result<HostMemory, CudaError> {
        of_either!(self, device => device.allocate_on_host(num_bytes))
    }

    unsafe fn copy(&mut self, to: Address, from: Address, num_bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.copy(to, from, num_bytes)) }
    }

    unsafe fn begin_loads(&mut self, loads: &[HostLoad], place: usize) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.begin_loads(loads, place)) }
    }

    fn await_loads(&mut self, place: usize) -> Result<(), CudaError> {
        of_either!(self, device => device.await_loads(place))
    }

    unsafe fn send_back(&mut self, from: Address, num_bytes: usize, place: usize) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.send_back(from, num_bytes, place)) }
    }

    fn has_returned(&mut self, place: usize) -> Result<bool, CudaError> {
        of_either!(self, device => device.has_returned(place))
    }

    fn returned(&mut self, place: usize) -> Result<&[u8], CudaError> {
        of_either!(self, device => device.returned(place))
    }

    unsafe fn launch<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError> {
        if let TestDevice::Guarded(device) = self {
            device.last_kernel = kernel.name();
        }
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.launch(kernel)) }
    }

    unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.multiply(product)) }
    }

    fn wgmma(&self) -> WgmmaKernels {
        of_either!(self, device => device.wgmma())
    }

    fn fp8_products(&self) -> Fp8Products {
        of_either!(self, device => device.fp8_products())
    }

    unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<bool, CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.multiply_fp8(product)) }
    }

    fn fix_products(&mut self) {
        of_either!(self, device => device.fix_products());
    }

    fn begin_choice(&mut self) {
        of_either!(self, device => device.begin_choice());
    }

    fn end_choice(&mut self) {
        of_either!(self, device => device.end_choice());
    }

    unsafe fn begin_sum(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.begin_sum(numbers, len)) }
    }

    fn end_sums(&mut self) -> Result<(), CudaError> {
        of_either!(self, device => device.end_sums())
    }

    unsafe fn gather(&mut self, numbers: Address, len: usize) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.gather(numbers, len)) }
    }

    unsafe fn broadcast(&mut self, words: Address, num_words: usize) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { of_either!(self, device => device.broadcast(words, num_words)) }
    }

    fn leave_ranks(&mut self) {
        of_either!(self, device => device.leave_ranks());
    }

    fn mark(&mut self, mark_idx: usize) -> Result<(), CudaError> {
        of_either!(self, device => device.mark(mark_idx))
    }

    fn has_passed(&mut self, mark_idx: usize) -> Result<bool, CudaError> {
        of_either!(self, device => device.has_passed(mark_idx))
    }

    fn wait_for(&mut self, mark_idx: usize) -> Result<(), CudaError> {
        of_either!(self, device => device.wait_for(mark_idx))
    }

    fn repeat(
        &mut self,
        key: u64,
        work: &mut dyn FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        match self {
            TestDevice::Emulated(device) => {
                device.begin_repeating(key);
                let done = work(self);
                if let TestDevice::Emulated(device) = self {
                    device.end_repeating();
                }
                done
            }
            TestDevice::Guarded(device) => {
                *device.repeated.entry(key).or_default() += 1;
                graphs::repeat(self, TestDevice::graphs, key, work)
            }
        }
    }
}

/// An NVIDIA device. Waiting for it checks the guards of all buffers.
pub struct GuardedDevice {
    driver: DriverDevice,
    buffers: Vec<(Address, usize)>,
    last_kernel: &'static str,
    /// Keys of repeated work, and how often each was repeated.
    repeated: HashMap<u64, usize>,
}

impl GuardedDevice {
    /// # Panics
    /// When the device that the environment names cannot be used.
    fn open(ordinal: u32, open: impl FnOnce(KernelCode) -> Result<DriverDevice, OpenError>) -> GuardedDevice {
        // Kept as long as the process lives, so that the driver initialises the device only once.
        static KEPT: OnceLock<baton_cuda::Device> = OnceLock::new();
        let awake = |error| panic!("BATON_KERNELS_ON=cuda:{ordinal}: {error}");
        KEPT.get_or_init(|| baton_cuda::Device::open(ordinal).unwrap_or_else(awake));
        let driver = open(kernel_code());
        let driver = driver.unwrap_or_else(|error| panic!("BATON_KERNELS_ON=cuda:{ordinal}: {error}"));
        GuardedDevice { driver, buffers: vec![], last_kernel: "none", repeated: HashMap::new() }
    }

    fn allocate(&mut self, num_bytes: usize) -> Result<Address, CudaError> {
        let size_bytes = num_bytes + 2 * GUARD_BYTES;
        let at = self.driver.allocate(size_bytes)?;
        // SAFETY: the allocation has this length.
        unsafe { self.driver.fill(at, POISON, size_bytes) }?;
        let at = at.offset_by(GUARD_BYTES);
        self.buffers.push((at, num_bytes));
        Ok(at)
    }

    /// Waits for all queued work.
    ///
    /// # Panics
    /// When a kernel wrote outside its buffers.
    fn check(&mut self) -> Result<(), CudaError> {
        let mut guard = [0; GUARD_BYTES];
        for &(at, num_bytes) in &self.buffers {
            for (place, from) in
                [("before", Address(at.0 - GUARD_BYTES as u64)), ("behind", at.offset_by(num_bytes))]
            {
                // SAFETY: the guard is part of the buffer's allocation.
                unsafe { self.driver.download(from, &mut guard) }?;
                let kernel = self.last_kernel;
                assert!(
                    guard.iter().all(|&byte| byte == POISON),
                    "something was written {place} a buffer of {num_bytes} bytes; the last kernel was {kernel}"
                );
            }
        }
        Ok(())
    }

    /// The contents of all buffers.
    fn contents(&mut self) -> Result<Vec<Vec<u8>>, CudaError> {
        let mut all = Vec::with_capacity(self.buffers.len());
        for &(at, num_bytes) in &self.buffers {
            let mut bytes = vec![0; num_bytes];
            // SAFETY: the buffers have these lengths.
            unsafe { self.driver.download(at, &mut bytes) }?;
            all.push(bytes);
        }
        Ok(all)
    }

    /// Runs a kernel twice on the same memory.
    ///
    /// # Errors
    /// When the device fails. Every later call then fails, too.
    ///
    /// # Panics
    /// When the results differ, or a kernel wrote outside its buffers.
    ///
    /// # Safety
    /// As for [`KernelDevice::launch`].
    unsafe fn launch_twice<K: Kernel>(&mut self, kernel: &K) -> Result<(), CudaError> {
        self.last_kernel = kernel.name();
        let before = self.contents()?;
        // SAFETY: the caller guarantees it.
        unsafe { self.driver.launch(kernel) }?;
        let after = self.contents()?;
        for (&(at, _), bytes) in self.buffers.iter().zip(&before) {
            // SAFETY: the buffers have these lengths.
            unsafe { self.driver.upload(at, bytes) }?;
        }
        // SAFETY: the caller guarantees it.
        unsafe { self.driver.launch(kernel) }?;
        assert!(self.contents()? == after, "{}: the result differs from run to run", kernel.name());
        self.check()
    }
}

/// The kernels of tests on a device. The cache of compiled ones is beside the test program, so that cleaning the build removes
/// it. `gpu-check --pack` installs kernels there, too: a machine with a GPU may have no NVRTC.
pub fn kernel_code() -> KernelCode {
    let program = std::env::current_exe().expect("this is a program");
    let cache_dir = program.parent().expect("in a folder").join("gpu-kernels");
    KernelCode { files: kernel_files(), cache_dir: Some(cache_dir), shipped: shipped::beside_program() }
}
