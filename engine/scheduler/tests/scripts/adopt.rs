//! Blocks that come from outside while their prompt is computed.

use super::script::check;

#[test]
fn a_prompt_goes_on_behind_the_blocks_that_came_meanwhile() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=8
        add id=1 prompt=26 max=30 text=a
        step
            admit 1
            1: 0..8
        # It has a table of 7; two more are set aside.
        fetch id=9 text=a first=4 end=6
            cached before 0
        state
            waiting 0 running 1 free 7
        # Its own blocks return at once.
        release id=9
        step
            1: 8..16
        state
            waiting 0 running 1 free 9
        step
            adopt 1: 4..6
            1: 24..26 token
        step
            1: 26..27 token
        ",
    );
}

#[test]
fn what_came_before_the_prompt_was_admitted_is_adopted_too() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=8
        fetch id=8 text=a first=2 end=3
            cached before 0
        fetch id=9 text=a first=4 end=6
            cached before 0
        release id=8
        release id=9
        add id=1 prompt=26 max=30 text=a
        step
            admit 1
            1: 0..8
        step
            adopt 1: 2..3
            1: 12..16
        step
            adopt 1: 4..6
            1: 24..26 token
        ",
    );
}

#[test]
fn a_prefill_holds_what_it_adopted() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=4
        add id=1 prompt=13 max=30 text=a role=prefill
        step
            admit 1
            1: 0..4
        # Also what it computes next: its own block stays then. The last token is always computed.
        fetch id=9 text=a first=1 end=3
            cached before 0
        release id=9
        step
            adopt 1: 1..3
            1: 12..13 token
            end 1
        state
            waiting 0 running 0 free 12
        release id=1
        state
            waiting 0 running 0 free 16
        ",
    );
}

#[test]
fn a_block_that_is_half_computed_stays() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=6
        add id=1 prompt=14 max=30 text=a
        step
            admit 1
            1: 0..4
        add id=2 prompt=14 max=30 text=b priority=-1
        step
            admit 2
            2: 0..4
            1: 4..6
        fetch id=9 text=a first=0 end=3
            cached before 1
        release id=9
        step
            2: 4..8
            1: 6..8
        step
            adopt 1: 2..3
            2: 8..14 token
        ",
    );
}

#[test]
fn what_a_preempted_sequence_adopted_stays_cached() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=5
        add id=1 prompt=3 max=20
        step
            admit 1
            1: 0..3 token
        add id=2 prompt=17 max=20 text=b
        step
            admit 2
            1: 3..4 token
            2: 0..4
        fetch id=9 text=b first=3 end=4
            cached before 0
        release id=9
        step
            1: 4..5 token
            2: 4..8
        end id=1
        add id=3 prompt=2 max=28 priority=-1
        step
            admit 3
            3: 0..2 token
            2: 8..11
        step
            3: 2..3 token
            2: 11..12
        step
            adopt 2: 3..4
            3: 3..4 token
            2: 16..17 token
        ",
    );
}

#[test]
fn what_is_preempted_in_the_step_in_which_it_would_adopt_adopts_nothing() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=2
        fetch id=9 text=b first=2 end=3
            cached before 0
        release id=9
        add id=1 prompt=4 max=20
        step
            admit 1
            1: 0..2
        step
            1: 2..4 token
        add id=2 prompt=17 max=18 text=b
        step
            admit 2
            1: 4..5 token
            2: 0..1
        step
            1: 5..6 token
            2: 1..2
        step
            1: 6..7 token
            2: 2..3
        step
            1: 7..8 token
            2: 3..4
        step
            1: 8..9 token
            2: 4..5
        step
            1: 9..10 token
            2: 5..6
        step
            1: 10..11 token
            2: 6..7
        step
            1: 11..12 token
            2: 7..8
        # It has reached block 2, which it has; the other one needs a block first.
        step
            preempt 2
            1: 12..13 token
        ",
    );
}

#[test]
fn a_chunk_ends_before_blocks_that_are_on_their_way() {
    check(
        "
        pool blocks=20 block_size=4 running=4 budget=64
        expect id=8 text=a first=4
        expect id=9 text=b first=2
        add id=1 prompt=26 max=30 text=a
        step
            admit 1
            1: 0..16
        # It is not waited for, and what is behind it has come.
        fetch id=7 text=a first=5 end=6
            cached before 0
        step
            1: 16..20
        release id=7
        step
            adopt 1: 5..6
            1: 24..26 token
        end id=1
        # Nothing is expected any more.
        release id=9
        add id=2 prompt=26 max=30 text=b
        step
            admit 2
            2: 0..26 token
        ",
    );
}

/// The loader of a recalled sequence writes all its blocks after the first ones.
#[test]
fn a_recalled_sequence_adopts_nothing_while_its_blocks_are_written() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=64 recall=yes
        add id=1 prompt=8 max=33
        add id=2 prompt=13 max=30 text=b
        step
            admit 1
            admit 2
            1: 0..8 token
            2: 0..13 token
        step
            1: 8..9 token
            2: 13..14 token
        step
            1: 9..10 token
            2: 14..15 token
        step
            1: 10..11 token
            2: 15..16 token
        step
            1: 11..12 token
            2: 16..17 token
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
        step
            1: 17..18 token
        step
            1: 18..19 token
        step
            1: 19..20 token
        step
            1: 20..21 token
        step
            1: 21..22 token
        step
            1: 22..23 token
        step
            1: 23..24 token
        step
            1: 24..25 token
        step
            1: 25..26 token
        step
            1: 26..27 token
        step
            1: 27..28 token
        step
            1: 28..29 token
        end id=1
        fetch id=9 text=b first=1 end=2
            cached before 0
        release id=9
        step
            recall 2
        resume id=2 blocks=0
        step
            2: 0..18 token
        step
            2: 18..19 token
        ",
    );
}
