//! Graphs of repeated work, on a device.

use std::thread;

use baton_cuda::{Allocation, Copier, Device};
use baton_cuda_emulator::numbers::{bf16, widened};
use baton_cuda_emulator::test_device;
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::driver::DriverDevice;
use baton_cuda_kernels::rows::{self, AddBias};

/// The first run queues, the second one captures, the others replay.
const NUM_RUNS: usize = 3;

/// Another thread opens the device, allocates and copies meanwhile, as a transport does when a peer connects.
#[test]
fn a_capture_does_not_mind_other_threads() {
    let Some(ordinal) = test_device::ordinal() else {
        return println!("SKIPPED: BATON_KERNELS_ON names no device");
    };
    let mut device =
        DriverDevice::without_products(ordinal, &[rows::source()], test_device::kernel_code()).unwrap();
    let x = device.allocate_holding(&bf16(&[1.0; 8]).0).unwrap();
    let bias = device.allocate_holding(bytemuck::cast_slice(&[1.0f32; 8])).unwrap();
    let connect = || {
        let device = Device::open(ordinal).unwrap();
        let memory = Allocation::zeroed(&device, 64).unwrap();
        let mut bytes = [1; 64];
        // SAFETY: the memory has 64 bytes, and only this thread knows it.
        unsafe { Copier::new(&device, 64).unwrap().read(memory.address(), &mut bytes) }.unwrap();
        assert_eq!(bytes, [0; 64]);
    };
    for _ in 0..NUM_RUNS {
        let mut work = |device: &mut DriverDevice| {
            thread::scope(|scope| scope.spawn(connect).join()).unwrap();
            // SAFETY: the numbers and their biases live as long as the device.
            unsafe { device.launch(&AddBias { x, bias, width: 8, num_rows: 1 }) }
        };
        device.repeat(0, &mut work).unwrap();
    }
    let mut bytes = [0; 16];
    // SAFETY: these are eight numbers.
    unsafe { device.download(x, &mut bytes) }.unwrap();
    assert_eq!(widened(&bytes), [1.0 + NUM_RUNS as f32; 8]);
}
