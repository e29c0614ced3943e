//! The trial of E4M3 products finds what the device claims.

use baton_cuda_emulator::session::Threads;
use baton_cuda_emulator::test_device::TestDevice;
use baton_cuda_kernels::device::{Fp8Products, KernelDevice};
use baton_cuda_kernels::driver::fp8_trial::*;

/// A device that refuses 71 rows. Products with scales of blocks have 72 instead.
#[test]
fn products_that_lack_some_rows_are_not_used() {
    let mut device = TestDevice::new(&[], 8 << 20, Threads::Shuffled);
    if !device.refuse_fp8(71) {
        return println!("SKIPPED: the device has them");
    }
    let emulated = device.limit_fp8(Fp8Products::Blocks);
    let found = WAYS.map(|(_, scaling)| emulated && multiplies(&mut device, scaling).unwrap());
    // The driver has tried them when it was opened.
    let expected = if emulated { [false, false, true] } else { [false; 3] };
    assert_eq!(
        (found, device.fp8_products()),
        (expected, if emulated { Fp8Products::Blocks } else { Fp8Products::None })
    );
}

/// cuBLASLt before CUDA 12.8 refuses scales when a product is described. The device opens all the same.
#[test]
fn an_old_library_multiplies_without_scales() {
    if std::env::var_os("FAKE_OLD_CUBLASLT").is_none() {
        return println!("SKIPPED: the library is not an old one");
    }
    let device = TestDevice::new(&[], 8 << 20, Threads::Shuffled);
    assert_eq!(device.fp8_products(), Fp8Products::Plain);
}

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
