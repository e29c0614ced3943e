//! Lookups and memory of an index of a thousand workers. Prints percentiles of single lookups: a mean would hide what waits.
//!
//! `cargo bench -p baton-kv-index --bench index`; with `-- soak 1000000000` so many stored and removed blocks, and the memory
//! meanwhile. Exits with 1 if a number misses its bound; not where `cargo test --benches` runs it, without optimisations.

use std::{
    hint::black_box,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockHash, HashRoot};
use baton_kv_index::{
    BatchKind, BlockKey, CacheEvent, CacheFeed, EventBatch, Holder, KvIndex, LookupScratch,
};

const NUM_WORKERS: usize = 1000;
const BLOCK_SIZE: usize = 16;
/// 2,000 tokens that all workers hold.
const SYSTEM: usize = 125;
/// 128k tokens.
const LONG: usize = 8192;
const NUM_LOOKUPS: usize = 5000;
/// What the p99 of a lookup of [`LONG`] blocks is at most, in microseconds.
const WANTED_LOOKUP_US: f64 = 50.0;
/// The same, and the hashing of the prompt.
const WANTED_HASHED_US: f64 = 5000.0;
const WANTED_BYTES_PER_MEMBERSHIP: f64 = 100.0;
/// The most memory later in the soak, by that after a tenth of it.
const WANTED_GROWTH: f64 = 1.1;

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn key(hash: BlockHash) -> BlockKey {
    BlockKey(hash.short())
}

fn store(feed: &mut CacheFeed, parent: Option<BlockKey>, blocks: &[BlockKey]) {
    let first = feed.resume_from().unwrap_or(0);
    let events = vec![CacheEvent::stored(parent, blocks.to_vec())];
    feed.take(&EventBatch { first, events, kind: BatchKind::Events }).expect("it follows and fits");
}

/// A number that has a bound.
struct Bounded {
    name: String,
    unit: &'static str,
    found: f64,
    /// The most that it may be.
    wanted: f64,
    /// What it was with an earlier form of the index, on another machine (docs/benchmarks/2026-11-23-index.md).
    before: Option<f64>,
}

impl Bounded {
    fn holds(&self) -> bool {
        self.found <= self.wanted
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let mut bounded: Vec<Bounded> = Vec::new();
    if let Some(place) = args.iter().position(|arg| arg == "soak") {
        let num_ops = args.get(place + 1).and_then(|num| num.parse().ok()).unwrap_or(100_000_000);
        bounded.push(soak(num_ops));
    } else {
        bounded.extend(lookups("a few workers hold parts of the prompt", 5.0, |state, owner| {
            (owner % 125 == 0).then(|| SYSTEM + (random(state) as usize) % (LONG - SYSTEM))
        }));
        bounded.extend(lookups("no worker holds more than the system prompt", 3.0, |_, _| None));
        bounded.extend(lookups("every worker holds a part of another length", 780.0, |state, _| {
            Some(SYSTEM + (random(state) as usize) % (LONG - SYSTEM))
        }));
        bounded.push(memory());
    }
    println!();
    for number in &bounded {
        let Bounded { name, unit, found, wanted, before } = number;
        let before = before.map_or_else(|| "not measured".to_owned(), |before| format!("{before} {unit}"));
        let verdict = if number.holds() { "holds" } else { "MISSED" };
        println!(
            "{name}: found {found:.2} {unit}, wanted at most {wanted} {unit}, before {before}: {verdict}"
        );
    }
    // Only `cargo bench` passes it.
    let is_checked = args.iter().any(|arg| arg == "--bench");
    if !is_checked || bounded.iter().all(Bounded::holds) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Lookups of prompts of 128k tokens, of which each worker holds as much as `held` says beside the system prompt, and
/// 9,000 blocks of its own. `before_us` is what the p99 was with one set of holders for each block. Returns the p99 without
/// and with hashing.
fn lookups(
    name: &str,
    before_us: f64,
    mut held: impl FnMut(&mut u64, usize) -> Option<usize>,
) -> [Bounded; 2] {
    let index = Arc::new(KvIndex::new(2 * NUM_WORKERS));
    let root = HashRoot::new("r", "", "");
    let system: Vec<u32> = (0..(SYSTEM * BLOCK_SIZE) as u32).collect();
    let tokens = |prompt: u32| {
        let rest = (0..((LONG - SYSTEM) * BLOCK_SIZE) as u32).map(|token| token.wrapping_mul(prompt + 7));
        system.iter().copied().chain(rest).collect::<Vec<u32>>()
    };
    let prompts: Vec<Vec<u32>> = (0..10).map(tokens).collect();
    let chains: Vec<Vec<BlockHash>> =
        prompts.iter().map(|prompt| root.block_hashes(prompt, BLOCK_SIZE).collect()).collect();
    let mut state = 5;
    let feeds: Vec<CacheFeed> = (0..NUM_WORKERS)
        .map(|owner| {
            let mut feed = CacheFeed::new(index.clone(), owner as u32, 100_000);
            let chain: Vec<BlockKey> = chains[owner % chains.len()].iter().copied().map(key).collect();
            store(&mut feed, None, &chain[..SYSTEM]);
            for (idx, chain) in chains.iter().enumerate() {
                if let Some(num) = held(&mut state, owner + idx) {
                    let chain: Vec<BlockKey> = chain[..num].iter().copied().map(key).collect();
                    store(&mut feed, None, &chain);
                }
            }
            let own: Vec<BlockKey> = (0..9000).map(|_| BlockKey(random(&mut state))).collect();
            store(&mut feed, Some(chain[SYSTEM - 1]), &own);
            feed
        })
        .collect();
    let (mut scratch, mut holders) = (LookupScratch::default(), Vec::<Holder>::new());
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for idx in 0..NUM_LOOKUPS {
        let chain = &chains[idx % chains.len()];
        let started = Instant::now();
        index.lookup_into(chain, key, &mut scratch, &mut holders);
        without.push(started.elapsed());
        assert_eq!(holders.len(), NUM_WORKERS);
    }
    for idx in 0..NUM_LOOKUPS / 50 {
        let started = Instant::now();
        let chain: Vec<BlockHash> = root.block_hashes(&prompts[idx % prompts.len()], BLOCK_SIZE).collect();
        black_box(index.lookup(&chain, key));
        with.push(started.elapsed());
    }
    drop(feeds);
    let bounded = |what: &str, mut times: Vec<Duration>, wanted: f64, before: Option<f64>| {
        times.sort_unstable();
        let us = |part: usize| times[times.len() * part / 1000].as_secs_f64() * 1e6;
        let name = format!("128k tokens, {name}, {what}");
        println!("{name}: p50 {:.1} us, p99 {:.1} us", us(500), us(990));
        Bounded { name: format!("{name}, p99"), unit: "us", found: us(990), wanted, before }
    };
    [
        bounded("without hashing", without, WANTED_LOOKUP_US, Some(before_us)),
        bounded("with hashing", with, WANTED_HASHED_US, None),
    ]
}

/// Ten million memberships: the system prompt, and blocks of each worker's own. Returns the most bytes that one took on
/// the way there.
fn memory() -> Bounded {
    let index = Arc::new(KvIndex::new(2 * NUM_WORKERS));
    let mut state = 9;
    let system: Vec<BlockKey> = (0..SYSTEM).map(|_| BlockKey(random(&mut state))).collect();
    let mut most = 0.0_f64;
    let started = Instant::now();
    let mut feeds = Vec::new();
    for owner in 0..NUM_WORKERS {
        let mut feed = CacheFeed::new(index.clone(), owner as u32, 20_000);
        store(&mut feed, None, &system);
        let mut parent = system.last().copied();
        for _ in 0..100 {
            let blocks: Vec<BlockKey> = (0..100).map(|_| BlockKey(random(&mut state))).collect();
            store(&mut feed, parent, &blocks);
            parent = blocks.last().copied();
        }
        feeds.push(feed);
        if owner >= 100 {
            let size = index.size();
            most = most.max(size.num_bytes as f64 / size.num_memberships as f64);
        }
    }
    let (size, elapsed) = (index.size(), started.elapsed().as_secs_f64());
    println!(
        "{} memberships: {:.1} bytes each, {most:.1} at most on the way; {:.2} M stored blocks/s on one thread",
        size.num_memberships,
        size.num_bytes as f64 / size.num_memberships as f64,
        size.num_memberships as f64 / elapsed / 1e6
    );
    Bounded {
        name: format!("{} memberships, at most on the way", size.num_memberships),
        unit: "bytes each",
        found: most,
        wanted: WANTED_BYTES_PER_MEMBERSHIP,
        before: Some(70.9),
    }
}

/// Stores and removes so many blocks in all, at ten workers that hold 20,000 each. Returns how far the memory grew after the
/// first tenth.
fn soak(num_ops: u64) -> Bounded {
    let index = Arc::new(KvIndex::new(20));
    let mut feeds: Vec<CacheFeed> =
        (0..10).map(|owner| CacheFeed::new(index.clone(), owner, 21_000)).collect();
    let runs = |round: u64| {
        let mut state = round;
        (0..1000).map(|_| BlockKey(random(&mut state))).collect::<Vec<_>>()
    };
    let (mut done, mut round, mut first_bytes, mut growth) = (0, 0_u64, 0, 1.0_f64);
    let started = Instant::now();
    while done < num_ops {
        for feed in &mut feeds {
            // Every worker stores the same, and evicts it 20 rounds later.
            store(feed, None, &runs(round));
            done += 1000;
            if round >= 20 {
                let blocks: Vec<BlockKey> = runs(round - 20).into_iter().rev().collect();
                let first = feed.resume_from().unwrap_or(0);
                let events = vec![CacheEvent::removed(blocks)];
                feed.take(&EventBatch { first, events, kind: BatchKind::Events }).expect("it follows");
                done += 1000;
            }
        }
        round += 1;
        if round % (num_ops / 20_000 / 10).max(1) == 0 {
            let size = index.size();
            if first_bytes == 0 {
                first_bytes = size.num_bytes;
            }
            println!(
                "{done} block operations, {:.0} s: {} memberships, {} bytes",
                started.elapsed().as_secs_f64(),
                size.num_memberships,
                size.num_bytes
            );
            growth = growth.max(size.num_bytes as f64 / first_bytes as f64);
        }
    }
    Bounded {
        name: format!("memory after {done} block operations"),
        unit: "of that after a tenth",
        found: growth,
        wanted: WANTED_GROWTH,
        before: None,
    }
}
