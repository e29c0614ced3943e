//! One connection of an [`RdmaPeer`](super::RdmaPeer): its agent, the frames that are on the wire, and the thread that
//! listens to the control connection.

use std::{
    io,
    net::TcpStream,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tracing::{info, warn};

use super::{
    client::{GONE, Link, Shared},
    nixl::{Agent, Copy, Memory, RemoteAgent, Transfer},
    staging::Staging,
    wire::{MESSAGE_BYTES, Message, Welcome},
};
use crate::{
    checksum::{Hasher, checksum},
    error::{PushError, RouteError},
    message::{Pass, Piece, TransportKind},
    sender::{Active, Frame, Job, MAX_LOSSES, OpenGrants},
    tcp::{connect, socket},
    word::Word,
};

/// Frames on the wire at a time: enough to keep a device busy while the next ones are prepared, few enough
/// that one handoff does not make the others wait.
const MAX_FLIGHTS: usize = 16;

/// Why a connection is of no use any more, in words.
pub(super) enum Broken {
    /// It, or the peer, is gone.
    Lost(String),
    /// The peer has not taken in time what was written.
    Silent(String),
}

/// A connected pool, as its thread sees it.
pub(super) struct Connection {
    shared: Arc<Shared>,
    socket: Arc<TcpStream>,
    agent: Arc<Agent>,
    remote: RemoteAgent,
    pool: Welcome,
    flights: Vec<Flight>,
    staging: Staging,
    hasher: Hasher,
    listener: JoinHandle<()>,
}

/// A piece's bytes, or what they were hashed to.
enum Hashed<'a> {
    NotYet(&'a [u8]),
    To(u64),
}

/// A frame on the wire.
struct Flight {
    transfer: Transfer,
    since: Instant,
    frame: Frame,
    pieces: Vec<Piece>,
    /// Where its pieces were put together, if they were.
    place: Option<usize>,
    // The route is not idle while a device may read from its blocks.
    active: Active,
}

impl Connection {
    pub(super) fn open(shared: &Arc<Shared>, pass: Pass) -> Result<Connection, RouteError> {
        let unreachable = |error: io::Error| RouteError::Unreachable(format!("{}: {error}", shared.address));
        let nixl_failed = |error| unreachable(io::Error::other(error));
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
            pass,
        };
        socket::send_at_once(&socket, &hello.encode()).map_err(unreachable)?;
        let mut bytes = [0; MESSAGE_BYTES];
        // The peer registers its memory before it answers, which takes longer than a greeting.
        let timeout = config.connect_timeout.max(config.io_timeout);
        socket::receive_exact(&socket, &mut bytes, timeout).map_err(unreachable)?;
        let pool = match Message::decode(&bytes) {
            Some(Message::Welcome(pool)) if pool.is_sound(layout.block_bytes()) => pool,
            Some(Message::Word(Word::Refused)) => {
                return Err(RouteError::OtherIncarnation(shared.address.clone()));
            }
            _ => return Err(RouteError::Unreachable(format!("{} is no rdma control port", shared.address))),
        };
        let mut metadata = vec![0; pool.metadata_bytes as usize];
        socket::receive_exact(&socket, &mut metadata, timeout).map_err(unreachable)?;
        let staging = Staging::new(&layout, config.frame_bytes).map_err(unreachable)?;
        let memories = vec![Arc::clone(storage), Arc::clone(&staging.memory)];
        let agent = Agent::new(&shared.nixl, "prefill", memories).map_err(nixl_failed)?;
        let remote = agent.connect(&metadata).map_err(nixl_failed)?;

        let socket = Arc::new(socket);
        // Before the thread: it looks for the link.
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
            agent: Arc::new(agent),
            remote,
            pool,
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
        self.flights.len() < MAX_FLIGHTS && self.staging.has_place()
    }

    /// Puts a frame on the wire, or has its grant opened first, if it was opened on a connection that is gone.
    pub(super) fn post(&mut self, frame: Frame) {
        let route = Arc::clone(frame.route());
        let Some(targets) = self.targets(&frame) else {
            return frame.fail(PushError::Refused("the peer has no such block".into()));
        };
        let Some(active) = route.enter() else { return frame.fail(PushError::Closed) };
        {
            let mut slot = self.shared.link();
            let Some(link) = slot.as_mut().filter(|link| Arc::ptr_eq(&link.socket, &self.socket)) else {
                return self.shared.jobs.retry(frame, MAX_LOSSES, GONE);
            };
            if !link.grants.begin(route.generation()) {
                // Or it is revoked, as the peer will say.
                let word = link.grants.wait(Job::Frame(frame));
                return link.say(word);
            }
        }
        let place = self.staging.place_for(&route);
        // SAFETY: the pieces are final and kept by the route, which is not idle before `active` is dropped; the
        // place is this flight's alone.
        let sources = match unsafe { self.sources(&frame, place) } {
            Ok(sources) => sources,
            Err(error) => {
                self.staging.give_back(place);
                drop(active);
                if let Some(link) = self.shared.link().as_mut() {
                    let word = link.grants.landed(route.generation());
                    link.say(word);
                }
                return frame.fail(PushError::unread(&error));
            }
        };
        let copies =
            sources.iter().zip(targets).map(|((source, _), target)| Copy { source: *source, target });
        let copies: Vec<Copy> = copies.collect();
        let memory = if place.is_some() { Memory::Dram } else { Memory::of(route.storage()) };
        let since = Instant::now();
        // SAFETY: nobody writes the pieces, as above, until the flight is dropped; that is after the transfer
        // has ended, or after the agent is gone. Their targets are granted: until this flight has landed, nobody
        // says `Close`.
        let written = unsafe {
            self.agent.write(&self.remote, [memory, self.pool.memory], &copies, route.piece_bytes())
        };
        let transfer = match written {
            Ok(transfer) => transfer,
            Err(error) => {
                warn!(address = %self.shared.address, %error, "rdma write refused: disconnecting");
                // The rest is done when the flights are looked at next.
                self.shared.unlink(&self.socket);
                drop(active);
                return self.shared.jobs.retry(frame, MAX_LOSSES, &error.to_string());
            }
        };
        let pieces = frame.pieces.iter().zip(sources).map(|(piece, (_, bytes))| Piece {
            block_idx: piece.block_idx,
            layer_idx: piece.layer_idx,
            checksum: match bytes {
                // Hashed while the device reads the same bytes.
                Hashed::NotYet(bytes) => checksum(bytes, route.generation()),
                Hashed::To(checksum) => checksum,
            },
        });
        let pieces = pieces.collect();
        self.flights.push(Flight { transfer, since, frame, pieces, place, active });
    }

    /// Where each piece is, and its bytes. Those of a device are hashed here: if it does not give them, nothing
    /// has begun yet.
    ///
    /// # Safety
    /// As of [`Staging::sources`].
    unsafe fn sources<'a>(
        &mut self,
        frame: &'a Frame,
        place: Option<usize>,
    ) -> io::Result<Vec<(u64, Hashed<'a>)>> {
        let route = frame.route();
        let storage = route.storage();
        if storage.device().is_none() || place.is_some() {
            // SAFETY: by the caller's word.
            let sources = unsafe { self.staging.sources(route, &frame.pieces, place) }?;
            return Ok(sources
                .into_iter()
                .map(|bytes| (bytes.as_ptr() as u64, Hashed::NotYet(bytes)))
                .collect());
        }
        let pieces: Vec<_> =
            frame.pieces.iter().map(|piece| (piece.src.blocks()[0], piece.layer_idx as usize)).collect();
        // SAFETY: by the caller's word.
        let sums = unsafe { self.hasher.checksums(storage, &pieces, route.generation()) }?;
        let address =
            |&(block, layer_idx): &_| storage.address() + storage.layer_offset(block, layer_idx) as u64;
        Ok(pieces.iter().map(address).zip(sums.into_iter().map(Hashed::To)).collect())
    }

    /// Where each piece goes; `None` when the peer's pool has no such place.
    fn targets(&self, frame: &Frame) -> Option<Vec<u64>> {
        let layout = &self.shared.layout;
        let targets = frame.pieces.iter().map(|piece| {
            let offset = layout.layer_offset(piece.layer_idx as usize);
            self.pool.address(piece.dst.idx(), layout.block_bytes(), offset)
        });
        targets.collect()
    }

    /// Answers for the flights that have ended, and says how many.
    ///
    /// # Errors
    /// When the connection is of no use any more.
    pub(super) fn land(&mut self) -> Result<usize, Broken> {
        let io_timeout = self.shared.context.config.io_timeout;
        let mut num_landed = 0;
        let mut idx = 0;
        while idx < self.flights.len() {
            let flight = &self.flights[idx];
            if flight.transfer.is_done().map_err(|error| Broken::Lost(error.to_string()))? {
                let Flight { transfer, frame, pieces, place, active, .. } = self.flights.remove(idx);
                drop(transfer);
                self.staging.give_back(place);
                if let Some(link) = self.shared.link().as_mut() {
                    let word = link.grants.landed(frame.route().generation());
                    link.say(word);
                }
                // Whoever waits for the route to be idle may go on before the push is answered, not after.
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

    /// Ends everything that is under way. What was only lost is written again on another connection; where the peer has
    /// not answered in time, there is none left for that.
    pub(super) fn end(self, broken: &Broken) {
        let (Broken::Lost(why) | Broken::Silent(why)) = broken;
        let Connection { shared, socket, agent, flights, listener, .. } = self;
        if shared.unlink(&socket) && !flights.is_empty() {
            shared.context.counters.of(TransportKind::Rdma).failed();
            warn!(address = %shared.address, why, num_frames = flights.len(), "rdma peer given up");
        }
        let mut lost = Vec::with_capacity(flights.len());
        for Flight { transfer, frame, active, .. } in flights {
            drop(transfer);
            lost.push((frame, active));
        }
        debug_assert_eq!(Arc::strong_count(&agent), 1);
        drop(agent);
        // No device uses the blocks any more.
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
        warn!(address = %shared.address, %error, "rdma peer lost");
    }
}

/// Between messages the peer may be silent for as long as it likes. `None`: it has left.
fn receive(socket: &TcpStream, timeout: Duration) -> io::Result<Option<Message>> {
    socket::wait_readable(socket, None)?;
    let mut bytes = [0; MESSAGE_BYTES];
    if socket.peek(&mut bytes[..1])? == 0 {
        return Ok(None);
    }
    socket::receive_exact(socket, &mut bytes, timeout)?;
    let message = Message::decode(&bytes);
    message.map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed message"))
}
