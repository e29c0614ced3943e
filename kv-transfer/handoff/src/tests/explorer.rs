//! Every interleaving of a handoff: both machines, the stream between them, their engines and the data plane, as
//! [`exchange`](super::exchange) has them, with a bounded number of faults at any moments. What
//! `promises_hold_whatever_happens` samples for large handoffs, this exhausts for small ones.
//!
//! A depth-first search with a set of fingerprints of the states seen. That is all that a model checker would do
//! here: the promises are assertions that the world makes as it moves, and there is no temporal property beyond "it
//! ends", which is tried from every state.

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::exchange::{Event, Flaw, Sizes, World};

/// What is explored.
struct Bounds {
    sizes: Sizes,
    num_cached_blocks: usize,
    num_faults: usize,
}

/// The number of states; panics with the way to the first that breaks a promise.
fn explore(world: World, num_faults: usize) -> usize {
    // Fingerprints with the faults that are left: with more of them, more can follow.
    let mut seen = HashSet::from([(world.fingerprint(), num_faults)]);
    let mut open = vec![(world, num_faults, Vec::<(Event, usize)>::new())];
    while let Some((world, faults_left, way)) = open.pop() {
        let broken = |panic: Box<dyn std::any::Any + Send>| {
            let what = panic.downcast_ref::<String>().cloned();
            let what = what.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            panic!("{} after {way:?}", what.unwrap_or_default());
        };
        // From here, without another fault, it ends well.
        let mut rest = world.clone();
        let settles = catch_unwind(AssertUnwindSafe(|| {
            rest.settle();
            rest.check_end();
        }));
        settles.unwrap_or_else(broken);

        let orderly = world.enabled(false);
        let with_faults = world.enabled(true);
        for &event in &with_faults {
            let is_fault = !orderly.contains(&event);
            if is_fault && faults_left == 0 {
                continue;
            }
            for nth in 0..world.num_ways(event) {
                let mut next = world.clone();
                catch_unwind(AssertUnwindSafe(|| next.happen(event, nth))).unwrap_or_else(broken);
                let faults_left = faults_left - usize::from(is_fault);
                if seen.insert((next.fingerprint(), faults_left)) {
                    let way = way.iter().copied().chain([(event, nth)]).collect();
                    open.push((next, faults_left, way));
                }
            }
        }
    }
    seen.len()
}

#[test]
fn promises_hold_in_every_interleaving() {
    let bounds = [
        Bounds { sizes: Sizes::blocks(1), num_cached_blocks: 0, num_faults: 3 },
        Bounds { sizes: Sizes::blocks(1), num_cached_blocks: 1, num_faults: 2 },
        Bounds { sizes: Sizes::blocks(2), num_cached_blocks: 0, num_faults: 1 },
        Bounds { sizes: Sizes::blocks(2), num_cached_blocks: 1, num_faults: 2 },
        // One block here is two there.
        Bounds { sizes: sides(2, 1), num_cached_blocks: 0, num_faults: 1 },
        Bounds { sizes: sides(1, 2), num_cached_blocks: 0, num_faults: 2 },
        // What is cached: all of it, a part, nothing, and a part of what P's blocks cover.
        Bounds { sizes: cached(sides(1, 1), 2), num_cached_blocks: 1, num_faults: 2 },
        Bounds { sizes: cached(sides(1, 1), 1), num_cached_blocks: 0, num_faults: 3 },
        Bounds { sizes: cached(sides(1, 1), 0), num_cached_blocks: 0, num_faults: 3 },
        Bounds { sizes: cached(sides(2, 1), 1), num_cached_blocks: 0, num_faults: 2 },
    ];
    let mut total = 0;
    for Bounds { sizes, num_cached_blocks, num_faults } in bounds {
        for is_one_sided in [true, false] {
            let world = World::with(sizes, num_cached_blocks, 7, is_one_sided, None);
            let num_states = explore(world, num_faults);
            let writers = if is_one_sided { "one-sided" } else { "two-sided" };
            println!(
                "{num_states} states: {sizes:?}, {num_cached_blocks} cached, {num_faults} faults, {writers} writers"
            );
            total += num_states;
        }
    }
    println!("{total} states in all");
    // A change that makes the world smaller is noticed.
    assert!(total > 100_000, "{total} states are fewer than there were");
}

/// Two tokens, in blocks of these sizes.
fn sides(prefill_block_size: usize, decode_block_size: usize) -> Sizes {
    Sizes { num_tokens: 2, prefill_block_size, decode_block_size, cached: None }
}

/// The same, of which P has so many blocks cached, and only those are wanted.
fn cached(sizes: Sizes, num_blocks: usize) -> Sizes {
    Sizes { cached: Some(num_blocks), ..sizes }
}

/// What the search would say if the machines, or their drivers, broke a promise.
#[test]
fn every_flaw_is_found() {
    for (flaw, says) in [
        (Flaw::VerifiesNothing, "committed without verification"),
        (Flaw::ForgetsToRevoke, "blocks at the end"),
        (Flaw::RevokesTwice, "revoked once"),
        (Flaw::FreesBeforeTheFence, "late write into Released blocks"),
        (Flaw::ReleasesTwice, "released once"),
        (Flaw::SaysStoppedAtOnce, "Stopped was not true"),
        (Flaw::NeverTicks, "no end in sight"),
    ] {
        let world = World::with(Sizes::blocks(1), 0, 7, true, Some(flaw));
        let found = catch_unwind(AssertUnwindSafe(|| explore(world, 2)));
        let panic = found.expect_err("a flaw breaks a promise");
        let what = panic.downcast_ref::<String>().expect("said in words");
        assert!(what.contains(says), "{flaw:?}: {what}");
    }
}
