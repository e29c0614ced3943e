//! One connection of an [`RdmaPool`](crate::client): its agents, the frames that are on the wire, and the thread that
//! listens to the control connection.

use std::{
    io,
    net::TcpStream,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, Piece, PieceWrite, PushError, RouteError, TransportKind};
use baton_kv_cache::{BlockStorage, DeviceCopy, KvLayout, KvShard};
use baton_transfer::{
    StagingSlots,
    checksum::{Hasher, SumOf},
    ranks::RankPair,
    sender::{Active, Frame, Job, MAX_LOSSES, OpenGrants, unread},
    socket,
    socket::connect,
    word::Word,
};
use tracing::{info, warn};

use super::{
    link::{GONE, Link, Shared},
    nixl::{Agent, Nixl, NixlError, RemoteAgent, Transfer},
    wire::{MESSAGE_BYTES, Message, RankMemory},
};

/// Most frames on the wire. Enough to keep a device busy while the next frames are prepared, few enough
/// that one handoff does not delay other handoffs.
const MAX_FLIGHTS: usize = 16;

/// Why a connection is broken.
pub(super) enum Broken {
    /// The connection or the peer is gone.
    Lost(String),
    /// A write did not end in time.
    Silent(String),
}

/// A connected pool, as its thread uses it.
pub(super) struct Connection {
    shared: Arc<Shared>,
    socket: Arc<TcpStream>,
    ways: Vec<Way>,
    num_blocks: u64,
    flights: Vec<Flight>,
    /// Present if the peer's pieces differ from those of this side.
    staging: Option<StagingSlots>,
    hasher: Hasher,
    listener: JoinHandle<()>,
}

/// A pool, as its welcome describes it.
struct PeerPool {
    num_blocks: u64,
    ranks: Vec<PeerRank>,
}

/// The part of the pool on one rank.
struct PeerRank {
    memory: RankMemory,
    layout: KvLayout,
    metadata: Vec<u8>,
}

/// Why a connection has no welcome.
enum Rejected {
    /// The peer refused this side.
    Refused,
    Failed(io::Error),
}

/// The writes from one rank's memory, or from the assembly memory, into the memory of one rank of the peer.
struct Way {
    pair: RankPair,
    agent: Arc<Agent>,
    remote: RemoteAgent,
    target: RankMemory,
    /// The layout of the blocks in that memory.
    layout: KvLayout,
}

/// A piece's bytes, or their checksum.
enum Hashed<'a> {
    NotYet(&'a [u8]),
    To(u64),
}

/// A frame on the wire.
struct Flight {
    /// The transfers, one for each pair of ranks. Fewer if the connection broke meanwhile.
    transfers: Vec<Transfer>,
    since: Instant,
    frame: Frame,
    pieces: Vec<Piece>,
    /// The staging slot of its pieces, if they were assembled.
    place: Option<usize>,
    // Keeps the route busy while a device may read from its blocks.
    active: Active,
}

impl Connection {
    pub(super) fn open(shared: &Arc<Shared>, access_key: AccessKey) -> Result<Connection, RouteError> {
        let unreachable = |error: io::Error| RouteError::Unreachable(format!("{}: {error}", shared.address));
        let config = &shared.context.config;
        let storage = &shared.context.storage;
        let socket = connect(&shared.address, config.connect_timeout).map_err(unreachable)?;
        socket::configure(&socket, config.io_timeout).map_err(unreachable)?;
        let layout = shared.layout;
        let hello = Message::Hello {
            pool: shared.pool,
            num_layers: layout.num_layers as u32,
            layer_bytes: layout.layer_bytes() as u64,
            block_bytes: layout.block_bytes() as u64,
            access_key,
        };
        socket::send_at_once(&socket, &hello.encode()).map_err(unreachable)?;
        let peer = PeerPool::receive(shared, &socket).map_err(|error| match error {
            Rejected::Refused => RouteError::OtherIncarnation(shared.address.clone()),
            Rejected::Failed(error) => unreachable(error),
        })?;
        let staging = match layout == *storage.layout() {
            true => None,
            false => Some(StagingSlots::new(&layout, config.frame_bytes).map_err(unreachable)?),
        };
        let source = staging.as_ref().map_or(storage, |staging| &staging.memory);
        let ways = peer.ways(&shared.nixl, &layout, source).map_err(unreachable)?;

        shared.sum_of.get_or_init(|| SumOf::new(&layout, peer.ranks.len()));
        let socket = Arc::new(socket);
        // Set before the thread starts, because the thread looks for the link.
        *shared.link() = Some(Link { socket: Arc::clone(&socket), grants: OpenGrants::default() });
        let listener = thread::Builder::new().name("kv-rdma-listen".into()).spawn({
            let (shared, socket) = (Arc::clone(shared), Arc::clone(&socket));
            move || listen(&shared, &socket)
        });
        let listener = listener.map_err(|error| {
            shared.unlink(&socket);
            unreachable(error)
        })?;
        info!(address = %shared.address, "connected to a peer's kv memory over rdma");
        Ok(Connection {
            shared: Arc::clone(shared),
            socket,
            ways,
            num_blocks: peer.num_blocks,
            flights: Vec::with_capacity(MAX_FLIGHTS),
            staging,
            hasher: Hasher::default(),
            listener,
        })
    }

    pub(super) fn is_linked(&self) -> bool {
        self.shared.link().as_ref().is_some_and(|link| Arc::ptr_eq(&link.socket, &self.socket))
    }

    /// Of frames on the wire.
    pub(super) fn num_flights(&self) -> usize {
        self.flights.len()
    }

    /// For one more of them.
    pub(super) fn has_room(&self) -> bool {
        self.flights.len() < MAX_FLIGHTS && self.staging.as_ref().is_none_or(StagingSlots::has_place)
    }

    /// Whether no frame is on the wire and no grant is open.
    pub(super) fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.shared.link().as_ref().is_none_or(|link| link.grants.is_empty())
    }

    /// Puts a frame on the wire. If its grant was opened on a lost connection, the grant is opened again first.
    pub(super) fn post(&mut self, frame: Frame) {
        let route = Arc::clone(frame.route());
        if let Some(piece) = frame.pieces.iter().find(|piece| piece.dst.idx() as u64 >= self.num_blocks) {
            let message = format!("the peer has no block {}", piece.dst);
            return frame.fail(PushError::Refused(message));
        }
        let Some(active) = route.enter() else { return frame.fail(PushError::Closed) };
        {
            let mut slot = self.shared.link();
            let Some(link) = slot.as_mut().filter(|link| Arc::ptr_eq(&link.socket, &self.socket)) else {
                return self.shared.jobs.retry(frame, MAX_LOSSES, GONE);
            };
            if !link.grants.begin(route.generation()) {
                // The grant is revoked, or not open on this connection. The peer's answer tells which.
                let word = link.grants.wait(Job::Frame(frame));
                return link.say(word);
            }
        }
        let place = self.staging.as_mut().and_then(|staging| staging.place_for(&route));
        // SAFETY: the pieces are final, and the route keeps them until `active` is dropped. Only this flight uses the
        // slot.
        let sources = match unsafe { self.sources(&frame, place) } {
            Ok(sources) => sources,
            Err(error) => {
                self.give_back(place);
                drop(active);
                if let Some(link) = self.shared.link().as_mut() {
                    let word = link.grants.landed(route.generation());
                    link.say(word);
                }
                return frame.fail(unread(&error));
            }
        };
        let since = Instant::now();
        // SAFETY: the pieces are final, as above, until the flight is dropped. That happens after the transfers have
        // ended or the agents are gone. The targets are granted: `Close` is not sent before this flight has landed.
        let write = |way: &Way| unsafe { way.write(&frame, &sources) };
        let mut transfers = Vec::with_capacity(self.ways.len());
        for transfer in self.ways.iter().map(write) {
            match transfer {
                Ok(transfer) => transfers.push(transfer),
                Err(error) => {
                    warn!(address = %self.shared.address, %error, "rdma connection closed: NIXL refused a write");
                    // The next look at the flights ends the connection.
                    self.shared.unlink(&self.socket);
                    break;
                }
            }
        }
        let pieces = frame.pieces.iter().zip(sources).map(|(piece, source)| Piece {
            block_idx: piece.block_idx,
            layer_idx: piece.layer_idx,
            checksum: match source {
                // Hash while the device reads the same bytes.
                Hashed::NotYet(bytes) => route.checksum(bytes),
                Hashed::To(checksum) => checksum,
            },
        });
        let pieces = pieces.collect();
        self.flights.push(Flight { transfers, since, frame, pieces, place, active });
    }

    /// The bytes of each piece. Pieces on a device are hashed here, before any write begins: the device may fail.
    ///
    /// # Safety
    /// As of [`StagingSlots::sources`].
    unsafe fn sources<'a>(&mut self, frame: &'a Frame, place: Option<usize>) -> io::Result<Vec<Hashed<'a>>> {
        let route = frame.route();
        if let Some(staging) = &mut self.staging {
            // SAFETY: by the caller's word.
            let sources = unsafe { staging.sources(route, &frame.pieces, place) }?;
            return Ok(sources.into_iter().map(Hashed::NotYet).collect());
        }
        let storage = route.storage();
        let pieces = frame.pieces.iter().map(PieceWrite::source);
        if storage.device().is_none() {
            // SAFETY: by the caller's word.
            let bytes = |(block, layer_idx)| Hashed::NotYet(unsafe { storage.layer(block, layer_idx) });
            return Ok(pieces.map(bytes).collect());
        }
        let pieces: Vec<_> = pieces.collect();
        // SAFETY: by the caller's word.
        let sums = unsafe { self.hasher.checksums(storage, &pieces, route.generation(), route.sum_of()) }?;
        Ok(sums.into_iter().map(Hashed::To).collect())
    }

    fn give_back(&mut self, place: Option<usize>) {
        if let Some(staging) = &mut self.staging {
            staging.give_back(place);
        }
    }

    /// Answers the flights that have ended. Returns how many.
    ///
    /// # Errors
    /// When the connection is broken.
    pub(super) fn land(&mut self) -> Result<usize, Broken> {
        let io_timeout = self.shared.context.config.io_timeout;
        let mut num_landed = 0;
        let mut idx = 0;
        while idx < self.flights.len() {
            let flight = &self.flights[idx];
            if flight.is_done(self.ways.len()).map_err(|error| Broken::Lost(error.to_string()))? {
                let Flight { transfers, frame, pieces, place, active, .. } = self.flights.remove(idx);
                drop(transfers);
                self.give_back(place);
                if let Some(link) = self.shared.link().as_mut() {
                    let word = link.grants.landed(frame.route().generation());
                    link.say(word);
                }
                // The route must be idle before the push is answered: the caller may close it and wait right after.
                drop(active);
                frame.done(pieces);
                num_landed += 1;
            } else if flight.since.elapsed() >= io_timeout {
                return Err(Broken::Silent(format!("not written within {io_timeout:?}")));
            } else {
                idx += 1;
            }
        }
        if self.is_linked() { Ok(num_landed) } else { Err(Broken::Lost(GONE.to_owned())) }
    }

    /// Ends all flights. Frames of a lost connection are written again on the next one. Frames of a peer that did not
    /// answer in time fail.
    pub(super) fn end(self, broken: &Broken) {
        let (Broken::Lost(why) | Broken::Silent(why)) = broken;
        let Connection { shared, socket, ways, flights, listener, .. } = self;
        if shared.unlink(&socket) && !flights.is_empty() {
            shared.context.counters.of(TransportKind::Rdma).failed();
            warn!(address = %shared.address, why, num_frames = flights.len(), "rdma connection given up: its writes did not end in time");
        }
        let mut lost = Vec::with_capacity(flights.len());
        for Flight { transfers, frame, active, .. } in flights {
            drop(transfers);
            lost.push((frame, active));
        }
        // This connection owns the agents, so dropping them ends all writes.
        drop(ways);
        // No device uses the blocks any more, so the routes may become idle.
        // The oldest goes to the front of the queue last.
        for (frame, active) in lost.into_iter().rev() {
            drop(active);
            match broken {
                Broken::Lost(why) => shared.jobs.retry(frame, MAX_LOSSES, why),
                Broken::Silent(why) => frame.fail(PushError::Lost(why.clone())),
            }
        }
        // A panic there has been reported by the panic hook.
        let _ = listener.join();
    }
}

impl PeerPool {
    /// Reads the welcome.
    fn receive(shared: &Shared, socket: &TcpStream) -> Result<PeerPool, Rejected> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        // The peer registers its memory before it answers, which takes longer than a greeting.
        let config = &shared.context.config;
        let timeout = config.connect_timeout.max(config.io_timeout);
        let (num_blocks, num_ranks) = match receive_within(socket, timeout)? {
            Some(Message::Welcome { num_blocks, num_ranks }) => (num_blocks, num_ranks as usize),
            Some(Message::Word(Word::Refused)) => return Err(Rejected::Refused),
            _ => return Err(invalid("no rdma control port".into()).into()),
        };
        let rank = |rank| {
            let shard = KvShard::new(&shared.layout, num_ranks, rank);
            let layout = *shard.map_err(|error| invalid(error.to_string()))?.layout();
            let memory = match receive_within(socket, timeout)? {
                Some(Message::RankMemory(memory)) => memory,
                _ => return Err(malformed()),
            };
            if !memory.can_hold(num_blocks, layout.block_bytes()) {
                return Err(invalid(format!("{num_blocks} blocks at {:#x}", memory.base)));
            }
            let mut metadata = vec![0; memory.metadata_bytes as usize];
            socket::receive_exact(socket, &mut metadata, timeout)?;
            Ok(PeerRank { memory, layout, metadata })
        };
        let ranks = (0..num_ranks).map(rank).collect::<io::Result<_>>()?;
        Ok(PeerPool { num_blocks, ranks })
    }

    /// Registers `source` and connects to the ranks that share heads with it; all pieces are arranged as `whole`.
    fn ways(&self, nixl: &Nixl, whole: &KvLayout, source: &Arc<BlockStorage>) -> io::Result<Vec<Way>> {
        let pairs = RankPair::all(whole, source.num_ranks(), self.ranks.len()).map_err(io::Error::other)?;
        let agent =
            |rank| Agent::new(nixl, &format!("prefill-{rank}"), Arc::clone(source), rank).map(Arc::new);
        let agents: Result<Vec<_>, NixlError> = (0..source.num_ranks()).map(agent).collect();
        let agents = agents.map_err(io::Error::other)?;
        let way = |pair: RankPair| {
            let (agent, target) = (Arc::clone(&agents[pair.source]), &self.ranks[pair.target]);
            let remote = agent.connect(&target.metadata).map_err(io::Error::other)?;
            Ok(Way { pair, agent, remote, target: target.memory, layout: target.layout })
        };
        pairs.into_iter().map(way).collect()
    }
}

impl From<io::Error> for Rejected {
    fn from(error: io::Error) -> Rejected {
        Rejected::Failed(error)
    }
}

impl Way {
    /// Begins to write its part of a frame's pieces.
    ///
    /// # Safety
    /// As of [`Agent::write`].
    unsafe fn write(&self, frame: &Frame, sources: &[Hashed<'_>]) -> Result<Transfer, NixlError> {
        let region = frame.route().storage().region(self.pair.source);
        let copies = frame.pieces.iter().zip(sources).flat_map(|(piece, source)| {
            let (block, layer_idx) = piece.source();
            let source = match source {
                Hashed::NotYet(bytes) => bytes.as_ptr() as u64,
                Hashed::To(_) => region.piece(block, layer_idx),
            };
            let target = self.target.base + self.layout.piece_offset(piece.dst, layer_idx) as u64;
            self.pair.copies(source, target)
        });
        let copies: Vec<DeviceCopy> = copies.collect();
        // SAFETY: by the caller's word.
        unsafe { self.agent.write(&self.remote, self.target.memory, &copies) }
    }
}

impl Flight {
    /// Whether all writes of the flight are in the peer's memory.
    fn is_done(&self, num_ways: usize) -> Result<bool, NixlError> {
        for transfer in &self.transfers {
            if !transfer.is_done()? {
                return Ok(false);
            }
        }
        Ok(self.transfers.len() == num_ways)
    }
}

fn listen(shared: &Shared, socket: &Arc<TcpStream>) {
    let error = loop {
        let message = match receive(socket, shared.context.config.io_timeout) {
            Ok(Some(message)) => message,
            Ok(None) => break "closed by the peer".to_owned(),
            Err(error) => break error.to_string(),
        };
        let mut slot = shared.link();
        let Some(link) = slot.as_mut().filter(|link| Arc::ptr_eq(&link.socket, socket)) else { return };
        let Message::Word(word) = message else { break format!("unexpected {message:?}") };
        match link.grants.hear(word, &shared.jobs) {
            Ok(answer) => link.say(answer),
            Err(other) => break format!("unexpected {other:?}"),
        }
    };
    if shared.unlink(socket) {
        shared.context.counters.of(TransportKind::Rdma).failed();
        warn!(address = %shared.address, %error, "rdma connection lost: its frames are written again");
    }
}

/// Reads the next message. There is no deadline between messages. `None`: the peer has closed the stream.
fn receive(socket: &TcpStream, timeout: Duration) -> io::Result<Option<Message>> {
    socket::wait_readable(socket, None)?;
    let mut bytes = [0; MESSAGE_BYTES];
    if socket.peek(&mut bytes[..1])? == 0 {
        return Ok(None);
    }
    match receive_within(socket, timeout)? {
        Some(message) => Ok(Some(message)),
        None => Err(malformed()),
    }
}

/// Decodes the next message. `None`: it is malformed.
fn receive_within(socket: &TcpStream, timeout: Duration) -> io::Result<Option<Message>> {
    let mut bytes = [0; MESSAGE_BYTES];
    socket::receive_exact(socket, &mut bytes, timeout)?;
    Ok(Message::decode(&bytes))
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "malformed message")
}
