//! The driver behind the seam, on fake CUDA libraries.

use baton_cuda_emulator::fake_libraries::run_own_tests;

/// The trials at the opening of a device, products of every kind, the choice of their algorithms, and graphs, also with
/// NCCL's operations.
#[test]
fn a_strict_driver_accepts_all_calls() {
    let names = [
        "algorithms::chosen_algorithms_are_kept",
        "algorithms::fixed_products_have_the_same_bits_for_any_number_of_rows",
        "attention::warpgroup_attention_is_tested_on_the_device",
        "expert_products::warpgroup_products_of_experts_are_tested_on_the_device",
        "fp8_trial::the_trial_finds_the_fp8_products_of_a_device",
        "graphs::a_capture_does_not_mind_other_threads",
        "nccl::sums_are_a_part_of_graphs",
        "nccl::what_another_thread_queues_is_a_part_of_a_graph",
    ];
    run_own_tests(&names, &[]);
}

/// Without products of an odd number of rows, fp8 is not used.
#[test]
fn the_trial_meets_odd_numbers_of_rows() {
    run_own_tests(&["fp8_trial::products_that_lack_some_rows_are_not_used"], &[("FAKE_REFUSED_ROWS", "71")]);
}

#[test]
fn the_trial_meets_an_old_library() {
    run_own_tests(&["fp8_trial::an_old_library_multiplies_without_scales"], &[("FAKE_OLD_CUBLASLT", "1")]);
}
