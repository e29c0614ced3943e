//! The ways to move the pieces of a round: transports, plain copies and plain sockets.

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use baton_handoff::{PieceWrite, TransportKind, TransportOffer};
use baton_kv_cache::BlockStorage;
use baton_transfer::{Sender, SenderConfig, SendingTransport};
use baton_transport_nccl::NcclSending;
use baton_transport_rdma::RdmaSending;
use baton_transport_shm::ShmSending;
use baton_transport_tcp::TcpSending;

use super::{
    peer::{self, Handle},
    round::{Move, Round},
};

/// Moves the pieces of rounds.
pub(super) trait Contender {
    /// As the table shows it.
    fn name(&self) -> &'static str;

    /// Name of its baseline: the same work without a protocol. `None` for a baseline.
    fn base(&self) -> Option<&'static str>;

    /// Moves the pieces and says how long that took. `check`: also makes sure that they arrived.
    fn transfer(&mut self, round: &Round, check: bool) -> anyhow::Result<Duration>;
}

pub(super) const MEMCPY: &str = "memcpy";
pub(super) const STREAM: &str = "stream";

/// Copies within this process.
pub(super) struct Memcpy {
    pub(super) target: BlockStorage,
}

impl Contender for Memcpy {
    fn name(&self) -> &'static str {
        MEMCPY
    }

    fn base(&self) -> Option<&'static str> {
        None
    }

    fn transfer(&mut self, round: &Round, _check: bool) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for one in &round.moves {
            // SAFETY: no thread writes the source, and only this function knows the target.
            unsafe {
                self.target.layer_mut(one.dst, 0).copy_from_slice(round.source.layer(one.src, 0));
            }
        }
        Ok(start.elapsed())
    }
}

/// Plain sockets.
pub(super) struct PlainStreams(Vec<TcpStream>);

/// Less than this goes over one stream: a thread costs more than another stream gains.
const MIN_SPLIT_BYTES: usize = 2 << 20;

impl PlainStreams {
    pub(super) fn connect(port: u16, num_streams: usize) -> anyhow::Result<PlainStreams> {
        let stream = || {
            let stream = TcpStream::connect(("127.0.0.1", port)).context("the plain stream")?;
            stream.set_nodelay(true)?;
            anyhow::Ok(stream)
        };
        Ok(PlainStreams((0..num_streams).map(|_| stream()).collect::<Result<_, _>>()?))
    }
}

impl Contender for PlainStreams {
    fn name(&self) -> &'static str {
        STREAM
    }

    fn base(&self) -> Option<&'static str> {
        None
    }

    fn transfer(&mut self, round: &Round, _check: bool) -> anyhow::Result<Duration> {
        let first = round.moves.iter().map(|one| one.dst.idx()).min().context("no pieces")?;
        let start = Instant::now();
        if round.size_bytes < MIN_SPLIT_BYTES || self.0.len() == 1 {
            write_plain(&self.0[0], &round.source, &round.moves, first)?;
            return Ok(start.elapsed());
        }
        let num_each = round.moves.len().div_ceil(self.0.len());
        std::thread::scope(|scope| {
            let parts = self.0.iter().zip(round.moves.chunks(num_each)).enumerate();
            let threads: Vec<_> = parts
                .map(|(idx, (stream, moves))| {
                    scope.spawn(move || write_plain(stream, &round.source, moves, first + idx * num_each))
                })
                .collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("does not panic"))
        })?;
        Ok(start.elapsed())
    }
}

/// Pieces one after the other; they are read into one run from block `first` on, which is in favour of the plain
/// stream.
fn write_plain(
    mut stream: &TcpStream,
    source: &BlockStorage,
    moves: &[Move],
    first: usize,
) -> anyhow::Result<()> {
    let piece_bytes = source.layout().layer_bytes();
    let mut header = [0; peer::PLAIN_HEADER_BYTES];
    header[..8].copy_from_slice(&((first * piece_bytes) as u64).to_le_bytes());
    header[8..].copy_from_slice(&((moves.len() * piece_bytes) as u64).to_le_bytes());
    stream.write_all(&header)?;
    for one in moves {
        // SAFETY: no thread writes the source.
        stream.write_all(unsafe { source.layer(one.src, 0) })?;
    }
    stream.read_exact(&mut [0])?;
    Ok(())
}

/// A transport, through the sender and the receiver that workers use.
pub(super) struct Pushes {
    sender: Sender,
    is_secure: bool,
    offer: TransportOffer,
    peer: Handle,
}

impl Pushes {
    pub(super) fn new(
        source: &Arc<BlockStorage>,
        offer: TransportOffer,
        config: SenderConfig,
        tcp: TcpSending,
        nixl: Option<&Path>,
        peer: Handle,
    ) -> anyhow::Result<Pushes> {
        let is_secure = tcp.tls.is_some();
        let transport: Box<dyn SendingTransport> = match offer.kind() {
            TransportKind::Shm => Box::new(ShmSending::default()),
            TransportKind::Rdma => Box::new(RdmaSending::start(source, nixl)?),
            TransportKind::Nccl => Box::new(NcclSending::start(source, None)?),
            TransportKind::Tcp => Box::new(tcp),
        };
        let sender = Sender::start(Arc::clone(source), config, vec![transport])?;
        Ok(Pushes { sender, is_secure, offer, peer })
    }
}

impl Contender for Pushes {
    fn name(&self) -> &'static str {
        if self.is_secure { "tcp-tls" } else { self.offer.kind().name() }
    }

    fn base(&self) -> Option<&'static str> {
        Some(match self.offer.kind() {
            TransportKind::Shm => MEMCPY,
            // With the costs of both.
            TransportKind::Rdma => TransportKind::Tcp.name(),
            TransportKind::Tcp if self.is_secure => TransportKind::Tcp.name(),
            TransportKind::Tcp | TransportKind::Nccl => STREAM,
        })
    }

    fn transfer(&mut self, round: &Round, check: bool) -> anyhow::Result<Duration> {
        let blocks = round.moves.iter().map(|one| one.dst.0).collect();
        let access_key = self.peer.grant(blocks, self.is_secure)?;
        let offers = std::slice::from_ref(&self.offer);
        let route = peer::block_on(self.sender.route(access_key, offers, ()))??;
        let writes = round.moves.iter().enumerate().map(|(block_idx, one)| PieceWrite {
            layer_idx: 0,
            block_idx: block_idx as u32,
            src: one.src.into(),
            dst: one.dst,
        });
        let writes = writes.collect();
        let (pushed, elapsed) = peer::block_on(async {
            let start = Instant::now();
            (route.push(writes).await, start.elapsed())
        })?;
        let pushed = pushed?;
        ensure!(pushed.bytes == round.size_bytes as u64, "{} moved {} bytes", self.name(), pushed.bytes);
        if check {
            self.peer.verify(&pushed.pieces)?;
        }
        drop(route);
        self.peer.release()?;
        Ok(elapsed)
    }
}
