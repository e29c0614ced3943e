//! Drafts: which tokens are accepted, and which blocks and budget they may take.

use super::script::check;

#[test]
fn a_draft_is_verified_in_one_step_up_to_its_first_wrong_token() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=16
        add id=1 prompt=6 max=30
        step
            admit 1
            1: 0..6 token
        draft id=1 right=3
        step
            1: 6..10 token draft 3 accepted 3
        draft id=1 right=1 wrong=3
        step
            1: 10..15 token draft 4 accepted 1
        draft id=1 wrong=2
        step
            1: 12..15 token draft 2 accepted 0
        step
            1: 13..14 token
        ",
    );
}

#[test]
fn blocks_of_rejected_tokens_return_after_the_step() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=16
        add id=1 prompt=4 max=30
        step
            admit 1
            1: 0..4 token
        state
            waiting 0 running 1 free 7
        draft id=1 wrong=8
        step
            1: 4..13 token draft 8 accepted 0
        # Its five tokens are computed; the next one needs no block yet.
        state
            waiting 0 running 1 free 6
        draft id=1 right=8
        step
            1: 5..14 token draft 8 accepted 8
        state
            waiting 0 running 1 free 4
        ",
    );
}

#[test]
fn accepted_tokens_are_cached_and_rejected_ones_never() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=32
        add id=1 prompt=6 max=20 text=a
        step
            admit 1
            1: 0..6 token
        draft id=1 right=2 wrong=6
        step
            1: 6..15 token draft 8 accepted 2
        end id=1
        # The first eight tokens of a text that continues like 1: six, and two that were accepted.
        add id=2 prompt=6 max=40 text=a output=4
        # And a text that continues like the rejected draft.
        add id=3 prompt=6 max=40 text=a output=2 wrong=6
        step
            admit 2 cached 2
            admit 3 cached 2
            2: 8..10 token
            3: 8..14 token
        ",
    );
}

#[test]
fn drafts_get_only_spare_budget_and_blocks() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=9
        add id=1 prompt=4 max=30
        add id=2 prompt=4 max=30
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..4 token
        # The budget is for 9: the second draft is cut.
        draft id=1 wrong=5
        draft id=2 wrong=5
        step
            1: 4..10 token draft 5 accepted 0
            2: 4..7 token draft 2 accepted 0
        # A prompt goes before drafts, and what is decoded as well.
        add id=3 prompt=6 max=8
        draft id=1 wrong=5
        step
            admit 3
            1: 5..7 token draft 1 accepted 0
            2: 5..6 token
            3: 0..6 token
        ",
    );
}

#[test]
fn a_draft_preempts_no_sequence_and_respects_the_length_of_its_own() {
    check(
        "
        pool blocks=4 block_size=4 running=4 budget=32
        add id=1 prompt=4 max=10
        add id=2 prompt=4 max=7
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..4 token
        # Each takes a block for the token it decodes; then there is none.
        draft id=1 right=9
        draft id=2 right=9
        step
            1: 4..8 token draft 3 accepted 3
            2: 4..6 token draft 1 accepted 1
            end 2
        ",
    );
}
