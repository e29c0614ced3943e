//! Sequences of lower priority numbers come first, whenever they arrive.

use super::script::check;

#[test]
fn a_lower_number_is_admitted_first() {
    check(
        "
        pool blocks=32 block_size=4 running=1 budget=64
        add id=1 prompt=8 max=10
        add id=2 prompt=4 max=5 priority=1
        add id=3 prompt=4 max=5 priority=1
        add id=4 prompt=4 max=5
        add id=5 prompt=8 max=9 priority=-1
        # 1 has not begun, so 5 passes it. Among equal numbers the earlier one comes first.
        step
            admit 5
            5: 0..8 token
            end 5
        step
            admit 1
            1: 0..8 token
        add id=6 prompt=4 max=5 priority=-1
        # 1 keeps its slot.
        step
            1: 8..9 token
            end 1
        step
            admit 6
            6: 0..4 token
            end 6
        step
            admit 4
            4: 0..4 token
            end 4
        step
            admit 2
            2: 0..4 token
            end 2
        step
            admit 3
            3: 0..4 token
            end 3
        ",
    );
}

#[test]
fn a_prompt_of_a_lower_number_gets_the_budget_before_shorter_ones() {
    check(
        "
        pool blocks=64 block_size=4 running=4 budget=16
        add id=1 prompt=40 max=41
        step
            admit 1
            1: 0..16
        add id=2 prompt=8 max=9 priority=1
        add id=3 prompt=24 max=25 priority=-1
        step
            admit 3
            3: 0..16
        # 2 would pass 1, which has more left, if their numbers were equal.
        step
            3: 16..24 token
            1: 16..24
            end 3
        step
            1: 24..40 token
            end 1
        step
            admit 2
            2: 0..8 token
            end 2
        ",
    );
}

#[test]
fn the_youngest_of_the_greatest_number_is_preempted() {
    check(
        "
        pool blocks=9 block_size=4 running=4 budget=64
        add id=1 prompt=8 max=20 priority=1
        add id=2 prompt=8 max=20 priority=1
        add id=3 prompt=8 max=20
        step
            admit 3
            admit 1
            admit 2
            3: 0..8 token
            1: 0..8 token
            2: 0..8 token
        step
            3: 8..9 token
            1: 8..9 token
            2: 8..9 token
        step
            3: 9..10 token
            1: 9..10 token
            2: 9..10 token
        step
            3: 10..11 token
            1: 10..11 token
            2: 10..11 token
        step
            3: 11..12 token
            1: 11..12 token
            2: 11..12 token
        step
            preempt 2
            3: 12..13 token
            1: 12..13 token
        end id=1 priority=1
        add id=4 prompt=4 max=5
        # The newcomer comes before the one that was preempted.
        step
            admit 4
            3: 13..14 token
            4: 0..4 token
            end 4
        ",
    );
}
