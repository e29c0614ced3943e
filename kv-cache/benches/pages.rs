//! The cost of the first write to a pool's memory: when the kernel supplies it page by page, after
//! [`BlockStorage::populate`], and of that call itself; by the process that made the pool, and by a peer's mapping of
//! it.

use std::time::{Duration, Instant};

use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const LAYOUT: KvLayout =
    KvLayout { block_size: 16, num_layers: 16, num_kv_heads: 8, head_dim: 64, dtype: KvDtype::Bf16 };
/// 64 MiB.
const NUM_BLOCKS: usize = 128;

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("first write");
    group.sample_size(10);
    group.throughput(Throughput::Bytes((NUM_BLOCKS * LAYOUT.block_bytes()) as u64));
    let mut measure = |name: &str, run: fn() -> Duration| {
        group.bench_function(name, |bencher| bencher.iter_custom(|num| (0..num).map(|_| run()).sum()));
    };
    measure("page by page", || {
        let storage = new();
        timed(|| write(&storage))
    });
    measure("page by page, peer", || {
        let (_storage, peer) = with_peer(new());
        timed(|| write(&peer))
    });
    measure("populate", || timed(|| populate(&new())));
    measure("populated", || {
        let storage = new();
        populate(&storage);
        timed(|| write(&storage))
    });
    measure("populated, peer", || {
        let (storage, peer) = with_peer(new());
        populate(&storage);
        timed(|| write(&peer))
    });
    let storage = new();
    write(&storage);
    group.bench_function("once more", |bencher| bencher.iter(|| write(&storage)));
}

fn new() -> BlockStorage {
    BlockStorage::new(LAYOUT, NUM_BLOCKS).expect("memory")
}

/// The storage, and a mapping of it as another process makes it.
fn with_peer(storage: BlockStorage) -> (BlockStorage, BlockStorage) {
    let fd = storage.fd().try_clone_to_owned().expect("a descriptor");
    (storage, BlockStorage::from_fd(fd, LAYOUT, NUM_BLOCKS).expect("the same size"))
}

fn populate(storage: &BlockStorage) {
    storage.populate(0..storage.size_bytes()).expect("Linux 5.14, or later");
}

fn write(storage: &BlockStorage) {
    for block in 0..NUM_BLOCKS as u32 {
        for layer_idx in 0..LAYOUT.num_layers {
            // SAFETY: this process is the only user of the memory.
            unsafe { storage.layer_mut(BlockId(block), layer_idx).fill(1) };
        }
    }
}

fn timed(run: impl FnOnce()) -> Duration {
    let started = Instant::now();
    run();
    started.elapsed()
}

criterion_group!(benches, bench);
criterion_main!(benches);
