//! What it takes to hand over little: a transfer of 4 to 256 KiB, copied by whoever pushes it or by the peer's thread,
//! next to memcpy and to sockets. Two pools in one process, which share no mapping; in turns, in memory that no cache
//! holds and whose pages are there.
//!
//! ```text
//! cargo bench -p baton-kv-transfer --bench small
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_kv_transfer::{PieceWrite, Receiver, ReceiverConfig, Sender, SenderConfig, TransportKind};

const SIZES: [usize; 7] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10];
const MAX_PIECE_BYTES: usize = 64 << 10;
const POOL_BYTES: usize = 128 << 20;
const ROUNDS: usize = 600;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    println!(
        "    size   memcpy, us   at once   by thread   tcp   GB/s at once   x memcpy: at once   by thread"
    );
    for size_bytes in SIZES {
        measure(size_bytes).await;
    }
}

async fn measure(size_bytes: usize) {
    let piece_bytes = size_bytes.min(MAX_PIECE_BYTES);
    let [source, target, memory] = [1, 2, 3].map(|byte| storage(piece_bytes, byte));
    let dir = tempfile::tempdir().expect("a directory");
    let config = ReceiverConfig {
        shm_dir: Some(dir.path().join("shm")),
        tcp_listen: Some(([127, 0, 0, 1], 0).into()),
        ..ReceiverConfig::default()
    };
    let receiver = Receiver::start(target, config).expect("a receiver");
    let sender = |kind, copy_at_once_bytes| {
        let config = SenderConfig { transports: vec![kind], copy_at_once_bytes, ..SenderConfig::default() };
        Sender::start(Arc::clone(&source), config).expect("a sender")
    };
    let senders = [
        sender(TransportKind::Shm, usize::MAX),
        sender(TransportKind::Shm, 0),
        sender(TransportKind::Tcp, 0),
    ];
    let num_pieces = size_bytes / piece_bytes;
    let num_parts = source.num_blocks() / num_pieces;
    let mut times = [const { Vec::new() }; 4];
    // Every page of both sides is touched before it counts.
    for round in 0..num_parts + ROUNDS {
        let first = round % num_parts * num_pieces;
        let blocks: Vec<_> = (first..first + num_pieces).map(|block| BlockId(block as u32)).collect();
        let start = Instant::now();
        for &block in &blocks {
            // SAFETY: nobody writes the source, and nobody else knows this memory.
            unsafe { memory.layer_mut(block, 0).copy_from_slice(source.layer(block, 0)) };
        }
        let mut elapsed = vec![start.elapsed()];
        for sender in &senders {
            elapsed.push(push(sender, &receiver, &blocks).await);
        }
        if round >= num_parts {
            times
                .iter_mut()
                .zip(elapsed)
                .for_each(|(times, elapsed): (&mut Vec<Duration>, _)| times.push(elapsed));
        }
    }
    let [memcpy, at_once, by_thread, tcp] = times.map(|mut times| {
        times.sort();
        times[times.len() / 2].as_secs_f64() * 1e6
    });
    println!(
        "{:>4} KiB{memcpy:>13.1}{at_once:>10.1}{by_thread:>12.1}{tcp:>6.0}{:>15.2}{:>20.2}{:>12.2}",
        size_bytes >> 10,
        size_bytes as f64 / at_once / 1e3,
        memcpy / at_once,
        memcpy / by_thread,
    );
}

/// From the call until the blocks hold the bytes; the grant's way there is not part of it.
async fn push(sender: &Sender, receiver: &Receiver, blocks: &[BlockId]) -> Duration {
    let granted = receiver.grant(blocks.to_vec(), ());
    let route = sender.route(granted.pass(), granted.offers(), ()).await.expect("a route");
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
        // SAFETY: nobody else knows this memory yet.
        unsafe { storage.layer_mut(BlockId(block as u32), 0) }.fill(byte);
    }
    Arc::new(storage)
}
