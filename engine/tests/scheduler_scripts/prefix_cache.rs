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
