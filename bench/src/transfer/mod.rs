//! `baton bench transfer`: how fast KV blocks travel between two processes, by each transport, beside plain copies and
//! plain sockets on the same machine.
//!
//! The second process is this program again ([`peer`]). The sender and the receiver are those of workers. All ways to
//! move the same blocks take turns within a round ([`contender`]), so that other load on the machine affects all of
//! them alike.

mod contender;
mod peer;
mod report;
mod round;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::ensure;
use baton_command::{Size, TlsArgs, at_least_one, parse_size, print};
use baton_handoff::TransportKind;
use baton_kv_cache::{BlockId, BlockStorage, MachineMemory};
use baton_random::Random;
use baton_transfer::SenderConfig;
use baton_transport_tcp::TcpSending;
use clap::Args;

use self::{
    contender::{Contender, Memcpy, PlainStreams, Pushes},
    peer::{Peer, PoolConfig},
    report::{Entry, Report, Row},
    round::{Move, Round, Shape, layout, storage},
};
use super::{progress::Progress, stats::Summary};

pub(crate) use peer::serve;

const EXAMPLES: &str = "\
What is measured:
  GB/s    bytes over the median time of a push, from the call until the
          sender knows that the bytes are in the receiver's blocks; checksums
          are part of it, the grant's way there is not
  memcpy  one thread copies the same pieces from and to memory that no cache
          holds
  stream  TCP sockets, as many as the transport has, that write the same
          pieces and read them in place
  x ...   how fast a transport is by one of these two: 0.9 x stream is nine
          tenths of what plain sockets do

With --tls-cert, --tls-key and --tls-ca, tcp-tls is measured too: tcp inside of
TLS 1.3.

rdma is measured too where --transport or --nixl names it. Without a device for
it, UCX takes sockets, which `UCX_TLS=tcp` makes sure of.";

/// The arguments of `baton bench transfer`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TransferArgs {
    /// Smallest transfer.
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = parse_size)]
    from: Size,
    /// Largest transfer. Each process needs four times as much memory.
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    to: Size,
    /// How the pieces of a transfer are placed in memory.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "contiguous,scattered")]
    shape: Vec<Shape>,
    /// Size of the pieces of a scattered transfer: one layer of a block.
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = parse_size)]
    piece: Size,
    /// Transports to measure. Default: shm, tcp, and rdma if --nixl is given.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = parse_transport)]
    transport: Vec<TransportKind>,
    /// NIXL's library for rdma, libnixl_capi.so or its folder. Default: where the system's loader finds it.
    #[arg(long, value_name = "PATH", env = "BATON_NIXL")]
    nixl: Option<PathBuf>,
    /// TCP connections, of the transport and of the plain stream.
    #[arg(long, value_name = "N", default_value_t = TcpSending::default().streams_per_peer, value_parser = at_least_one)]
    streams: usize,
    /// KV bytes of one frame over TCP.
    #[arg(long, value_name = "SIZE", default_value_t = Size(SenderConfig::default().frame_bytes), value_parser = parse_size)]
    frame: Size,
    /// Buffer size of each socket of the transport. Default: chosen by the kernel.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    socket_buffer: Option<Size>,
    /// With certificates, tcp inside TLS is measured too.
    #[command(flatten)]
    tls: TlsArgs,
    /// Seconds for each size and shape. Each transfer is made at least five times.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.8)]
    seconds: f64,
    /// Show no progress on standard error.
    #[arg(long, short)]
    quiet: bool,
    /// Write the report as JSON to a file, or with - to standard output instead of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Of a transfer, and of a piece.
const MIN_BYTES: usize = 4 << 10;
/// A run is cut into pieces of at most so much.
const MAX_RUN_BYTES: usize = 1 << 20;
/// A pool is at least this large, so that no cache holds it.
const MIN_POOL_BYTES: usize = 128 << 20;
const MIN_ROUNDS: usize = 5;
const MAX_ROUNDS: usize = 400;

/// One size in one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    shape: Shape,
    size_bytes: usize,
    piece_bytes: usize,
}

/// Measures, and prints the report.
pub(crate) fn run(args: TransferArgs) -> anyhow::Result<()> {
    let cases = args.cases()?;
    let progress = if args.quiet { Progress::hidden() } else { Progress::new(cases.len(), "sizes") };
    let mut peer = Peer::start()?;
    let mut rows = Vec::new();
    // Cases with pieces of one size in one shape share memory.
    for cases in cases.chunk_by(|a, b| (a.shape, a.piece_bytes) == (b.shape, b.piece_bytes)) {
        let largest = cases.iter().map(|case| case.size_bytes).max().unwrap_or_default();
        let mut bench = Bench::new(&args, &mut peer, cases[0].piece_bytes, largest)?;
        for &case in cases {
            rows.push(bench.measure(case, Duration::try_from_secs_f64(args.seconds)?)?);
            progress.done(true);
        }
    }
    progress.finish();
    print(&Report { streams: args.streams, rows }, args.json.as_deref())
}

impl TransferArgs {
    /// Powers of four, and the largest.
    fn cases(&self) -> anyhow::Result<Vec<Case>> {
        let (from, to) = (self.from.0.next_power_of_two().max(MIN_BYTES), self.to.0.next_power_of_two());
        ensure!(from <= to, "--from is larger than --to");
        if let Some(room) = MachineMemory::read().map(|memory| memory.available_bytes) {
            ensure!(
                to.saturating_mul(8) <= room,
                "transfers of {} need {} of memory in two processes, and {} are free: choose a smaller --to",
                report::size(to),
                report::size(to * 8),
                report::size(room)
            );
        }
        let sizes: Vec<_> = std::iter::successors(Some(from), |size| Some(size * 4))
            .take_while(|&size| size < to)
            .chain([to])
            .collect();
        let piece_bytes = self.piece.0.next_power_of_two().max(MIN_BYTES);
        let cases = self.shape.iter().flat_map(|&shape| {
            let max_piece_bytes = match shape {
                Shape::Contiguous => MAX_RUN_BYTES,
                Shape::Scattered => piece_bytes,
            };
            // A single piece has no order.
            let is_told = move |size: usize| shape == Shape::Contiguous || size > max_piece_bytes;
            sizes.iter().filter(move |&&size| is_told(size)).map(move |&size_bytes| Case {
                shape,
                size_bytes,
                piece_bytes: size_bytes.min(max_piece_bytes),
            })
        });
        Ok(cases.collect())
    }
}

/// Memory of both sides, and everything that moves it.
struct Bench {
    source: Arc<BlockStorage>,
    contenders: Vec<Box<dyn Contender>>,
    random: Random,
}

impl Bench {
    fn new(
        args: &TransferArgs,
        peer: &mut Peer,
        piece_bytes: usize,
        largest: usize,
    ) -> anyhow::Result<Bench> {
        let layout = layout(piece_bytes);
        let num_blocks = (2 * largest).max(MIN_POOL_BYTES) / piece_bytes;
        let source = Arc::new(storage(layout, num_blocks, 1)?);
        let socket_buffer_bytes = args.socket_buffer.map(|size| size.0);
        let has_rdma = match args.transport.is_empty() {
            true => args.nixl.is_some(),
            false => args.transport.contains(&TransportKind::Rdma),
        };
        let rdma = has_rdma.then(|| args.nixl.clone());
        let pool = peer.pool(PoolConfig {
            piece_bytes,
            num_blocks,
            socket_buffer_bytes,
            rdma,
            tls: args.tls.files(),
        })?;
        let config = SenderConfig { frame_bytes: args.frame.0, ..SenderConfig::default() };
        let tcp = TcpSending { streams_per_peer: args.streams, socket_buffer_bytes, tls: None };
        let mut contenders: Vec<Box<dyn Contender>> = vec![
            Box::new(Memcpy { target: storage(layout, num_blocks, 2)? }),
            Box::new(PlainStreams::connect(pool.plain_port, args.streams)?),
        ];
        // Best first.
        for offer in pool.offers {
            if args.transport.is_empty() || args.transport.contains(&offer.kind()) {
                let (nixl, tcp) = (args.nixl.as_deref(), tcp.clone());
                contenders.push(Box::new(Pushes::new(
                    &source,
                    offer,
                    config.clone(),
                    tcp,
                    nixl,
                    peer.handle(),
                )?));
            }
        }
        if let Some(offer) = pool.secure_offer {
            let tcp = TcpSending { tls: args.tls.load()?, ..tcp };
            contenders.push(Box::new(Pushes::new(&source, offer, config, tcp, None, peer.handle())?));
        }
        let mut bench = Bench { source, contenders, random: Random::new(1) };
        bench.touch()?;
        Ok(bench)
    }

    /// A warm-up: moves everything once, which maps the pages of both sides and opens connections.
    fn touch(&mut self) -> anyhow::Result<()> {
        let num_blocks = self.source.num_blocks();
        let piece_bytes = self.source.layout().layer_bytes();
        let all = Case { shape: Shape::Contiguous, size_bytes: num_blocks * piece_bytes, piece_bytes };
        let round = self.round(all, 0);
        self.contenders.iter_mut().try_for_each(|contender| contender.transfer(&round, true).map(drop))
    }

    fn measure(&mut self, case: Case, time: Duration) -> anyhow::Result<Row> {
        let mut times = vec![Vec::new(); self.contenders.len()];
        let mut total = Duration::ZERO;
        let mut round_idx = 0;
        let num_contenders = self.contenders.len();
        while round_idx <= MIN_ROUNDS || (round_idx <= MAX_ROUNDS && total < time) {
            for (nth, times) in times.iter_mut().enumerate() {
                // Another part of the pools: the previous contender has left its part in the caches.
                let round = self.round(case, round_idx * num_contenders + nth);
                let elapsed = self.contenders[nth].transfer(&round, round_idx == 0)?;
                if round_idx > 0 {
                    times.push(elapsed.as_secs_f64());
                    total += elapsed;
                }
            }
            round_idx += 1;
        }
        let entries = self.contenders.iter().zip(times).map(|(contender, times)| {
            let times = Summary::of(times).expect("at least one round");
            Entry::new(contender.name(), contender.base(), case.size_bytes, times)
        });
        Ok(Row::new(case.shape, case.size_bytes, case.piece_bytes, entries.collect()))
    }

    /// The next part of the pools.
    fn round(&mut self, case: Case, part_idx: usize) -> Round {
        let num_pieces = case.size_bytes / self.source.layout().layer_bytes();
        let first = part_idx % (self.source.num_blocks() / num_pieces) * num_pieces;
        let mut src: Vec<_> = (first..first + num_pieces).map(|block| BlockId(block as u32)).collect();
        let mut dst = src.clone();
        if case.shape == Shape::Scattered {
            self.random.shuffle(&mut src);
            self.random.shuffle(&mut dst);
        }
        let moves = src.into_iter().zip(dst).map(|(src, dst)| Move { src, dst }).collect();
        Round { source: Arc::clone(&self.source), moves, size_bytes: case.size_bytes }
    }
}

fn parse_transport(name: &str) -> Result<TransportKind, String> {
    TransportKind::from_name(name).ok_or_else(|| {
        let names = TransportKind::ALL.map(TransportKind::name).join(", ");
        format!("expected one of {names}")
    })
}
