//! The driver behind the seam, on fake CUDA libraries.

use baton_cuda_emulator::fake_libraries::run_own_tests;

/// The trials at the opening of a device, and products of every kind.
#[test]
fn a_strict_driver_accepts_all_calls() {
    run_own_tests(&[
        "attention::warpgroup_attention_is_tested_on_the_device",
        "fp8_trial::the_trial_finds_the_fp8_products_of_a_device",
    ]);
}
