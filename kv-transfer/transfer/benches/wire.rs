//! Transfer time of a long prompt's KV over tcp, in each wire format. Sender and receiver are in one process; the link is the
//! loopback device of the network namespace in which this runs.
//!
//! ```text
//! ip netns add wire && ip -n wire link set lo up
//! tc -n wire qdisc add dev lo root tbf rate 8gbit burst 1mb latency 50ms
//! ip netns exec wire cargo bench -p baton-transfer --bench wire
//! ```
//!
//! A prompt here is 4,096 tokens of a model with 16 layers, 8 kv heads of 64, bf16, pushed layer by layer and verified.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_handoff::PieceWrite;
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout, KvShard, VectorCodec, WireFormat};
use baton_transfer::{Receiver, ReceiverConfig, Sender, SenderConfig};
use baton_transport_tcp::{TcpReceiving, TcpSending};

const LAYOUT: KvLayout =
    KvLayout { block_size: 16, num_layers: 16, num_kv_heads: 8, head_dim: 64, dtype: KvDtype::Bf16 };
const NUM_BLOCKS: usize = 256;
const ROUNDS: usize = 5;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let source = storage();
    let tcp = TcpReceiving::new(([127, 0, 0, 1], 0).into());
    let receiver = Receiver::start(storage(), &ReceiverConfig::default(), vec![Box::new(tcp)]);
    let receiver = receiver.expect("a receiver");
    let tcp = TcpSending::default();
    let sender = Sender::start(source, SenderConfig::default(), vec![Box::new(tcp)]).expect("a sender");
    let mut times = WireFormat::ALL.map(|_| Vec::new());
    let mut sizes = [0; WireFormat::ALL.len()];
    // Formats take turns. The first round is not counted.
    for round in 0..=ROUNDS {
        for (idx, format) in WireFormat::ALL.into_iter().enumerate() {
            let (elapsed, num_bytes) = handoff(&sender, &receiver, format).await;
            sizes[idx] = num_bytes;
            if round > 0 {
                times[idx].push(elapsed);
            }
        }
    }
    println!("format     MB transferred   ms, median (min-max)       GB/s of KV   of as-is");
    let mut as_is = Duration::ZERO;
    for ((format, times), num_bytes) in WireFormat::ALL.into_iter().zip(&mut times).zip(sizes) {
        times.sort();
        let median = times[times.len() / 2];
        if format == WireFormat::AsIs {
            as_is = median;
        }
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!(
            "{:<8}{:>17.1}{:>12.1} ({:.1}-{:.1}){:>20.2}{:>9.2}x",
            format.name(),
            num_bytes as f64 / 1e6,
            ms(median),
            ms(times[0]),
            ms(times[times.len() - 1]),
            (NUM_BLOCKS * LAYOUT.block_bytes()) as f64 / median.as_secs_f64() / 1e9,
            as_is.as_secs_f64() / median.as_secs_f64(),
        );
    }
}

/// Time from the open route to the last verified piece, and the bytes that were transferred.
async fn handoff(sender: &Sender, receiver: &Receiver, format: WireFormat) -> (Duration, u64) {
    let blocks: Vec<BlockId> = (0..NUM_BLOCKS as u32).map(BlockId).collect();
    let granted = receiver.grant_as(blocks.clone(), Some(format), ());
    let peer = KvShard::new(&LAYOUT, 1, 0).expect("one rank");
    let routed = sender.route_to(&peer, format, granted.access_key(), granted.offers(), ()).await;
    let route = routed.expect("a route");
    let started = Instant::now();
    let pushes = (0..LAYOUT.num_layers as u32).map(|layer_idx| {
        let piece = |(block_idx, &block): (usize, &BlockId)| PieceWrite {
            layer_idx,
            block_idx: block_idx as u32,
            src: block.into(),
            dst: block,
        };
        route.push(blocks.iter().enumerate().map(piece).collect())
    });
    let pushes: Vec<_> = pushes.collect();
    let mut num_bytes = 0;
    for push in pushes {
        let pushed = push.await.expect("pushed");
        num_bytes += pushed.bytes;
        granted.verify(pushed.pieces).await.expect("verified");
    }
    let elapsed = started.elapsed();
    drop(route);
    granted.commit().await.expect("fenced");
    (elapsed, num_bytes)
}

/// A pool filled with values of similar magnitude.
fn storage() -> Arc<BlockStorage> {
    let storage = BlockStorage::new(LAYOUT, NUM_BLOCKS).expect("memory");
    let vector: Vec<f32> = (0..LAYOUT.layer_bytes() / 2).map(|idx| (idx as f32).sin()).collect();
    for block in (0..NUM_BLOCKS as u32).map(BlockId) {
        for layer_idx in 0..LAYOUT.num_layers {
            // SAFETY: only this bench uses the pool so far.
            let piece = unsafe { storage.layer_mut(block, layer_idx) };
            KvDtype::Bf16.store_vectors(&vector, LAYOUT.head_dim, piece, &mut []);
        }
    }
    Arc::new(storage)
}
