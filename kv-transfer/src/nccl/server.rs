//! The decode worker's end: a control port, and for each peer a thread that receives what it announces into the
//! blocks that it was granted.

use std::{
    collections::HashMap,
    io::{self, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tracing::{debug, error, info, warn};

use super::{
    MAX_GROUPS, NUM_SPINS, PAUSE,
    communicators::{Communicators, MAX_COMMUNICATORS, Slot},
    fabric::{Communicator, Direction, Fabric, Place, Rank, Reached},
    lane::Lane,
    wire::{self, MESSAGE_BYTES, Message, Refusal},
};
use crate::{
    message::{Generation, Pass, TransportKind, TransportOffer},
    receiver::{
        Acceptor, Admission, Claim, Grants, LiveGrant, OneSidedWriter, ReceiverConfig, Service, WriterId,
        listen,
    },
    tcp::socket,
};

/// Listens until dropped. Every communicator is gone then, so that nothing is written any more.
pub(crate) struct NcclServer {
    _acceptor: Acceptor<Sharing>,
    offer: TransportOffer,
}

/// What every connection needs.
struct Sharing {
    grants: Arc<Grants>,
    fabric: Arc<dyn Fabric>,
    pool: Reached,
    communicators: Arc<Communicators>,
    io_timeout: Duration,
    handshake_timeout: Duration,
}

impl NcclServer {
    pub(crate) fn start(
        grants: Arc<Grants>,
        fabric: Arc<dyn Fabric>,
        address: SocketAddr,
        config: &ReceiverConfig,
    ) -> io::Result<NcclServer> {
        let pool = fabric.reach(grants.storage()).map_err(io::Error::other)?;
        let (listener, address) = listen(TransportKind::Nccl, address, config)?;
        let offer = TransportOffer::Nccl { address, pool: grants.pool() };
        let sharing = Arc::new(Sharing {
            grants,
            fabric,
            pool,
            communicators: Communicators::new(MAX_COMMUNICATORS),
            io_timeout: config.io_timeout,
            handshake_timeout: config.handshake_timeout,
        });
        let acceptor = Acceptor::start(sharing, listener, config)?;
        Ok(NcclServer { _acceptor: acceptor, offer })
    }

    pub(crate) fn offer(&self) -> TransportOffer {
        self.offer.clone()
    }
}

impl Service for Sharing {
    type Listener = TcpListener;
    type Connection = Peer;

    const THREADS: (&str, &str) = ("kv-nccl-accept", "kv-nccl-peer");

    fn connection(&self, (socket, address): (TcpStream, SocketAddr)) -> Peer {
        Peer {
            socket: Arc::new(socket),
            address,
            writer: self.grants.new_writer(),
            is_evicted: Arc::new(AtomicBool::new(false)),
        }
    }

    fn hang_up(peer: &Peer) {
        // Fails when the peer was faster.
        let _ = peer.socket.shutdown(Shutdown::Both);
    }

    fn serve(&self, peer: &Arc<Peer>, admission: &Admission) {
        let counters = self.grants.counters().of(TransportKind::Nccl);
        let result = match self.greet(peer, admission) {
            Ok(Some((slot, communicator))) => {
                counters.routed(false);
                info!(peer = %peer.address, "nccl peer joined");
                Session::new(self, peer, slot, communicator).run()
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        match result {
            Ok(()) => debug!(peer = %peer.address, "nccl peer left"),
            Err(_) if admission.is_stopping() => {}
            Err(error) if admission.is_admitted() => {
                counters.failed();
                warn!(peer = %peer.address, %error, "nccl peer fenced");
            }
            Err(error) => admission.complain(&peer.address, &error),
        }
        // The registry keeps the descriptor until its next sweep; the peer must hear of it now.
        let _ = peer.socket.shutdown(Shutdown::Both);
    }
}

/// One peer's connection.
struct Peer {
    socket: Arc<TcpStream>,
    address: SocketAddr,
    writer: WriterId,
    is_evicted: Arc<AtomicBool>,
}

impl Peer {
    fn send(&self, message: Message) -> io::Result<()> {
        socket::send_at_once(&self.socket, &message.encode())
    }
}

/// Whoever writes is this side's own communicator.
impl OneSidedWriter for Peer {
    fn kind(&self) -> TransportKind {
        TransportKind::Nccl
    }

    fn ask_to_close(&self, _: Generation) {
        // What was posted ends by itself or is aborted, within `io_timeout`; nothing else is posted.
    }

    fn stops_by_word(&self) -> bool {
        false
    }
}

impl Sharing {
    /// The communicator with the peer, once both have joined.
    fn greet(&self, peer: &Peer, admission: &Admission) -> io::Result<Option<(Slot, Box<dyn Communicator>)>> {
        socket::configure(&peer.socket, self.io_timeout)?;
        let mut bytes = [0; MESSAGE_BYTES];
        socket::receive_until(&peer.socket, &mut bytes, Instant::now() + self.handshake_timeout)?;
        let layout = self.grants.storage().layout();
        let shape = (layout.num_layers as u32, layout.layer_bytes() as u64, layout.block_bytes() as u64);
        match decode(&bytes)? {
            Message::Hello { pool, num_layers, layer_bytes, block_bytes, pass } => {
                let is_sound = pool == self.grants.pool() && (num_layers, layer_bytes, block_bytes) == shape;
                if is_sound && self.grants.admit(&pass, None).is_some() && admission.admit() {
                    return self.join(peer);
                }
                // Whoever should not be here learns no more than that.
                peer.send(Message::Refused)?;
            }
            message => return Err(unexpected(message)),
        }
        Ok(None)
    }

    fn join(&self, peer: &Peer) -> io::Result<Option<(Slot, Box<dyn Communicator>)>> {
        let evict = {
            let (socket, is_evicted) = (Arc::clone(&peer.socket), Arc::clone(&peer.is_evicted));
            move || {
                is_evicted.store(true, Ordering::SeqCst);
                let _ = socket.shutdown(Shutdown::Both);
            }
        };
        // Half of what the peer waits for an answer.
        let Some(slot) = self.communicators.enter(evict, self.io_timeout / 2) else {
            warn!(peer = %peer.address, max_communicators = MAX_COMMUNICATORS, "nccl peer refused: all are busy");
            peer.send(Message::Busy)?;
            return Ok(None);
        };
        let joining = self
            .fabric
            .unique_id()
            .and_then(|id| self.fabric.join(&id, Rank::Receiver).map(|communicator| (id, communicator)));
        let (id, mut communicator) = match joining {
            Ok(joining) => joining,
            Err(error) => {
                peer.send(Message::Busy)?;
                return Err(io::Error::other(error));
            }
        };
        let mut welcome = Message::Welcome.encode().to_vec();
        welcome.extend(id.0);
        let joined = (&*peer.socket)
            .write_all(&welcome)
            .and_then(|()| wait_until_ready(&mut *communicator, &peer.socket, self.io_timeout));
        if let Err(error) = joined {
            // Nothing was posted: whether it succeeds does not matter to any block.
            let _ = communicator.abort();
            return Err(error);
        }
        Ok(Some((slot, communicator)))
    }
}

/// Waits until both ranks have joined, the socket has ended, or time is up.
pub(super) fn wait_until_ready(
    communicator: &mut dyn Communicator,
    socket: &TcpStream,
    timeout: Duration,
) -> io::Result<()> {
    let start = Instant::now();
    loop {
        if communicator.is_ready().map_err(io::Error::other)? {
            return Ok(());
        }
        if start.elapsed() >= timeout {
            return Err(socket::timed_out("joining an nccl communicator"));
        }
        // What can be read is the end of the stream, or the word of a peer that knows sooner that both have joined.
        if socket::is_readable_within(socket, Duration::from_millis(1))? && socket.peek(&mut [0])? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// What was announced, and is being received.
struct Group {
    grant: Arc<LiveGrant>,
    /// (layer, position in the grant), claimed.
    pieces: Vec<(u32, u32)>,
    places: Vec<Place>,
}

/// A joined peer, as its thread serves it.
struct Session<'a> {
    sharing: &'a Sharing,
    peer: &'a Arc<Peer>,
    slot: Slot,
    communicator: Box<dyn Communicator>,
    lane: Lane<Group>,
    /// Groups in the lane, by grant. As long as there is one, this peer is a writer of the grant.
    open: HashMap<Generation, usize>,
}

impl<'a> Session<'a> {
    fn new(
        sharing: &'a Sharing,
        peer: &'a Arc<Peer>,
        slot: Slot,
        communicator: Box<dyn Communicator>,
    ) -> Session<'a> {
        let lane = Lane::new(Instant::now());
        Session { sharing, peer, slot, communicator, lane, open: HashMap::new() }
    }

    /// Until the peer leaves, or has to be fenced; it is when this returns.
    fn run(mut self) -> io::Result<()> {
        let result = self.converse();
        let has_groups = !self.lane.is_empty();
        let Session { sharing, peer, mut communicator, lane, .. } = self;
        // The fence: from here on nothing of this peer gets into the pool.
        match communicator.abort() {
            Ok(()) => {
                for (group, _) in lane.into_items() {
                    group.grant.abandon(&group.pieces);
                }
                sharing.grants.writer_gone(peer.writer);
            }
            Err(error) if has_groups => {
                error!(peer = %peer.address, %error, "an nccl communicator does not end: its blocks are lost");
                std::mem::forget(Arc::clone(sharing.grants.storage()));
            }
            Err(error) => warn!(peer = %peer.address, %error, "an idle nccl communicator does not end"),
        }
        match result {
            Ok(()) if has_groups => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(_) if peer.is_evicted.load(Ordering::SeqCst) && !has_groups => Ok(()),
            result => result,
        }
    }

    fn converse(&mut self) -> io::Result<()> {
        let socket = &*self.peer.socket;
        let mut num_idle = 0;
        loop {
            let is_readable = match self.lane.is_empty() {
                // Between announcements a peer may be silent for as long as it likes.
                true => socket::wait_readable(socket, None)?,
                false if num_idle < NUM_SPINS => socket::is_readable_within(socket, Duration::ZERO)?,
                false => socket::is_readable_within(socket, PAUSE)?,
            };
            if is_readable {
                if socket.peek(&mut [0])? == 0 {
                    return Ok(());
                }
                self.receive()?;
            }
            let has_moved = self.advance()?;
            num_idle = if is_readable || has_moved { 0 } else { num_idle.saturating_add(1) };
            if self.lane.is_late(Instant::now(), self.sharing.io_timeout) {
                return Err(socket::timed_out("a group of pieces"));
            }
        }
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES];
        socket::receive_exact(&self.peer.socket, &mut bytes, self.sharing.io_timeout)?;
        let Message::Announce { sequence, pass, num_pieces } = decode(&bytes)? else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not an announcement"));
        };
        if self.lane.len() >= MAX_GROUPS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many announcements"));
        }
        let mut bytes = vec![0; wire::pieces_bytes(num_pieces)];
        socket::receive_exact(&self.peer.socket, &mut bytes, self.sharing.io_timeout)?;
        match self.accept(pass, wire::decode_pieces(&bytes)) {
            Ok(group) => {
                if self.lane.is_empty() {
                    self.slot.set_busy(true);
                }
                self.lane.accept(sequence, group, Instant::now());
                // Said before it is posted: what the peer posts meanwhile waits for it, in the same order.
                self.peer.send(Message::Go { sequence })
            }
            Err(why) => self.peer.send(Message::No { sequence, why }),
        }
    }

    /// Takes the pieces for this peer alone. From then on the grant's blocks are not released before the group ends.
    fn accept(&mut self, pass: Pass, pieces: Vec<(u32, u32)>) -> Result<Group, Refusal> {
        let Sharing { grants, pool, .. } = self.sharing;
        let grant = grants.admit(&pass, None).ok_or(Refusal::Revoked)?;
        if grant.claim(&pieces) != Claim::Taken {
            return Err(Refusal::Pieces);
        }
        if !grants.open(&pass, self.peer.writer, Arc::clone(self.peer) as Arc<dyn OneSidedWriter>) {
            grant.abandon(&pieces);
            return Err(Refusal::Revoked);
        }
        *self.open.entry(pass.generation).or_default() += 1;
        let storage = grants.storage();
        let places = pieces.iter().map(|&(layer_idx, block_idx)| {
            let block = grant.block(block_idx).expect("a claimed piece is in the grant");
            pool.place(storage.layer_offset(block, layer_idx as usize), storage.layout().layer_bytes())
        });
        let places = places.collect();
        Ok(Group { grant, pieces, places })
    }

    /// Posts what is next, and answers for what is done. Whether something was.
    fn advance(&mut self) -> io::Result<bool> {
        let mut has_moved = false;
        if let Some(group) = self.lane.next_to_post()
            && self.communicator.is_ready().map_err(io::Error::other)?
        {
            // SAFETY: the places lie in granted blocks, claimed for this group alone. They are released when the
            // group is done, or after the communicator was aborted.
            unsafe { self.communicator.post(Direction::Receive, &group.places) }.map_err(io::Error::other)?;
            self.lane.posted();
            has_moved = true;
        }
        if self.lane.is_empty() {
            return Ok(has_moved);
        }
        let num_done = self.communicator.num_done().map_err(io::Error::other)?;
        while let Some((sequence, group)) = self.lane.next_out(num_done, Instant::now()) {
            has_moved = true;
            group.grant.placed(&group.pieces);
            self.close(group.grant.generation());
            self.peer.send(Message::Landed { sequence })?;
        }
        if self.lane.is_empty() {
            self.slot.set_busy(false);
        }
        Ok(has_moved)
    }

    fn close(&mut self, generation: Generation) {
        let Some(num_groups) = self.open.get_mut(&generation) else { return };
        *num_groups -= 1;
        if *num_groups == 0 {
            self.open.remove(&generation);
            self.sharing.grants.close(generation, self.peer.writer);
        }
    }
}

fn decode(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Message> {
    Message::decode(bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed message"))
}

fn unexpected(message: Message) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected {message:?}"))
}
