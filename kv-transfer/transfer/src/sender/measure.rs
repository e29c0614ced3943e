//! Measures the rate and the latency of a transport to a peer's blocks, and the limits of the machine: memory and
//! loopback.

use std::{
    hint::black_box,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use baton_handoff::{Grant, PieceWrite, Source, TransportOffer};
use baton_kv_cache::{BlockId, KvLayout, KvShard, WireFormat};

use super::Sender;

/// Longest time of one measurement. A push that has begun may end later.
const PATIENCE: Duration = Duration::from_secs(2);

/// The result of measuring one transport.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Bytes of one push of all blocks.
    pub num_bytes: u64,
    /// Median rate of pushes of all blocks, from the call until the receiver's blocks hold the bytes. Hashing is
    /// included.
    pub bytes_per_second: f64,
    /// Median time of a push of one piece.
    pub latency: Duration,
}

impl Sender {
    /// Pushes `blocks` into the blocks of `peer` under each of `grants`. All grants name the same `offer` and equally
    /// many blocks. The first push opens connections and touches memory. Then half of the pushes have one piece, and
    /// the others have all pieces. If the sides differ, pieces are assembled as in a handoff. The sender remembers the
    /// rate for ten minutes. While it knows the rates of all offers of a pool, it takes the fastest.
    ///
    /// `keep` holds the source blocks allocated. Their contents do not matter.
    ///
    /// # Errors
    /// Why the transport cannot be used, as text for the operator.
    pub async fn measure<K: Clone + Send + 'static>(
        &self,
        peer: &KvShard,
        offer: &TransportOffer,
        grants: &[Grant],
        blocks: &[BlockId],
        keep: K,
    ) -> Result<Measured, String> {
        let measured = self.time_pushes(peer, offer, grants, blocks, keep).await;
        let rate = measured.as_ref().ok().map(|measured| measured.bytes_per_second);
        self.shared.context.ranking().measured(offer, rate, Instant::now());
        measured
    }

    async fn time_pushes<K: Clone + Send + 'static>(
        &self,
        peer: &KvShard,
        offer: &TransportOffer,
        grants: &[Grant],
        blocks: &[BlockId],
        keep: K,
    ) -> Result<Measured, String> {
        let began = Instant::now();
        let own = self.shared.context.storage.layout();
        let mut num_bytes = 0;
        let mut latencies = Vec::new();
        let mut rates = Vec::new();
        for (idx, grant) in grants.iter().enumerate() {
            let is_single = idx > 0 && idx <= (grants.len() - 1) / 2;
            if began.elapsed() > PATIENCE && !rates.is_empty() {
                break;
            }
            let mut writes = pieces(own, blocks, peer.layout(), &grant.block_ids);
            writes.truncate(if is_single { 1 } else { usize::MAX });
            let offers = std::slice::from_ref(offer);
            let route = self.route_to(peer, WireFormat::AsIs, grant.access_key(), offers, keep.clone()).await;
            let route = route.map_err(|error| error.to_string())?;
            let start = Instant::now();
            let pushed = route.push(writes).await.map_err(|error| error.to_string())?;
            let elapsed = start.elapsed();
            route.close().await;
            if is_single {
                latencies.push(elapsed);
            } else if idx > 0 || began.elapsed() > PATIENCE {
                num_bytes = pushed.bytes;
                rates.push(pushed.bytes as f64 / elapsed.as_secs_f64());
            }
        }
        rates.sort_by(f64::total_cmp);
        latencies.sort_unstable();
        let bytes_per_second = *rates.get(rates.len() / 2).ok_or("too few grants to measure with")?;
        let latency = latencies.get(latencies.len() / 2).copied().unwrap_or_default();
        Ok(Measured { num_bytes, bytes_per_second, latency })
    }
}

/// All pieces of a sequence of as many tokens as both sides have blocks for, layer by layer.
fn pieces(own: &KvLayout, src: &[BlockId], peer: &KvLayout, dst: &[BlockId]) -> Vec<PieceWrite> {
    let (own_size, peer_size) = (own.block_size, peer.block_size);
    let num_tokens = (src.len() * own_size).min(dst.len() * peer_size);
    let source = |block_idx: usize| {
        if own_size == peer_size {
            return Source::Block(src[block_idx]);
        }
        let tokens = block_idx * peer_size..num_tokens.min((block_idx + 1) * peer_size);
        let blocks = src[tokens.start / own_size..tokens.end.div_ceil(own_size)].into();
        Source::Tokens { tokens, blocks }
    };
    let blocks = || dst.iter().enumerate().take(num_tokens.div_ceil(peer_size));
    let layers = (0..own.num_layers as u32).flat_map(|layer_idx| {
        blocks().map(move |(idx, &dst)| PieceWrite {
            layer_idx,
            block_idx: idx as u32,
            src: source(idx),
            dst,
        })
    });
    layers.collect()
}

/// Bytes that one round copies: more than the caches hold.
const ROUND_BYTES: usize = 64 << 20;

/// The limit of memory: bytes per second of one thread that copies pieces of `piece_bytes` inside of this process, from
/// and to memory that is in no cache.
pub fn copy_rate(piece_bytes: usize) -> f64 {
    let (source, mut target) = (vec![1_u8; ROUND_BYTES], vec![0_u8; ROUND_BYTES]);
    let rate = rate(|| {
        for (target, source) in target.chunks_mut(piece_bytes).zip(source.chunks(piece_bytes)) {
            target.copy_from_slice(source);
        }
        // Keeps the compiler from removing a copy that is not read.
        black_box(&mut target);
        Ok(())
    });
    rate.unwrap_or_default()
}

/// The limit of sockets: bytes per second of one plain TCP stream over loopback, between two threads.
///
/// # Errors
/// When there is no loopback.
pub fn stream_rate() -> io::Result<f64> {
    const CHUNK_BYTES: usize = 256 << 10;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut ours = TcpStream::connect(listener.local_addr()?)?;
    let (mut theirs, _) = listener.accept()?;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut memory = vec![0; ROUND_BYTES];
            // Returns at the end of the stream.
            while theirs.read_exact(&mut memory).and_then(|()| theirs.write_all(&[1])).is_ok() {}
        });
        let memory = vec![1; ROUND_BYTES];
        let rate = rate(|| {
            memory.chunks(CHUNK_BYTES).try_for_each(|chunk| ours.write_all(chunk))?;
            ours.read_exact(&mut [0])
        });
        drop(ours);
        rate
    })
}

/// The median of the rounds after the first one.
fn rate(mut round: impl FnMut() -> io::Result<()>) -> io::Result<f64> {
    let mut times = Vec::new();
    for _ in 0..6 {
        let start = Instant::now();
        round()?;
        times.push(start.elapsed());
    }
    let times = &mut times[1..];
    times.sort_unstable();
    Ok(ROUND_BYTES as f64 / times[times.len() / 2].as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_kv_cache::BlockStorage;

    use super::*;
    use crate::{sender::SenderConfig, testing::LAYOUT};

    #[tokio::test]
    async fn a_failed_measurement_forgets_the_rate_before() {
        let storage = Arc::new(BlockStorage::new(LAYOUT, 4).unwrap());
        let sender = Sender::start(storage, SenderConfig::default(), Vec::new()).unwrap();
        let shm = TransportOffer::Shm { host_id: "here".into(), socket_path: "s".into(), pool: 1 };
        let tcp = TransportOffer::Tcp { address: "here:1".into(), pool: 1 };
        let now = Instant::now();
        for (offer, rate) in [(&shm, 1e9), (&tcp, 9e9)] {
            sender.shared.context.ranking().measured(offer, Some(rate), now);
        }
        let best = || sender.shared.context.ranking().sort(&mut [&shm, &tcp], now).cloned();
        assert_eq!(best().as_ref(), Some(&tcp));
        let peer = KvShard::new(&LAYOUT, 1, 0).unwrap();
        sender.measure(&peer, &tcp, &[], &[], ()).await.unwrap_err();
        assert_eq!(best().as_ref(), Some(&shm));
    }

    #[test]
    fn what_limits_is_measured() {
        // A rate above this means that the compiler removed the copy.
        assert!((1e6..1e12).contains(&copy_rate(64 << 10)));
        assert!(stream_rate().unwrap() > 0.0);
    }
}
