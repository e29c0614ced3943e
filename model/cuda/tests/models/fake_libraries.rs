//! Steps and a queue of its own, on fakes of CUDA's libraries.

use baton_cuda_emulator::fake_libraries::run_own_tests;

/// Steps that are launched ahead and become graphs, prompts, a queue of its own, and products of every kind.
#[test]
fn a_driver_is_talked_to_as_it_wants() {
    run_own_tests(&[
        "sampling::tokens_are_those_of_the_logits",
        "sampling::a_step_follows_another_before_that_is_collected",
        "block_queue::pieces_are_gathered_hashed_and_scattered",
        "low_bit::fp8_is_multiplied_with_any_scales",
    ]);
}
