//! Which sequence is preempted when no block is left.

use super::script::check;

#[test]
fn the_youngest_is_preempted_and_comes_back_before_newcomers() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=64
        add id=1 prompt=8 max=20
        add id=2 prompt=7 max=20
        step
            admit 1
            admit 2
            1: 0..8 token
            2: 0..7 token
        step
            1: 8..9 token
            2: 7..8 token
        step
            1: 9..10 token
            2: 8..9 token
        add id=3 prompt=2 max=4
        step
            1: 10..11 token
            2: 9..10 token
        step
            1: 11..12 token
            2: 10..11 token
        # 1 needs its fourth block and takes those of 2. Nothing is admitted in that step.
        step
            preempt 2
            1: 12..13 token
        state
            waiting 2 running 1 free 2
        # The head, 2, is too large now, and 3 does not overtake it.
        step
            1: 13..14 token
        end id=1
        # Two of its blocks were still in the cache.
        step
            readmit 2 cached 2
            admit 3
            2: 8..12 token
            3: 0..2 token
        step
            2: 12..13 token
            3: 2..3 token
            end 3
        ",
    );
}

#[test]
fn a_sequence_without_a_younger_one_is_preempted_itself() {
    check(
        "
        pool blocks=4 block_size=4 running=4 budget=64
        add id=1 prompt=7 max=12
        add id=2 prompt=4 max=5 role=prefill
        step
            admit 1
            admit 2
            1: 0..7 token
            2: 0..4 token
            end 2
        step
            1: 7..8 token
        add id=3 prompt=4 max=5 role=prefill
        # A place for 3 would take the last block that 1 may need.
        step
            1: 8..9 token
        end id=1
        step
            admit 3
            3: 0..4 token
            end 3
        state
            waiting 0 running 0 free 2
        release id=2
        release id=3
        state
            waiting 0 running 0 free 4
        ",
    );
}

#[test]
fn a_running_prefill_is_not_preempted() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=2
        add id=1 prompt=3 max=20
        add id=2 prompt=16 max=20 role=prefill
        step
            admit 1
            1: 0..2
        step
            admit 2
            1: 2..3 token
            2: 0..1
        step
            1: 3..4 token
            2: 1..2
        step
            1: 4..5 token
            2: 2..3
        step
            1: 5..6 token
            2: 3..4
        step
            1: 6..7 token
            2: 4..5
        step
            1: 7..8 token
            2: 5..6
        # All other blocks are those of 2. A transfer may be reading them, though 2 is the youngest.
        step
            preempt 1
            2: 6..8
        ",
    );
}

#[test]
fn a_reservation_is_never_preempted_and_never_preempts() {
    check(
        "
        pool blocks=5 block_size=4 running=4 budget=64
        add id=1 prompt=4 max=20
        add id=2 prompt=4 max=8 role=decode
        step
            admit 1
            admit 2
            1: 0..4 token
        step
            1: 4..5 token
        step
            1: 5..6 token
        step
            1: 6..7 token
        step
            1: 7..8 token
        step
            1: 8..9 token
        step
            1: 9..10 token
        step
            1: 10..11 token
        step
            1: 11..12 token
        step
            1: 12..13 token
        step
            1: 13..14 token
        step
            1: 14..15 token
        step
            1: 15..16 token
        # Every block is its own or reserved: it waits for the reservation to end.
        step
            preempt 1
        step
            nothing
        release id=2
        step
            readmit 1 cached 4
            1: 16..17 token
        ",
    );
}

#[test]
fn a_preempted_remote_prompt_is_recomputed_here() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=8
        add id=1 prompt=8 max=20
        add id=2 prompt=7 max=15 role=decode
        step
            admit 1
            admit 2
            1: 0..8 token
        decode id=2
        step
            1: 8..9 token
            2: 7..8 token
        step
            1: 9..10 token
            2: 8..9 token
        step
            1: 10..11 token
            2: 9..10 token
        step
            1: 11..12 token
            2: 10..11 token
        step
            preempt 2
            1: 12..13 token
        end id=1
        step
            readmit 2 cached 2
            2: 8..12 token
        ",
    );
}

/// 1 takes the blocks of 2, and one of the two that were full is evicted.
const PREEMPTED: &str = "
    pool blocks=6 block_size=4 running=4 budget=64 recall=yes
    add id=1 prompt=8 max=20
    add id=2 prompt=7 max=20
    step
        admit 1
        admit 2
        1: 0..8 token
        2: 0..7 token
    step
        1: 8..9 token
        2: 7..8 token
    step
        1: 9..10 token
        2: 8..9 token
    step
        1: 10..11 token
        2: 9..10 token
    step
        1: 11..12 token
        2: 10..11 token
    step
        preempt 2
        1: 12..13 token
    step
        1: 13..14 token
    step
        1: 14..15 token
    step
        1: 15..16 token
    step
        1: 16..17 token
    end id=1
    # It has its blocks again, and computes nothing before they are loaded.
    step
        recall 2 cached 1
    step
        nothing
    state
        waiting 0 running 1 free 3
";

#[test]
fn a_preempted_sequence_is_computed_from_what_was_loaded() {
    for (num_blocks, start) in [(1, 4), (2, 8)] {
        check(&format!(
            "{PREEMPTED}
    resume id=2 blocks={num_blocks}
    step
        2: {start}..12 token
    step
        2: 12..13 token
"
        ));
    }
}

#[test]
fn blocks_that_are_being_loaded_stay_when_their_sequence_ends() {
    check(&format!(
        "{PREEMPTED}
    end id=2
    state
        waiting 0 running 0 free 3
    resume id=2 blocks=2
    state
        waiting 0 running 0 free 6
"
    ));
}
