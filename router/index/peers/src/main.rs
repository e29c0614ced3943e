//! The index beside those of the crate `dynamo-kv-router`: the same events until the last one is applied, then the same
//! lookups. Prints one line for each index and number of threads.
//!
//! `cargo run --release -- [workers] [blocks of a pool] [rounds]`, by default 1000, 4096 and 3. The best round counts. Exits
//! with 1 if the best of ours is below [`WANTED`] times the best of theirs. `ONLY` names the beginning of those that run;
//! without any of ours or of theirs nothing is checked.

mod load;

use std::{
    hint::black_box,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_kv_index::{BatchKind, CacheEvent, CacheFeed, EventBatch, KvIndex, LookupScratch};
use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, PositionalIndexer, RadixTree,
    indexer::{KvIndexerInterface, SyncIndexer, ThreadPoolIndexer},
    protocols::{
        ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
        KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
    },
};

use crate::load::{Change, Load};

/// Block operations and lookups per second of the best of ours, by those of the best of theirs.
const WANTED: f64 = 2.0;

/// What one run took.
struct Measured {
    apply: Duration,
    lookup: Duration,
    /// Of the lookups, sorted.
    each: Vec<Duration>,
    /// Blocks found, over all workers and lookups: the same for all indexes.
    num_found: u64,
    /// Resident memory that was added by the events.
    num_bytes: u64,
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().expect("a number"));
    let num_workers = args.next().unwrap_or(1000);
    let pool = args.next().unwrap_or(4096);
    let num_rounds = args.next().unwrap_or(3);
    let load = Load::new(num_workers, pool);
    println!(
        "{num_workers} workers with {pool} blocks; {} events, {} block operations, {} memberships at the end; {} lookups of {} blocks on average",
        load.changes.len(),
        load.num_block_ops,
        load.num_held,
        load.prompts.len(),
        load.prompts.iter().map(|prompt| prompt.len()).sum::<usize>() / load.prompts.len()
    );
    type Run = (&'static str, Box<dyn Fn(&Load) -> Measured>);
    let mut runs: Vec<Run> = Vec::new();
    for num_threads in [1, 2] {
        let name = ["baton, 1 thread", "baton, 2 threads"][num_threads - 1];
        runs.push((name, Box::new(move |load| baton(load, num_threads))));
        let name =
            ["dynamo concurrent radix, 1 thread", "dynamo concurrent radix, 2 threads"][num_threads - 1];
        runs.push((
            name,
            Box::new(move |load| pooled(load, ConcurrentRadixTreeCompressed::new(), num_threads)),
        ));
        let name = ["dynamo positional, 1 thread", "dynamo positional, 2 threads"][num_threads - 1];
        runs.push((name, Box::new(move |load| pooled(load, PositionalIndexer::new(32), num_threads))));
    }
    runs.push(("dynamo radix, inline", Box::new(radix)));
    println!(
        "| index | M block ops/s | k lookups/s | lookup p50 us | p99 us | bytes per membership | blocks found |"
    );
    println!("|---|---|---|---|---|---|---|");
    let only = std::env::var("ONLY").unwrap_or_default();
    // The most block operations and lookups per second of any index of ours, and of theirs.
    let mut best = [[0.0_f64; 2]; 2];
    for (name, run) in runs.into_iter().filter(|(name, _)| name.starts_with(&only)) {
        let mut rounds: Vec<Measured> = (0..num_rounds).map(|_| run(&load)).collect();
        let num_found = rounds[0].num_found;
        let num_bytes = rounds[0].num_bytes;
        let apply = rounds.iter().map(|round| round.apply).min().expect("a round");
        rounds.sort_by_key(|round| round.lookup);
        let Measured { lookup, each, .. } = &rounds[0];
        let rates = [
            load.num_block_ops as f64 / apply.as_secs_f64(),
            load.prompts.len() as f64 / lookup.as_secs_f64(),
        ];
        let best = &mut best[usize::from(!name.starts_with("baton"))];
        *best = std::array::from_fn(|idx| best[idx].max(rates[idx]));
        println!(
            "| {name} | {:.2} | {:.1} | {:.1} | {:.1} | {:.0} | {num_found} |",
            rates[0] / 1e6,
            rates[1] / 1e3,
            each[each.len() / 2].as_secs_f64() * 1e6,
            each[each.len() * 99 / 100].as_secs_f64() * 1e6,
            num_bytes as f64 / load.num_held as f64,
        );
    }
    let [ours, theirs] = best;
    if ours[0] == 0.0 || theirs[0] == 0.0 {
        println!("only one side ran: nothing is checked");
        return ExitCode::SUCCESS;
    }
    println!("the best of baton by the best of dynamo:");
    let mut holds = true;
    for (idx, what) in ["block operations", "lookups"].into_iter().enumerate() {
        let found = ours[idx] / theirs[idx];
        let verdict = if found >= WANTED { "holds" } else { "MISSED" };
        println!("{what}: found {found:.2}x, wanted at least {WANTED}x: {verdict}");
        holds &= found >= WANTED;
    }
    if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn baton(load: &Load, num_threads: usize) -> Measured {
    let before = resident_bytes();
    let mut batches: Vec<Vec<(usize, EventBatch)>> = vec![Vec::new(); num_threads];
    let mut numbers = vec![0; load.num_workers];
    for (worker, change) in &load.changes {
        let event = match change {
            Change::Stored { parent, blocks } => CacheEvent::stored(
                parent.map(baton_kv_index::BlockKey),
                blocks.iter().map(|block| baton_kv_index::BlockKey(block.sequence)).collect(),
            ),
            Change::Removed(blocks) => {
                CacheEvent::removed(blocks.iter().map(|&key| baton_kv_index::BlockKey(key)).collect())
            }
        };
        let batch = EventBatch { first: numbers[*worker], events: vec![event], kind: BatchKind::Events };
        numbers[*worker] += 1;
        batches[worker % num_threads].push((*worker, batch));
    }
    let events_bytes = resident_bytes().saturating_sub(before);
    let index = Arc::new(KvIndex::new(2 * load.num_workers));
    let started = Instant::now();
    let feeds: Vec<CacheFeed> = std::thread::scope(|scope| {
        let apply = |part: Vec<(usize, EventBatch)>, idx: usize| {
            let (index, pool) = (&index, load.pool);
            scope.spawn(move || {
                let own = (idx..load.num_workers).step_by(num_threads);
                let mut feeds: Vec<_> =
                    own.map(|worker| CacheFeed::new(index.clone(), worker as u32, pool)).collect();
                for (worker, batch) in part {
                    feeds[worker / num_threads].take(&batch).expect("a batch that follows");
                }
                feeds
            })
        };
        let threads: Vec<_> = batches.into_iter().enumerate().map(|(idx, part)| apply(part, idx)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    let apply = started.elapsed();
    let _ = events_bytes;
    let num_bytes = index.size().num_bytes;
    let (mut scratch, mut holders, mut num_found) = (LookupScratch::default(), Vec::new(), 0);
    let (lookup, each) = lookups(load.prompts.len(), |idx| {
        index.lookup_into(
            &load.prompts[idx],
            |block| baton_kv_index::BlockKey(block.sequence),
            &mut scratch,
            &mut holders,
        );
        num_found += holders.iter().map(|holder| holder.num_blocks as u64).sum::<u64>();
    });
    drop(feeds);
    Measured { apply, lookup, each, num_found, num_bytes }
}

fn router_events(load: &Load) -> Vec<RouterEvent> {
    let mut numbers = vec![0; load.num_workers];
    let events = load.changes.iter().map(|(worker, change)| {
        let data = match change {
            Change::Stored { parent, blocks } => KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: parent.map(ExternalSequenceBlockHash),
                start_position: None,
                blocks: blocks
                    .iter()
                    .map(|block| KvCacheStoredBlockData {
                        block_hash: ExternalSequenceBlockHash(block.sequence),
                        tokens_hash: LocalBlockHash(block.local),
                        mm_extra_info: None,
                    })
                    .collect(),
            }),
            Change::Removed(blocks) => KvCacheEventData::Removed(KvCacheRemoveData {
                block_hashes: blocks.iter().map(|&key| ExternalSequenceBlockHash(key)).collect(),
            }),
        };
        let event_id = numbers[*worker];
        numbers[*worker] += 1;
        RouterEvent::new(*worker as u64, KvCacheEvent { event_id, data, dp_rank: 0 })
    });
    events.collect()
}

fn pooled<T: SyncIndexer>(load: &Load, backend: T, num_threads: usize) -> Measured {
    let events = router_events(load);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let prompts = local_prompts(load);
    let before = resident_bytes();
    let index = ThreadPoolIndexer::new(backend, num_threads, 16);
    let started = Instant::now();
    runtime.block_on(async {
        for event in events {
            index.apply_event(event).await;
        }
        index.flush_and_wait().await.expect("it runs");
    });
    let apply = started.elapsed();
    let num_bytes = resident_bytes().saturating_sub(before);
    let mut num_found = 0;
    let (lookup, each) = lookups(prompts.len(), |idx| {
        num_found += found(&index.backend().find_matches(&prompts[idx], false));
    });
    index.shutdown();
    Measured { apply, lookup, each, num_found, num_bytes }
}

fn radix(load: &Load) -> Measured {
    let events = router_events(load);
    let prompts = local_prompts(load);
    let before = resident_bytes();
    let mut index = RadixTree::new();
    let started = Instant::now();
    for event in events {
        index.apply_event(event).expect("a known parent");
    }
    let apply = started.elapsed();
    let num_bytes = resident_bytes().saturating_sub(before);
    let mut num_found = 0;
    let copies = prompts.clone();
    let mut copies = copies.into_iter();
    let (lookup, each) = lookups(prompts.len(), |_| {
        num_found += found(&index.find_matches(copies.next().expect("one for each"), false));
    });
    Measured { apply, lookup, each, num_found, num_bytes }
}

fn found(scores: &OverlapScores) -> u64 {
    scores.scores.values().map(|&num| u64::from(num)).sum()
}

fn local_prompts(load: &Load) -> Vec<Vec<LocalBlockHash>> {
    let local = |prompt: &Vec<load::Block>| prompt.iter().map(|block| LocalBlockHash(block.local)).collect();
    load.prompts.iter().map(local).collect()
}

fn lookups(num: usize, mut look_up: impl FnMut(usize)) -> (Duration, Vec<Duration>) {
    let started = Instant::now();
    let mut each: Vec<Duration> = (0..num)
        .map(|idx| {
            let started = Instant::now();
            black_box(look_up(idx));
            started.elapsed()
        })
        .collect();
    let all = started.elapsed();
    each.sort_unstable();
    (all, each)
}

/// Of this process.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    status.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}
