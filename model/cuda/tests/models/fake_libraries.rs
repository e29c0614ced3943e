//! Steps and a block queue on fake CUDA libraries.

use baton_cuda_emulator::fake_libraries::run_own_tests;

/// Steps that are launched ahead and become graphs, prompts, a block queue, and products of every kind.
#[test]
fn a_strict_driver_accepts_all_calls() {
    run_own_tests(&[
        "sampling::tokens_match_the_logits",
        "sampling::a_step_is_launched_before_the_last_one_is_collected",
        "block_queue::pieces_are_gathered_hashed_and_scattered",
        "low_bit::fp8_is_multiplied_with_any_scales",
    ]);
}
