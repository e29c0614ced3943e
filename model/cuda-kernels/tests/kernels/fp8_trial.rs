//! The trial of E4M3 products finds what the device claims.

use baton_cuda_emulator::session::Threads;
use baton_cuda_emulator::test_device::TestDevice;
use baton_cuda_kernels::driver::fp8_trial::*;

#[test]
fn the_trial_finds_the_fp8_products_of_a_device() {
    for (products, scaling) in WAYS {
        let mut device = TestDevice::new(&[], 8 << 20, Threads::Shuffled);
        match device.limit_fp8(products) {
            true => assert!(multiplies(&mut device, scaling).unwrap(), "{scaling:?}"),
            false => println!("SKIPPED: the device does not multiply fp8 as {products:?}"),
        }
    }
}
