//! Blocks that are held or reserved for a handoff.

use super::script::check;

#[test]
fn a_prefill_ends_with_its_blocks_held() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=64
        add id=1 prompt=10 max=20 role=prefill text=a
        step
            admit 1
            1: 0..10 token
            end 1
        state
            waiting 0 running 0 free 5
        # Held blocks are shared like any other.
        add id=2 prompt=10 max=20 role=prefill text=a
        step
            admit 2 cached 2
            2: 8..10 token
            end 2
        state
            waiting 0 running 0 free 4
        release id=1
        state
            waiting 0 running 0 free 5
        release id=2
        state
            waiting 0 running 0 free 8
        ",
    );
}

#[test]
fn a_hold_that_is_released_early_lets_the_prefill_end() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=4
        add id=1 prompt=8 max=20 role=prefill
        step
            admit 1
            1: 0..4
        release id=1
        step
            1: 4..8 token
            end 1
        state
            waiting 0 running 0 free 8
        ",
    );
}

#[test]
fn a_reservation_waits_its_turn_and_decodes_a_remote_prompt() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=64
        add id=1 prompt=11 max=16
        add id=2 prompt=9 max=12 role=decode text=a
        step
            admit 1
            1: 0..11 token
        step
            1: 11..12 token
        state
            waiting 1 running 1 free 3
        end id=1
        step
            admit 2
        state
            waiting 0 running 1 free 3
        step
            nothing
        decode id=2
        step
            2: 9..10 token
        # What arrived is in the prefix cache: only a tail is reserved for the next.
        add id=3 prompt=9 max=12 role=decode text=a
        step
            admit 3 cached 2
            2: 10..11 token
            end 2
        release id=3
        state
            waiting 0 running 0 free 6
        ",
    );
}

#[test]
fn a_reservation_without_its_slot_keeps_only_its_blocks() {
    check(
        "
        pool blocks=8 block_size=4 running=1 budget=64
        add id=1 prompt=8 max=20 role=decode
        add id=2 prompt=4 max=8
        step
            admit 1
        step
            nothing
        give_up_slot id=1
        state
            waiting 1 running 0 free 6
        step
            admit 2
            2: 0..4 token
        release id=1
        state
            waiting 0 running 1 free 7
        ",
    );
    // It does not grow, so no block is kept free for it.
    check(
        "
        pool blocks=4 block_size=4 running=4 budget=64
        add id=1 prompt=8 max=16 role=decode
        step
            admit 1
        add id=2 prompt=5 max=6
        step
            nothing
        give_up_slot id=1
        step
            admit 2
            2: 0..5 token
            end 2
        state
            waiting 0 running 0 free 2
        release id=1
        state
            waiting 0 running 0 free 4
        ",
    );
}
