//! How fast blocks move, next to what the machine can do at best: `shm` against a cold memcpy, `tcp`
//! against plain streams that write and read the same blocks. At the end the ratios of the medians.
//!
//! A block here is that of a model with 16 layers, 8 kv heads of 64, bf16: 32 KiB per piece. Source
//! and target are far larger than the caches, and every round touches other blocks.

use std::{
    future::Future,
    hint::black_box,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_kv_transfer::{
    Generation, PieceWrite, Receiver, ReceiverConfig, Route, Sender, SenderConfig, TransportKind, checksum,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const LAYOUT: KvLayout =
    KvLayout { block_size: 16, num_layers: 16, num_kv_heads: 8, head_dim: 64, dtype: KvDtype::Bf16 };
/// 512 MiB on each side.
const NUM_BLOCKS: usize = 1024;
/// Blocks of one round: 64 MiB, a prompt of 2,048 tokens.
const ROUND: usize = 128;

fn bench(criterion: &mut Criterion) {
    let source = storage(1);
    let target = storage(2);
    let dir = tempfile::tempdir().expect("a folder");
    let config = ReceiverConfig {
        tcp_listen: Some(([127, 0, 0, 1], 0).into()),
        shm_dir: Some(dir.path().join("d")),
        ..ReceiverConfig::default()
    };
    let receiver = Receiver::start(Arc::clone(&target), config).expect("a receiver");
    let mut medians = Vec::new();
    let mut group = criterion.benchmark_group("64 MiB");
    group.throughput(Throughput::Bytes((ROUND * LAYOUT.block_bytes()) as u64));
    group.sample_size(20).measurement_time(Duration::from_secs(4));

    let mut measure = |name: &str, work: &mut dyn FnMut(usize)| {
        let mut times = Vec::new();
        let mut round = 0;
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|num_rounds| {
                let start = Instant::now();
                for _ in 0..num_rounds {
                    let begin = Instant::now();
                    work(round % (NUM_BLOCKS / ROUND) * ROUND);
                    times.push(begin.elapsed());
                    round += 1;
                }
                start.elapsed()
            });
        });
        times.sort_unstable();
        medians.push((name.to_owned(), times[times.len() / 2]));
    };

    measure("memcpy", &mut |first| memcpy(&source, &target, first));
    measure("xxh3", &mut |first| hash(&source, first));
    for num_streams in [1, 2] {
        let mut streams = PlainStreams::new(num_streams);
        measure(&format!("plain tcp, {num_streams} streams"), &mut |first| {
            streams.round(&source, &target, first);
        });
    }
    for (name, kind, streams_per_peer) in [
        ("shm", TransportKind::Shm, 1),
        ("tcp, 1 streams", TransportKind::Tcp, 1),
        ("tcp, 2 streams", TransportKind::Tcp, 2),
    ] {
        let config = SenderConfig { transports: vec![kind], streams_per_peer, ..SenderConfig::default() };
        let sender = Sender::start(Arc::clone(&source), config).expect("a sender");
        measure(name, &mut |first| {
            let dst: Vec<_> = (first..first + ROUND).map(|n| BlockId(n as u32)).collect();
            let granted = receiver.grant(dst, ());
            let route = wait(sender.route(granted.generation(), granted.offers(), ())).expect("a route");
            push(&route, first);
            drop(route);
            wait(granted.commit());
        });
    }
    drop(measure);
    group.finish();

    let median = |name: &str| medians.iter().find(|(known, _)| known == name).expect("measured").1;
    println!("\n| transport | GB/s | of | ratio |\n|---|---|---|---|");
    for (name, base) in [
        ("memcpy", "memcpy"),
        ("xxh3", "memcpy"),
        ("shm", "memcpy"),
        ("plain tcp, 1 streams", "memcpy"),
        ("plain tcp, 2 streams", "memcpy"),
        ("tcp, 1 streams", "plain tcp, 1 streams"),
        ("tcp, 2 streams", "plain tcp, 2 streams"),
    ] {
        let rate = (ROUND * LAYOUT.block_bytes()) as f64 / median(name).as_secs_f64() / 1e9;
        let ratio = median(base).as_secs_f64() / median(name).as_secs_f64();
        println!("| {name} | {rate:.2} | {base} | {ratio:.2} |");
    }
}

fn storage(byte: u8) -> Arc<BlockStorage> {
    let storage = BlockStorage::new(LAYOUT, NUM_BLOCKS).expect("memory");
    for block_idx in 0..NUM_BLOCKS as u32 {
        for layer_idx in 0..LAYOUT.num_layers {
            // SAFETY: nobody else knows this memory yet.
            unsafe { storage.layer_mut(BlockId(block_idx), layer_idx) }.fill(byte);
        }
    }
    Arc::new(storage)
}

/// Layer by layer, as a prefill would.
fn pieces(first: usize) -> impl Iterator<Item = (BlockId, usize)> {
    (0..LAYOUT.num_layers)
        .flat_map(move |layer_idx| (first..first + ROUND).map(move |n| (BlockId(n as u32), layer_idx)))
}

fn memcpy(source: &BlockStorage, target: &BlockStorage, first: usize) {
    for (block, layer_idx) in pieces(first) {
        // SAFETY: nobody else touches either while this runs.
        unsafe { target.layer_mut(block, layer_idx).copy_from_slice(source.layer(block, layer_idx)) };
    }
}

fn hash(source: &BlockStorage, first: usize) {
    for (block, layer_idx) in pieces(first) {
        // SAFETY: nobody writes the source.
        black_box(checksum(unsafe { source.layer(block, layer_idx) }, Generation(1)));
    }
}

fn push(route: &Route, first: usize) {
    let writes: Vec<_> = pieces(first)
        .map(|(block, layer_idx)| PieceWrite {
            layer_idx: layer_idx as u32,
            block_idx: (block.idx() - first) as u32,
            src: block,
            dst: block,
        })
        .collect();
    let pushes: Vec<_> = writes.chunks(ROUND).map(|layer| route.push(layer.to_vec())).collect();
    for push in pushes {
        wait(push).expect("pushed");
    }
}

/// What a socket can do without any protocol: pieces written one after the other, read in place.
struct PlainStreams(Vec<(TcpStream, TcpStream)>);

impl PlainStreams {
    fn new(num_streams: usize) -> PlainStreams {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let pair = || {
            let ours = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
            (ours, listener.accept().expect("accepts").0)
        };
        PlainStreams((0..num_streams).map(|_| pair()).collect())
    }

    fn round(&mut self, source: &BlockStorage, target: &BlockStorage, first: usize) {
        let num_streams = self.0.len();
        std::thread::scope(|scope| {
            for (stream_idx, (ours, theirs)) in self.0.iter_mut().enumerate() {
                let own = move || pieces(first).skip(stream_idx).step_by(num_streams);
                scope.spawn(move || {
                    for (block, layer_idx) in own() {
                        // SAFETY: nobody writes the source.
                        ours.write_all(unsafe { source.layer(block, layer_idx) }).expect("writes");
                    }
                });
                scope.spawn(move || {
                    for (block, layer_idx) in own() {
                        // SAFETY: each stream has its own pieces.
                        theirs.read_exact(unsafe { target.layer_mut(block, layer_idx) }).expect("reads");
                    }
                });
            }
        });
    }
}

fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}

criterion_group!(benches, bench);
criterion_main!(benches);
