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
    let mut contenders = vec![
        Contender::new("memcpy", "memcpy", {
            let (source, target) = (Arc::clone(&source), Arc::clone(&target));
            move |first| memcpy(&source, &target, first)
        }),
        Contender::new("xxh3", "memcpy", {
            let source = Arc::clone(&source);
            move |first| hash(&source, first)
        }),
    ];
    let shm = transport(&receiver, &source, TransportKind::Shm, 1);
    contenders.push(Contender::new("shm", "memcpy", shm));
    for (num_streams, plain, ours) in
        [(1, "plain tcp, 1 stream", "tcp, 1 stream"), (2, "plain tcp, 2 streams", "tcp, 2 streams")]
    {
        let mut streams = PlainStreams::new(num_streams);
        let (from, to) = (Arc::clone(&source), Arc::clone(&target));
        contenders.push(Contender::new(plain, "memcpy", move |first| streams.round(&from, &to, first)));
        let tcp = transport(&receiver, &source, TransportKind::Tcp, num_streams);
        contenders.push(Contender::new(ours, plain, tcp));
    }

    let mut group = criterion.benchmark_group("64 MiB");
    group.throughput(Throughput::Bytes((ROUND * LAYOUT.block_bytes()) as u64));
    group.sample_size(10).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    for contender in &mut contenders {
        group.bench_function(contender.name, |bencher| {
            let mut rounds = (0..NUM_BLOCKS / ROUND).cycle();
            bencher.iter(|| (contender.work)(rounds.next().expect("endless") * ROUND));
        });
    }
    group.finish();
    compare(&mut contenders);
}

/// Something that moves the blocks of a round, and what it is compared with.
struct Contender {
    name: &'static str,
    base: &'static str,
    work: Box<dyn FnMut(usize)>,
}

impl Contender {
    fn new(name: &'static str, base: &'static str, work: impl FnMut(usize) + 'static) -> Contender {
        Contender { name, base, work: Box::new(work) }
    }
}

/// A round of each in turn, so that whatever else the machine does meets all of them alike.
fn compare(contenders: &mut [Contender]) {
    let mut times = vec![Vec::new(); contenders.len()];
    for round in 0..41 {
        for (contender, times) in contenders.iter_mut().zip(&mut times) {
            let start = Instant::now();
            (contender.work)(round % (NUM_BLOCKS / ROUND) * ROUND);
            times.push(start.elapsed());
        }
    }
    for times in &mut times {
        times.sort_unstable();
    }
    // The best says what the code can do, the median what this machine lets it do just now.
    println!("\n| | best GB/s | ratio | median GB/s | ratio | to |\n|---|---|---|---|---|---|");
    for (contender, own) in contenders.iter().zip(&times) {
        let base = contenders.iter().position(|other| other.name == contender.base).expect("listed");
        let column = |idx: usize| {
            let rate = (ROUND * LAYOUT.block_bytes()) as f64 / own[idx].as_secs_f64() / 1e9;
            format!("{rate:.2} | {:.2}", times[base][idx].as_secs_f64() / own[idx].as_secs_f64())
        };
        println!("| {} | {} | {} | {} |", contender.name, column(0), column(own.len() / 2), contender.base);
    }
}

/// A whole handoff of data per round: grant, route, push layer by layer, commit. Without verification,
/// which runs beside it.
fn transport(
    receiver: &Receiver,
    source: &Arc<BlockStorage>,
    kind: TransportKind,
    streams_per_peer: usize,
) -> impl FnMut(usize) + 'static {
    let config = SenderConfig { transports: vec![kind], streams_per_peer, ..SenderConfig::default() };
    let sender = Sender::start(Arc::clone(source), config).expect("a sender");
    let receiver = receiver.clone();
    move |first| {
        let dst: Vec<_> = (first..first + ROUND).map(|n| BlockId(n as u32)).collect();
        let granted = receiver.grant(dst, ());
        let route = wait(sender.route(granted.generation(), granted.offers(), ())).expect("a route");
        push(&route, first);
        drop(route);
        wait(granted.commit());
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
            src: block.into(),
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
