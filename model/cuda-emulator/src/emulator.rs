//! The environment of a kernel test: buffers, launches, and the final contents of the buffers.

use baton_cuda_kernels::device::{KernelDevice, WgmmaKernels};
use baton_cuda_kernels::kernel::{Address, Kernel, KernelSource};

use crate::test_device::TestDevice;

/// Buffers and launches of a kernel test, emulated or on the device of [`test_device`](crate::test_device).
pub struct Emulator {
    device: TestDevice,
    buffers: Vec<(Address, usize)>,
}

/// The final contents of the buffers.
pub struct Memory {
    buffers: Vec<(Address, Vec<u8>)>,
}

impl Emulator {
    /// Compiles `source`, unless a compiled program is cached.
    pub fn new(source: KernelSource) -> Emulator {
        Emulator::of(&[source])
    }

    /// Like [`new`](Self::new), for several sources.
    pub fn of(sources: &[KernelSource]) -> Emulator {
        Emulator { device: TestDevice::of_kernels(sources), buffers: vec![] }
    }

    /// Which kernels with warpgroup products are available.
    pub fn wgmma(&self) -> WgmmaKernels {
        self.device.wgmma()
    }

    /// A buffer that holds `bytes`.
    pub fn buffer(&mut self, bytes: &[u8]) -> Address {
        let address = self.poisoned(bytes.len());
        // SAFETY: the allocation has this length.
        unsafe { self.device.upload(address, bytes) }.expect("the device works");
        address
    }

    /// A buffer full of NaN.
    pub fn poisoned(&mut self, num_bytes: usize) -> Address {
        let address = self.device.allocate(num_bytes).expect("the device has memory for a test");
        self.buffers.push((address, num_bytes));
        address
    }

    /// Runs a kernel twice, the second time with its threads in random order, and compares the results.
    ///
    /// # Panics
    /// When the kernel leaves its buffers, waits for a thread that never arrives, or depends on the order of its
    /// threads. The emulator may report it only at `run`.
    pub fn launch<K: Kernel>(&mut self, kernel: &K) {
        self.device.launch_twice(kernel);
    }

    /// Waits until all kernels have run.
    ///
    /// # Panics
    /// As for `launch`.
    pub fn run(&mut self) -> Memory {
        let read = |&(address, num_bytes): &(Address, usize)| {
            let mut bytes = vec![0; num_bytes];
            // SAFETY: the buffers have these lengths.
            unsafe { self.device.download(address, &mut bytes) }.expect("the device works");
            (address, bytes)
        };
        Memory { buffers: self.buffers.iter().map(read).collect() }
    }
}

impl Memory {
    /// The bytes of a buffer from `address` on.
    pub fn of(&self, address: Address) -> &[u8] {
        let holds = |(first, bytes): &&(Address, Vec<u8>)| {
            (first.0..=first.0 + bytes.len() as u64).contains(&address.0)
        };
        let (first, bytes) = self.buffers.iter().find(holds).expect("an address of a buffer");
        &bytes[(address.0 - first.0) as usize..]
    }
}
