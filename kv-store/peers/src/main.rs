//! The crate foyer on a real disk, with values of the size of the records of `cargo bench -p baton-kv-store --bench disk`:
//!
//! ```text
//! cargo run --release -- fill DIR GIB
//! cargo run --release -- read DIR GIB psync|uring NUM_READERS
//! ```
//!
//! `read` opens the directory, prints how long that takes, and reads values in random order for ten seconds, past the page
//! cache; foyer verifies its checksums.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, IoEngineConfig,
    PsyncIoEngineConfig, RecoverMode, UringIoEngineConfig,
};

const VALUE_BYTES: usize = 512 << 10;
/// Values and what foyer stores beside them are in whole pages.
const STORED_BYTES: usize = VALUE_BYTES + 4096;
const BLOCK_BYTES: usize = 64 << 20;
/// So that hits are the disk's.
const MEMORY_BYTES: usize = 16 << 20;
const TIME: Duration = Duration::from_secs(10);

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match words[..] {
        ["fill", dir, gib] => runtime.block_on(fill(dir, gib.parse()?)),
        ["read", dir, gib, engine, readers] => {
            runtime.block_on(read(dir, gib.parse()?, engine, readers.parse()?))
        }
        _ => bail!("say: fill DIR GIB, or: read DIR GIB psync|uring NUM_READERS"),
    }
}

/// Values that the directory has room for, with a reserve that foyer keeps clean.
fn num_values(gib: usize) -> u64 {
    let num_blocks = (gib << 30) / BLOCK_BYTES;
    ((num_blocks - 8) * (BLOCK_BYTES / STORED_BYTES - 1)) as u64
}

async fn open(dir: &str, gib: usize, engine: &str) -> anyhow::Result<HybridCache<u64, Vec<u8>>> {
    let device = FsDeviceBuilder::new(dir).with_capacity(gib << 30).with_direct(true).build()?;
    let io: Box<dyn IoEngineConfig> = match engine {
        "psync" => PsyncIoEngineConfig::new().into(),
        "uring" => UringIoEngineConfig::new().with_threads(1).with_io_depth(64).boxed(),
        other => bail!("{other} is neither psync nor uring"),
    };
    let engine = BlockEngineConfig::new(device)
        .with_block_size(BLOCK_BYTES)
        .with_buffer_pool_size(256 << 20)
        .with_submit_queue_size_threshold(1 << 30)
        .with_flushers(2);
    let cache = HybridCacheBuilder::new()
        .memory(MEMORY_BYTES)
        .with_weighter(|_, value: &Vec<u8>| value.len())
        .storage()
        .with_io_engine_config(io)
        .with_engine_config(engine)
        .with_recover_mode(RecoverMode::Quiet);
    Ok(cache.build().await?)
}

async fn fill(dir: &str, gib: usize) -> anyhow::Result<()> {
    let cache = open(dir, gib, "psync").await?;
    let started = Instant::now();
    for key in 0..num_values(gib) {
        let bytes = key.to_le_bytes().into_iter().cycle().take(VALUE_BYTES).collect();
        cache.storage_writer(key).force().insert(bytes).context("foyer refuses a value")?;
        if key % 128 == 127 {
            cache.storage().wait().await;
        }
    }
    cache.close().await?;
    let bytes = num_values(gib) as f64 * VALUE_BYTES as f64;
    println!("written: {:.2} GB/s", bytes / started.elapsed().as_secs_f64() / 1e9);
    Ok(())
}

async fn read(dir: &str, gib: usize, engine: &str, num_readers: u64) -> anyhow::Result<()> {
    let started = Instant::now();
    let cache = open(dir, gib, engine).await?;
    println!("opened in {:?}", started.elapsed());
    let (num_found, num_missed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let started = Instant::now();
    let readers = (0..num_readers).map(|reader| {
        let (cache, num_found, num_missed) = (cache.clone(), num_found.clone(), num_missed.clone());
        tokio::spawn(async move {
            // A sequence without a pattern: Weyl's, with another start for each reader.
            let mut state = reader.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            while started.elapsed() < TIME {
                state = state.wrapping_add(0xD1B5_4A32_D192_ED03);
                let key = (u128::from(state) * u128::from(num_values(gib)) >> 64) as u64;
                match cache.get(&key).await? {
                    Some(entry) if entry.value()[..8] == key.to_le_bytes() => &num_found,
                    Some(_) => bail!("another value"),
                    None => &num_missed,
                }
                .fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        })
    });
    for reader in readers.collect::<Vec<_>>() {
        reader.await??;
    }
    let seconds = started.elapsed().as_secs_f64();
    let (num_found, num_missed) = (num_found.load(Ordering::Relaxed), num_missed.load(Ordering::Relaxed));
    let rate = num_found as f64 * VALUE_BYTES as f64 / seconds / 1e9;
    println!("read: {rate:.2} GB/s; {num_found} found, {num_missed} not");
    Ok(())
}
