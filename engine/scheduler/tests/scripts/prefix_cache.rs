//! Which blocks the prefix cache holds, and for how long.

use super::script::check;

#[test]
fn a_common_prefix_is_computed_once_and_its_last_token_always() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=64
        add id=1 prompt=12 max=14 text=a
        step
            admit 1
            1: 0..12 token
        add id=2 prompt=12 max=14 text=a
        add id=3 prompt=13 max=14 text=a
        add id=4 prompt=12 max=14 text=b
        step
            admit 2 cached 2
            admit 3 cached 3
            admit 4
            1: 12..13 token
            2: 8..12 token
            3: 12..13 token
            4: 0..12 token
            end 1
            end 3
        ",
    );
}

#[test]
fn what_is_cached_is_no_work_of_the_queue() {
    check(
        "
        pool blocks=16 block_size=4 running=1 budget=64
        add id=1 prompt=12 max=14 text=a
        step
            admit 1
            1: 0..12 token
        # The last four of its tokens, and all twelve.
        add id=2 prompt=12 max=14 text=a
        add id=3 prompt=12 max=14 text=b
        queued
            tokens 16 pairs 120 blocks 8
        # It computes none of them here.
        add id=4 prompt=12 max=14 text=c role=decode
        queued
            tokens 16 pairs 120 blocks 12
        ",
    );
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
        step
            1: 10..11 token
            2: 9..10 token
        step
            1: 11..12 token
            2: 10..11 token
        step
            preempt 2
            1: 12..13 token
        queued
            tokens 4 pairs 42 blocks 4
        ",
    );
}

#[test]
fn cached_blocks_are_reused_last_of_all_and_the_oldest_release_first() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=64
        add id=1 prompt=9 max=10 text=a
        add id=2 prompt=9 max=10 text=b
        step
            admit 1
            admit 2
            1: 0..9 token
            2: 0..9 token
            end 1
            end 2
        state
            waiting 0 running 0 free 6
        # Needs three blocks: the two that hold nothing, and the tail of a.
        add id=3 prompt=9 max=10 text=c
        step
            admit 3
            3: 0..9 token
            end 3
        add id=4 prompt=9 max=10 text=a
        step
            admit 4 cached 1
            4: 4..9 token
            end 4
        add id=5 prompt=9 max=10 text=c
        step
            admit 5 cached 2
            5: 8..9 token
            end 5
        ",
    );
}

#[test]
fn a_kept_prefix_stays_longer_than_newer_prompts_until_its_time_is_over() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=64
        # Two of its blocks are full of tokens that are to be kept.
        add id=1 prompt=13 max=14 text=a keep=11 ttl=60
        step
            admit 1
            1: 0..13 token
            end 1
        add id=2 prompt=9 max=10 text=b
        step
            admit 2
            2: 0..9 token
            end 2
        time now=59
        add id=3 prompt=9 max=10 text=c
        step
            admit 3
            3: 0..9 token
            end 3
        # A use without a wish lowers nothing and renews nothing.
        add id=4 prompt=13 max=14 text=a
        step
            admit 4 cached 2
            4: 8..13 token
            end 4
        add id=5 prompt=13 max=14 text=d
        step
            admit 5
            5: 0..13 token
            end 5
        time now=60
        add id=6 prompt=17 max=18 text=e
        step
            admit 6
            6: 0..17 token
            end 6
        add id=7 prompt=13 max=14 text=a
        step
            admit 7
            7: 0..13 token
            end 7
        ",
    );
}

#[test]
fn a_prompt_that_comes_once_goes_before_older_ones() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=64
        add id=1 prompt=9 max=10 text=a
        step
            admit 1
            1: 0..9 token
            end 1
        add id=2 prompt=9 max=10 text=b rest=low
        step
            admit 2
            2: 0..9 token
            end 2
        add id=3 prompt=13 max=14 text=c rest=low
        step
            admit 3
            3: 0..13 token
            end 3
        add id=4 prompt=13 max=14 text=d rest=low
        step
            admit 4
            4: 0..13 token
            end 4
        add id=5 prompt=9 max=10 text=a
        step
            admit 5 cached 2
            5: 8..9 token
            end 5
        # Another request wants it as ever: it is not low any more.
        add id=6 prompt=13 max=14 text=d
        step
            admit 6 cached 3
            6: 12..13 token
            end 6
        add id=7 prompt=9 max=10 text=e
        step
            admit 7
            7: 0..9 token
            end 7
        add id=8 prompt=13 max=14 text=d
        step
            admit 8 cached 3
            8: 12..13 token
            end 8
        ",
    );
}
