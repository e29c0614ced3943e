//! Random sequences of events, and assertions on the final state.

use proptest::prelude::*;

use super::{Blocks, Event, Sizes, World};

impl World {
    /// Runs the handoff to its end. Time passes when no other event is possible; there are no further faults.
    pub(in crate::tests) fn settle(&mut self) {
        for _ in 0..1000 {
            let event = match self.enabled(false).first() {
                Some(&event) => event,
                None if !self.decode.is_over() || !self.prefill.is_over() => Event::Time,
                None => {
                    // The last write has ended.
                    self.close_route();
                    return;
                }
            };
            self.apply(event, 0);
        }
        panic!("the handoff does not end");
    }

    pub(in crate::tests) fn check_end(&self) {
        assert_eq!(self.decode_outcomes.len(), 1, "one outcome at D");
        assert_eq!(self.decode_closes, 1);
        assert_eq!(self.prefill_outcomes.len(), 1, "one outcome at P");
        assert_eq!(self.prefill_closes, 1);
        assert_eq!(self.num_releases, self.num_computes, "P's blocks are released once");
        let is_good = self.decode_outcomes == [true];
        match self.blocks {
            Blocks::Committed => assert!(is_good && !self.is_done),
            Blocks::None | Blocks::Released => assert_eq!(is_good, self.is_done),
            Blocks::Granted | Blocks::Quarantined => panic!("{:?} blocks at the end", self.blocks),
        }
        assert!(is_good || self.prefill_outcomes == [false], "P reports success, D does not");
    }
}

fn play(sizes: Sizes, num_cached_blocks: usize, incarnation: u64, choices: &[(u16, u16)]) -> World {
    let mut world = World::new(sizes, num_cached_blocks, incarnation);
    for &(choice, nth) in choices {
        // One choice in 16 may be a fault.
        let events = world.enabled(choice % 16 == 0);
        if !events.is_empty() {
            world.apply(events[choice as usize / 16 % events.len()], nth as usize);
        }
    }
    world.settle();
    world.check_end();
    world
}

#[test]
fn without_faults_both_sides_succeed() {
    for num_blocks in 1..6 {
        for num_cached_blocks in 0..=num_blocks {
            let world = play(Sizes::blocks(num_blocks), num_cached_blocks, 7, &[]);
            assert_eq!(world.decode_outcomes, [true], "{num_blocks} blocks, {num_cached_blocks} cached");
            assert_eq!(world.prefill_outcomes, [true]);
        }
    }
}

#[test]
fn without_faults_sides_with_different_block_sizes_succeed() {
    for num_tokens in [1, 5, 8, 11] {
        for (prefill_block_size, decode_block_size) in [(1, 4), (4, 1), (2, 3), (3, 2), (16, 2)] {
            let sizes = Sizes { num_tokens, prefill_block_size, decode_block_size, cached: None };
            for num_cached_blocks in 0..=num_tokens.div_ceil(decode_block_size) {
                let world = play(sizes, num_cached_blocks, 7, &[]);
                assert_eq!(world.decode_outcomes, [true], "{sizes:?}, {num_cached_blocks} cached");
                assert_eq!(world.prefill_outcomes, [true]);
            }
        }
    }
}

#[test]
fn without_faults_a_cached_prefix_is_handed_over() {
    for num_tokens in [4, 12] {
        for (prefill_block_size, decode_block_size) in [(1, 4), (4, 1), (4, 4), (3, 2), (16, 2)] {
            for num_held in 0..=num_tokens / prefill_block_size {
                let sizes =
                    Sizes { num_tokens, prefill_block_size, decode_block_size, cached: Some(num_held) };
                for num_cached_blocks in 0..=num_tokens / decode_block_size {
                    let world = play(sizes, num_cached_blocks, 7, &[]);
                    let num_blocks = num_held * prefill_block_size / decode_block_size;
                    assert_eq!(world.decode_outcomes, [num_blocks > 0], "{sizes:?}");
                    if num_blocks > 0 {
                        assert_eq!(world.num_blocks, num_blocks, "{sizes:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_restarted_prefill_worker_is_not_mistaken_for_the_old_one() {
    let world = play(Sizes::blocks(3), 0, 6, &[]);
    assert_eq!(world.decode_outcomes, [false]);
    assert_eq!(world.num_computes, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn promises_hold_whatever_happens(
        num_tokens in 1usize..9,
        prefill_block_size in 1usize..5,
        decode_block_size in 1usize..5,
        num_cached_blocks in 0usize..5,
        num_held in proptest::option::weighted(0.3, 0usize..9),
        is_restarted in proptest::bool::weighted(0.02),
        choices in proptest::collection::vec(any::<(u16, u16)>(), 0..80),
    ) {
        let (num_tokens, cached) = match num_held {
            // Full blocks of either side.
            Some(num_held) => {
                (num_tokens * decode_block_size, Some(num_held.min(num_tokens * decode_block_size / prefill_block_size)))
            }
            None => (num_tokens, None),
        };
        let sizes = Sizes { num_tokens, prefill_block_size, decode_block_size, cached };
        play(sizes, num_cached_blocks, if is_restarted { 6 } else { 7 }, &choices);
    }
}
