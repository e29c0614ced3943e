//! What a kernel's test runs it with: buffers, launches, and what the buffers hold in the end.

use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::kernel::{Address, Kernel, KernelSource};

use crate::test_device::TestDevice;

/// Buffers and launches of a kernel's test: emulated, or on the device that [`test_device`](crate::test_device) names.
pub struct Emulator {
    device: TestDevice,
    buffers: Vec<(Address, usize)>,
}

/// What buffers hold in the end.
pub struct Memory {
    buffers: Vec<(Address, Vec<u8>)>,
}

impl Emulator {
    /// Compiles `source`, unless that has been done.
    pub fn new(source: KernelSource) -> Emulator {
        Emulator::of(&[source])
    }

    /// The same, for several.
    pub fn of(sources: &[KernelSource]) -> Emulator {
        Emulator { device: TestDevice::of_kernels(sources), buffers: vec![] }
    }

    /// Whether products of warpgroups can be asked for.
    pub fn has_wgmma(&self) -> bool {
        self.device.has_wgmma()
    }

    /// A buffer that holds `bytes`.
    pub fn buffer(&mut self, bytes: &[u8]) -> Address {
        let address = self.poisoned(bytes.len());
        // SAFETY: just allocated for them.
        unsafe { self.device.upload(address, bytes) }.expect("the device works");
        address
    }

    /// A buffer full of NaN.
    pub fn poisoned(&mut self, num_bytes: usize) -> Address {
        let address = self.device.allocate(num_bytes).expect("the device has memory for a test");
        self.buffers.push((address, num_bytes));
        address
    }

    /// Runs the kernel after those before it: twice, the second time with its threads in random order, with
    /// the same results.
    ///
    /// # Panics
    /// When it leaves its buffers, waits for a thread that does not come, or depends on the order of its threads: emulated, perhaps not before
    /// `run`.
    pub fn launch<K: Kernel>(&mut self, kernel: &K) {
        self.device.launch_twice(kernel);
    }

    /// Waits until all kernels have run.
    ///
    /// # Panics
    /// As `launch`.
    pub fn run(&mut self) -> Memory {
        let read = |&(address, num_bytes): &(Address, usize)| {
            let mut bytes = vec![0; num_bytes];
            // SAFETY: allocated so large.
            unsafe { self.device.download(address, &mut bytes) }.expect("the device works");
            (address, bytes)
        };
        Memory { buffers: self.buffers.iter().map(read).collect() }
    }
}

impl Memory {
    /// The buffer that `address` is in, from there on.
    pub fn of(&self, address: Address) -> &[u8] {
        let holds = |(first, bytes): &&(Address, Vec<u8>)| {
            (first.0..=first.0 + bytes.len() as u64).contains(&address.0)
        };
        let (first, bytes) = self.buffers.iter().find(holds).expect("an address of a buffer");
        &bytes[(address.0 - first.0) as usize..]
    }
}
