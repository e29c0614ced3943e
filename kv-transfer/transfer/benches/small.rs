//! Latency of small transfers, 4 KiB to 1 MiB: over shared memory compared with memcpy, and over tcp compared with a plain
//! socket whose peer answers with one byte after it has received everything. Over shared memory, either the pushing thread copies
//! ("at once") or the thread of the peer's pool does ("by thread").
//!
//! Two pools in one process share no mapping. The cases take turns, in memory that is in no cache and whose pages are mapped.
//!
//! ```text
//! cargo bench -p baton-transfer --bench small [-- MAX_PIECE_BYTES]
//! ```

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use baton_handoff::PieceWrite;
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_transfer::{Receiver, ReceiverConfig, Sender, SenderConfig, SendingTransport};
use baton_transport_shm::{ShmReceiving, ShmSending};
use baton_transport_tcp::{TcpReceiving, TcpSending};

const SIZES: [usize; 9] =
    [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];
const POOL_BYTES: usize = 128 << 20;
const ROUNDS: usize = 600;
const NUM_CASES: usize = 5;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    println!(
        "            shm, us                              x memcpy           tcp, us            x stream"
    );
    println!("    size    memcpy   at once   by thread   at once   by thread   stream      push       push");
    let max_piece_bytes = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(64 << 10);
    for size_bytes in SIZES {
        measure(size_bytes, max_piece_bytes).await;
    }
}

async fn measure(size_bytes: usize, max_piece_bytes: usize) {
    let piece_bytes = size_bytes.min(max_piece_bytes);
    let [source, target, memory, streamed] = [1, 2, 3, 4].map(|byte| storage(piece_bytes, byte));
    let dir = tempfile::tempdir().expect("a directory");
    let shm = ShmReceiving { dir: dir.path().join("shm") };
    let tcp = TcpReceiving::new(([127, 0, 0, 1], 0).into());
    let receiver = Receiver::start(target, &ReceiverConfig::default(), vec![Box::new(shm), Box::new(tcp)]);
    let receiver = receiver.expect("a receiver");
    let sender = |transport: Box<dyn SendingTransport>| {
        Sender::start(Arc::clone(&source), SenderConfig::default(), vec![transport]).expect("a sender")
    };
    let senders = [
        sender(Box::new(ShmSending::new(usize::MAX))),
        sender(Box::new(ShmSending::new(0))),
        sender(Box::<TcpSending>::default()),
    ];
    let num_pieces = size_bytes / piece_bytes;
    let num_parts = source.num_blocks() / num_pieces;
    let mut plain = plain_stream(streamed, size_bytes).expect("a plain stream");
    let mut times = [const { Vec::new() }; NUM_CASES];
    // The first rounds touch every page of both pools and are not counted.
    for round in 0..num_parts + ROUNDS {
        // Blocks that were just read are in a cache, so each case has other blocks.
        let blocks = |nth: usize| {
            let first = (round + nth * num_parts / NUM_CASES) % num_parts * num_pieces;
            (first..first + num_pieces).map(|block| BlockId(block as u32)).collect::<Vec<_>>()
        };
        let start = Instant::now();
        for block in blocks(0) {
            // SAFETY: the source is not written, and only this bench uses this memory.
            unsafe { memory.layer_mut(block, 0).copy_from_slice(source.layer(block, 0)) };
        }
        let mut elapsed = vec![start.elapsed()];
        let start = Instant::now();
        push_plain(&mut plain, &source, &blocks(1)).expect("a plain push");
        elapsed.push(start.elapsed());
        for (sender, nth) in senders.iter().zip(2..) {
            elapsed.push(push(sender, &receiver, &blocks(nth)).await);
        }
        if round >= num_parts {
            times
                .iter_mut()
                .zip(elapsed)
                .for_each(|(times, elapsed): (&mut Vec<Duration>, _)| times.push(elapsed));
        }
    }
    let [memcpy, stream, at_once, by_thread, sent] = times.map(|mut times| {
        times.sort();
        times[times.len() / 2].as_secs_f64() * 1e6
    });
    println!(
        "{:>4} KiB{memcpy:>10.1}{at_once:>10.1}{by_thread:>12.1}{:>10.2}{:>12.2}{stream:>9.0}{sent:>10.0}{:>11.2}",
        size_bytes >> 10,
        memcpy / at_once,
        memcpy / by_thread,
        stream / sent,
    );
}

/// Time from the call of `push` until the blocks hold the bytes. Granting and routing are not included.
async fn push(sender: &Sender, receiver: &Receiver, blocks: &[BlockId]) -> Duration {
    let granted = receiver.grant(blocks.to_vec(), ());
    let route = sender.route(granted.access_key(), granted.offers(), ()).await.expect("a route");
    let piece = |(block_idx, &block): (usize, &BlockId)| PieceWrite {
        layer_idx: 0,
        block_idx: block_idx as u32,
        src: block.into(),
        dst: block,
    };
    let writes = blocks.iter().enumerate().map(piece).collect();
    let start = Instant::now();
    route.push(writes).await.expect("pushed");
    let elapsed = start.elapsed();
    drop(route);
    granted.commit().await.expect("fenced");
    elapsed
}

/// A socket whose peer reads into `memory`, block after block, and answers each transfer with one byte.
fn plain_stream(memory: Arc<BlockStorage>, size_bytes: usize) -> std::io::Result<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let piece_bytes = memory.layout().layer_bytes();
    let num_blocks = memory.num_blocks();
    thread::spawn(move || {
        for first in (0..num_blocks).step_by(size_bytes / piece_bytes).cycle() {
            let start = memory.layer_ptr(BlockId(first as u32), 0).as_ptr();
            // SAFETY: a block is one piece and blocks are contiguous; only this bench uses this memory.
            let place = unsafe { std::slice::from_raw_parts_mut(start, size_bytes) };
            if far.read_exact(place).and_then(|()| far.write_all(&[1])).is_err() {
                return;
            }
        }
    });
    Ok(near)
}

/// Sends the blocks, and waits for the answer of the peer.
fn push_plain(stream: &mut TcpStream, source: &BlockStorage, blocks: &[BlockId]) -> std::io::Result<()> {
    for &block in blocks {
        // SAFETY: the source is not written.
        stream.write_all(unsafe { source.layer(block, 0) })?;
    }
    stream.read_exact(&mut [0])
}

/// Blocks of one piece each.
fn storage(piece_bytes: usize, byte: u8) -> Arc<BlockStorage> {
    let layout = KvLayout {
        block_size: 16,
        num_layers: 1,
        num_kv_heads: 1,
        head_dim: piece_bytes / 64,
        dtype: KvDtype::Bf16,
    };
    let storage = BlockStorage::new(layout, POOL_BYTES / piece_bytes).expect("memory");
    for block in 0..storage.num_blocks() {
        // SAFETY: only this bench uses this memory so far.
        unsafe { storage.layer_mut(BlockId(block as u32), 0) }.fill(byte);
    }
    Arc::new(storage)
}
