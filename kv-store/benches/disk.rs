//! The disk tier on a real disk: `cargo bench -p baton-kv-store --bench disk -- fill DIR GIB`, then `… -- read DIR GIB`. A host tier that
//! workers share, in a directory below /dev/shm: the same with `shared` at the end, in one process or several. One of a worker alone:
//! `… -- host GIB`, which fills and reads.
//!
//! Blocks have 512 KiB (16 layers, 8 kv heads of 64 in f16, 16 tokens), sequences 64 of them. `read` opens the directory, prints how
//! long that takes, and reads whole sequences in random order into a pool for ten seconds. Every record is verified, as always.

use std::{
    env,
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockHash, BlockId, BlockStorage, HashRoot, KvDtype, KvFormat, KvLayout};
use baton_kv_events::Keep;
use baton_kv_store::{DiskConfig, HostConfig, KvStore, SequenceBlocks, StoreConfig};
use baton_random::Random;

const BLOCKS_PER_SEQUENCE: usize = 64;

fn layout() -> KvLayout {
    KvLayout { block_size: 16, num_layers: 16, num_kv_heads: 8, head_dim: 64, dtype: KvDtype::F16 }
}

fn root() -> HashRoot {
    HashRoot::new("bench", "", "")
}

fn tokens(sequence: u32) -> Vec<u32> {
    (0..(BLOCKS_PER_SEQUENCE * layout().block_size) as u32).map(|idx| sequence << 12 | idx).collect()
}

fn hashes(sequence: u32) -> Vec<BlockHash> {
    root().block_hashes(&tokens(sequence), layout().block_size).collect()
}

fn main() {
    let args: Vec<String> = env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (mode, dir, gib) = match args[..] {
        [mode @ ("fill" | "read"), dir, gib] | [mode @ ("fill" | "read"), dir, gib, "shared"] => {
            (mode, Some(dir), gib)
        }
        ["host", gib] => ("host", None, gib),
        _ => {
            println!("SKIPPED: say fill or read, a directory, its GiB and perhaps shared; or host and GiB");
            return;
        }
    };
    let max_bytes = (gib.parse::<f64>().expect("a number of GiB") * f64::from(1 << 30)) as u64;
    let dir = dir.map(PathBuf::from);
    let config = match dir {
        Some(dir) if args.len() == 3 => {
            StoreConfig { disk: Some(DiskConfig { dir, max_bytes }), ..StoreConfig::default() }
        }
        dir => StoreConfig { host: Some(HostConfig { max_bytes, dir }), ..StoreConfig::default() },
    };
    let format = KvFormat::new("bench".into(), &layout(), String::new());
    let storage = Arc::new(BlockStorage::new(layout(), BLOCKS_PER_SEQUENCE).expect("memory"));
    storage.populate_all().expect("memory");
    let started = Instant::now();
    let store = KvStore::open(&config, &format, storage.clone(), |_, _| ()).expect("it opens");
    let tier = store.counts()[0];
    println!("opened in {:?}: {} of {} blocks", started.elapsed(), tier.num_held, tier.num_slots);
    let num_sequences = (tier.num_slots as usize / BLOCKS_PER_SEQUENCE) as u32;
    if mode != "read" {
        fill(&store, num_sequences);
    }
    if mode != "fill" {
        read(&store, num_sequences);
    }
}

fn fill(store: &KvStore, num_sequences: u32) {
    let started = Instant::now();
    for sequence in 0..num_sequences {
        store.save(SequenceBlocks {
            root: root().hash(),
            hashes: hashes(sequence).into(),
            keeps: vec![Keep::Normal; BLOCKS_PER_SEQUENCE].into(),
            tokens: tokens(sequence).into(),
            blocks: (0..BLOCKS_PER_SEQUENCE as u32).map(BlockId).collect(),
            has_ended: true,
            guard: (),
        });
        // One after the other, so that none is dropped.
        while store.counts()[0].writes < (u64::from(sequence) + 1) * BLOCKS_PER_SEQUENCE as u64 {
            thread::sleep(Duration::from_micros(200));
        }
    }
    let bytes = f64::from(num_sequences) * (BLOCKS_PER_SEQUENCE * layout().block_bytes()) as f64;
    println!("written: {:.2} GB/s", bytes / started.elapsed().as_secs_f64() / 1e9);
}

fn read(store: &KvStore, num_sequences: u32) {
    let mut random = Random::new(1);
    let (mut num_blocks, started) = (0, Instant::now());
    while started.elapsed() < Duration::from_secs(10) {
        let hashes = hashes(random.below(u64::from(num_sequences)) as u32);
        let records = store.read(&hashes, started + Duration::from_secs(60));
        assert_eq!(records.len(), hashes.len(), "fill it first");
        let blocks: Vec<_> = (0..records.len() as u32).map(BlockId).collect();
        assert_eq!(store.write_to_pool(&records, &blocks).expect("memory"), records.len());
        num_blocks += records.len();
    }
    let bytes = (num_blocks * layout().block_bytes()) as f64;
    println!("read: {:.2} GB/s", bytes / started.elapsed().as_secs_f64() / 1e9);
}
