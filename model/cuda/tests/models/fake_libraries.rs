//! Steps and a block queue on fake CUDA libraries.

use baton_cuda_emulator::fake_libraries::{APART, run_own_tests};
use baton_model_cuda::multiply::FEW_ROWS;

use super::low_bit::MANY;

/// Steps that are launched ahead and become graphs, prompts, a blended one, a block queue, and products of every kind.
#[test]
fn a_strict_driver_accepts_all_calls() {
    let names = [
        "sampling::tokens_match_the_logits",
        "sampling::a_step_is_launched_before_the_last_one_is_collected",
        "blend::a_passage_with_nothing_before_it_is_reused_bit_for_bit",
        "block_queue::pieces_are_gathered_hashed_and_scattered",
        "block_queue::pieces_are_copied_to_another_pool",
        "low_bit::fp8_is_multiplied_with_any_scales",
        "multiply::widened_experts_are_multiplied_by_warpgroups",
        "whole::rows_take_the_experts_that_processors_choose",
    ];
    run_own_tests(&names, &[]);
}

#[test]
fn launches_can_be_kept_apart() {
    run_own_tests(&["sampling::tokens_match_the_logits"], &APART);
}

/// The trial at the opening of a device finds products in fp8. The library refuses those of some steps later.
#[test]
fn products_that_are_refused_later_do_not_fail_a_step() {
    let refused = format!("{},{MANY},{}", FEW_ROWS + 2, MANY + 3);
    run_own_tests(
        &["low_bit::fp8_is_multiplied_with_any_scales", "multiply::refused_fp8_products_are_widened"],
        &[("FAKE_REFUSED_ROWS", &refused)],
    );
}
