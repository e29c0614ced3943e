//! The driver behind the seam, on fake CUDA libraries.

use baton_cuda_emulator::fake_libraries::run_own_tests;

/// The trials at the opening of a device, and products of every kind.
#[test]
fn a_driver_is_talked_to_as_it_wants() {
    run_own_tests(&[
        "attention::a_device_that_multiplies_by_warpgroups_is_tried",
        "fp8_trial::what_a_device_says_that_it_can_it_can",
    ]);
}
