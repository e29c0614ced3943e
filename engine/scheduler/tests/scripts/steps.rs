//! Chunks under a budget, and which sequences are in a step.

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
fn a_budget_below_a_block_still_makes_progress() {
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
fn as_many_short_prompts_are_admitted_as_fill_a_step_or_the_slots() {
    let of = |range: std::ops::RangeInclusive<u32>, line: &dyn Fn(u32) -> String| {
        range.map(line).collect::<String>()
    };
    let adds = of(1..=30, &|id| format!("add id={id} prompt=2 max=9\n"));
    for (budget, running, num_admitted) in [(50, 64, 25), (50, 20, 20), (8, 64, 4)] {
        let admitted = of(1..=num_admitted, &|id| format!("    admit {id}\n"));
        let chunks = of(1..=num_admitted, &|id| format!("    {id}: 0..2 token\n"));
        check(&format!(
            "pool blocks=64 block_size=4 running={running} budget={budget}\n{adds}step\n{admitted}{chunks}"
        ));
    }
}

#[test]
fn short_prompts_pass_long_ones_which_still_make_progress() {
    check(
        "
        pool blocks=64 block_size=4 running=8 budget=16
        add id=1 prompt=60 max=62
        step
            admit 1
            1: 0..16
        # 2 is as long as what 1 has left, and waits; 3 and 4 pass both, and a quarter is 1's.
        add id=2 prompt=44 max=46
        add id=3 prompt=10 max=12
        add id=4 prompt=4 max=5
        step
            admit 3
            admit 4
            1: 16..20
            3: 0..10 token
            4: 0..2
        step
            3: 10..11 token
            1: 20..32
            4: 2..4 token
            end 3
            end 4
        step
            1: 32..48
        step
            admit 2
            1: 48..60 token
            2: 0..4
        step
            1: 60..61 token
            2: 4..16
            end 1
        step
            2: 16..32
        ",
    );
}

#[test]
fn the_oldest_is_admitted_before_shorter_prompts() {
    check(
        "
        pool blocks=64 block_size=4 running=8 budget=16
        add id=1 prompt=12 max=13
        add id=2 prompt=60 max=62
        add id=3 prompt=12 max=13
        step
            admit 1
            admit 3
            1: 0..12 token
            3: 0..4
            end 1
        add id=4 prompt=12 max=13
        step
            admit 2
            admit 4
            2: 0..4
            3: 4..12 token
            4: 0..4
            end 3
        step
            2: 4..12
            4: 4..12 token
            end 4
        ",
    );
}

#[test]
fn no_sequence_passes_one_that_lacks_blocks() {
    check(
        "
        pool blocks=8 block_size=4 running=8 budget=8
        add id=1 prompt=16 max=17
        add id=2 prompt=20 max=21
        add id=3 prompt=4 max=5
        step
            admit 1
            1: 0..8
        step
            1: 8..16 token
            end 1
        step
            admit 2
            admit 3
            2: 0..4
            3: 0..4 token
            end 3
        step
            2: 4..12
        ",
    );
}

#[test]
fn slots_are_limited() {
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

#[test]
fn a_scored_prompt_leaves_the_rest_of_a_step_to_others() {
    check(
        "
        pool blocks=256 block_size=16 running=8 budget=512
        add id=1 prompt=1000 max=1001 scored=1
        add id=2 prompt=500 max=510
        step
            admit 1
            admit 2
            1: 0..64
            2: 0..448
        step
            1: 64..128
            2: 448..500 token
        # A scored prompt that comes later waits while nothing of it can be scored, and others pass it.
        add id=3 prompt=1000 max=1001 scored=1
        add id=4 prompt=20 max=21
        step
            admit 4
            2: 500..501 token
            1: 128..192
            4: 0..20 token
            end 4
        # A shorter one passes, but the oldest keeps a quarter of what a step scores.
        add id=5 prompt=50 max=51 scored=1
        step
            admit 5
            2: 501..502 token
            1: 192..208
            5: 0..48
        step
            2: 502..503 token
            1: 208..256
            5: 48..50 token
            end 5
        ",
    );
}

#[test]
fn short_scored_prompts_share_what_a_step_scores() {
    check(
        "
        pool blocks=256 block_size=16 running=16 budget=512
        add id=1 prompt=10 max=11 scored=1
        add id=2 prompt=10 max=11 scored=1
        add id=3 prompt=10 max=11 scored=1
        add id=4 prompt=10 max=11 scored=1
        step
            admit 1
            admit 2
            admit 3
            admit 4
            1: 0..10 token
            2: 0..10 token
            3: 0..10 token
            4: 0..10 token
            end 1
            end 2
            end 3
            end 4
        # After the last token of a prompt nothing is scored.
        add id=5 prompt=34 max=35 scored=1
        add id=6 prompt=31 max=32 scored=1
        add id=7 prompt=31 max=32 scored=1
        step
            admit 5
            admit 6
            admit 7
            5: 0..34 token
            6: 0..31 token
            7: 0..1
            end 5
            end 6
        step
            7: 1..31 token
            end 7
        ",
    );
}

#[test]
fn what_was_scored_before_a_preemption_does_not_limit_chunks() {
    check(
        "
        pool blocks=102 block_size=4 running=8 budget=128
        add id=1 prompt=4 max=40
        add id=2 prompt=400 max=401 scored=1
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..64
        step
            1: 4..5 token
            2: 64..128
        step
            1: 5..6 token
            2: 128..192
        step
            1: 6..7 token
            2: 192..256
        step
            1: 7..8 token
            2: 256..320
        step
            preempt 2
            1: 8..9 token
        end id=1
        step
            readmit 2
            2: 0..128
        step
            2: 128..256
        # 64 of them are scored.
        step
            2: 256..384
        step
            2: 384..400 token
            end 2
        ",
    );
}
