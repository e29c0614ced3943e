//! Chunks under a budget, and who is in a step.

use super::script::check;

#[test]
fn a_prompt_is_computed_in_block_aligned_chunks_then_decodes() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=10
        add id=1 prompt=23 max=26
        step
            admit 1
            1: 0..8
        step
            1: 8..16
        step
            1: 16..23 token
        step
            1: 23..24 token
        step
            1: 24..25 token
            end 1
        state
            waiting 0 running 0 free 16
        ",
    );
}

#[test]
fn a_budget_below_a_block_still_moves() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=3
        add id=1 prompt=7 max=9
        step
            admit 1
            1: 0..3
        step
            1: 3..4
        step
            1: 4..7 token
        step
            1: 7..8 token
            end 1
        ",
    );
}

#[test]
fn decodes_come_before_prompts_and_prompts_share_what_is_left() {
    check(
        "
        pool blocks=64 block_size=4 running=4 budget=12
        add id=1 prompt=4 max=20
        add id=2 prompt=8 max=20
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..8 token
        add id=3 prompt=20 max=30
        add id=4 prompt=2 max=30
        # 3 stops at a block boundary; two tokens of the budget are left, enough for 4.
        step
            admit 3
            admit 4
            1: 4..5 token
            2: 8..9 token
            3: 0..8
            4: 0..2 token
        step
            1: 5..6 token
            2: 9..10 token
            4: 2..3 token
            3: 8..16
        step
            1: 6..7 token
            2: 10..11 token
            4: 3..4 token
            3: 16..20 token
        ",
    );
}

#[test]
fn places_are_limited() {
    check(
        "
        pool blocks=64 block_size=4 running=2 budget=32
        add id=1 prompt=4 max=6
        add id=2 prompt=4 max=20
        add id=3 prompt=4 max=20
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..4 token
        step
            1: 4..5 token
            2: 4..5 token
            end 1
        step
            admit 3
            2: 5..6 token
            3: 0..4 token
        ",
    );
}
