//! Every interleaving of a small handoff, with a bounded number of faults at any times: both machines, the stream between them,
//! their engines and the data plane, as modelled in [`exchange`](super::exchange). `promises_hold_whatever_happens` samples
//! interleavings of larger handoffs.
//!
//! It is a depth-first search with a set of fingerprints of visited states. The model asserts the promises at each step. The
//! only temporal property is that a handoff ends, which is checked from every state. So no model checker is needed.

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicUsize, Ordering},
};

use super::exchange::{Event, Flaw, Sizes, World};

/// One exploration.
#[derive(Clone, Copy)]
struct Bounds {
    sizes: Sizes,
    num_cached_blocks: usize,
    num_faults: usize,
}

/// Returns the number of states. Panics with the path to the first state that breaks a promise.
fn explore(world: World, num_faults: usize) -> usize {
    // Fingerprints with the number of faults left: with more faults left, more states can follow.
    let mut seen = HashSet::from([(world.fingerprint(), num_faults)]);
    let mut open = vec![(world, num_faults, Vec::<(Event, usize)>::new())];
    while let Some((world, faults_left, path)) = open.pop() {
        let broken = |panic: Box<dyn std::any::Any + Send>| {
            let what = panic.downcast_ref::<String>().cloned();
            let what = what.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            panic!("{} after {path:?}", what.unwrap_or_default());
        };
        // Without further faults, the handoff ends from here as promised.
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
            for nth in 0..world.num_variants(event) {
                let mut next = world.clone();
                catch_unwind(AssertUnwindSafe(|| next.apply(event, nth))).unwrap_or_else(broken);
                let faults_left = faults_left - usize::from(is_fault);
                if seen.insert((next.fingerprint(), faults_left)) {
                    let path = path.iter().copied().chain([(event, nth)]).collect();
                    open.push((next, faults_left, path));
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
        // One block of one side is two blocks of the other.
        Bounds { sizes: sides(2, 1), num_cached_blocks: 0, num_faults: 1 },
        Bounds { sizes: sides(1, 2), num_cached_blocks: 0, num_faults: 2 },
        // Prefix fetches: P holds all, a part, nothing, and a part of one of its larger blocks.
        Bounds { sizes: cached(sides(1, 1), 2), num_cached_blocks: 1, num_faults: 2 },
        Bounds { sizes: cached(sides(1, 1), 1), num_cached_blocks: 0, num_faults: 3 },
        Bounds { sizes: cached(sides(1, 1), 0), num_cached_blocks: 0, num_faults: 3 },
        Bounds { sizes: cached(sides(2, 1), 1), num_cached_blocks: 0, num_faults: 2 },
    ];
    let explorations: Vec<(Bounds, bool)> = bounds
        .into_iter()
        .flat_map(|bounds| [true, false].map(|is_one_sided| (bounds, is_one_sided)))
        .collect();
    let (next, total) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let explore_the_rest = || {
        while let Some(&(bounds, is_one_sided)) = explorations.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Bounds { sizes, num_cached_blocks, num_faults } = bounds;
            let world = World::with(sizes, num_cached_blocks, 7, is_one_sided, None);
            let num_states = explore(world, num_faults);
            let writers = if is_one_sided { "one-sided" } else { "two-sided" };
            println!(
                "{num_states} states: {sizes:?}, {num_cached_blocks} cached, {num_faults} faults, {writers} writers"
            );
            total.fetch_add(num_states, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(explore_the_rest);
        }
    });
    let total = total.into_inner();
    println!("{total} states in all");
    // Fails if a change makes the model smaller.
    assert!(total > 100_000, "only {total} states: the model has become smaller");
}

/// Two tokens, in blocks of these sizes.
fn sides(prefill_block_size: usize, decode_block_size: usize) -> Sizes {
    Sizes { num_tokens: 2, prefill_block_size, decode_block_size, cached: None }
}

/// The same for a prefix fetch: P has `num_blocks` blocks cached.
fn cached(sizes: Sizes, num_blocks: usize) -> Sizes {
    Sizes { cached: Some(num_blocks), ..sizes }
}

/// The search finds each flaw of the machines or their drivers.
#[test]
fn every_flaw_is_found() {
    for (flaw, says) in [
        (Flaw::VerifiesNothing, "committed without verification"),
        (Flaw::ForgetsToRevoke, "blocks at the end"),
        (Flaw::RevokesTwice, "revoked once"),
        (Flaw::FreesBeforeTheFence, "late write into Released blocks"),
        (Flaw::ReleasesTwice, "released once"),
        (Flaw::SaysStoppedAtOnce, "Stopped was not true"),
        (Flaw::NeverTicks, "the handoff does not end"),
    ] {
        let world = World::with(Sizes::blocks(1), 0, 7, true, Some(flaw));
        let found = catch_unwind(AssertUnwindSafe(|| explore(world, 2)));
        let panic = found.expect_err("a flaw breaks a promise");
        let what = panic.downcast_ref::<String>().expect("a message");
        assert!(what.contains(says), "{flaw:?}: {what}");
    }
}
