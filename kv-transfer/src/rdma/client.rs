//! The prefill worker's end of one pool: a thread that posts writes and waits for them, and one that
//! listens to the control connection.
//!
//! A grant is closed when the last write under it has ended, and only then is `Close` said. A write that
//! fails, or does not end in time, takes the whole connection down: the agent first, so that no device
//! reads from or writes for this side any more, then the frames that were under way are answered.

use std::{
    collections::HashMap,
    io,
    net::{Shutdown, TcpStream},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockId, BlockStorage, KvLayout};
use tracing::{info, warn};

use super::{
    nixl::{Agent, Copy, Nixl, RemoteAgent, Transfer},
    wire::{MESSAGE_BYTES, Message, Welcome},
};
use crate::{
    checksum::checksum,
    error::{PushError, RouteError},
    message::{Generation, Piece, PieceWrite, TransportKind},
    sender::{Active, Frame, Job, Jobs, Open, Peer, RouteState, SenderContext, max_pieces},
    tcp::{connect, socket},
};

/// Frames on the wire at a time: enough to keep a device busy while the next ones are prepared, few enough
/// that one handoff does not make the others wait.
const MAX_FLIGHTS: usize = 16;

/// Frames that may be on the wire whose pieces are put together here.
const NUM_PLACES: usize = 4;

/// How often the wire is looked at without a pause, and how long the pauses are afterwards: small transfers
/// end in microseconds, large ones need not cost a core.
const NUM_SPINS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(50);

/// One pool of another process, written through NIXL.
pub(crate) struct RdmaPeer {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    context: Arc<SenderContext>,
    nixl: Nixl,
    address: String,
    pool: u64,
    /// Of its blocks.
    layout: KvLayout,
    jobs: Jobs,
    /// Of the present connection.
    link: Mutex<Option<Link>>,
}

/// The control connection, and the grants that are open through it.
struct Link {
    socket: Arc<TcpStream>,
    opening: HashMap<Generation, Open>,
    open: HashMap<Generation, OpenGrant>,
}

#[derive(Default)]
struct OpenGrant {
    num_flights: usize,
    /// Nothing new is written; `Close` is said after the last flight.
    is_closing: bool,
}

impl RdmaPeer {
    pub(crate) fn new(
        context: Arc<SenderContext>,
        nixl: Nixl,
        address: String,
        pool: u64,
        layout: KvLayout,
    ) -> RdmaPeer {
        let (jobs, link) = (Jobs::default(), Mutex::default());
        let shared = Shared { context, nixl, address, pool, layout, jobs, link };
        RdmaPeer { shared: Arc::new(shared), thread: Mutex::default() }
    }
}

impl Peer for RdmaPeer {
    fn open(&self, open: Open) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            match thread::Builder::new().name("kv-rdma-write".into()).spawn(move || run(&shared)) {
                Ok(new) => *thread = Some(new),
                Err(error) => {
                    return open.fail(RouteError::Unreachable(format!("cannot start a thread: {error}")));
                }
            }
        }
        self.shared.jobs.open(open);
    }

    fn push(&self, frame: Frame) {
        self.shared.jobs.push(frame);
    }

    fn retire(&self, route: &Arc<RouteState>) {
        self.shared.jobs.retire(route);
        if let Some(link) = self.shared.link().as_mut() {
            link.close(route.generation());
        }
    }

    fn is_cold(&self) -> bool {
        self.shared.link().is_none()
    }
}

impl Drop for RdmaPeer {
    fn drop(&mut self) {
        self.shared.jobs.close();
        if let Some(thread) = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Link {
    /// Ends writing under a grant, and says so as soon as that is true.
    fn close(&mut self, generation: Generation) {
        let was_opening = self.opening.remove(&generation).is_some();
        if let Some(grant) = self.open.get_mut(&generation)
            && grant.num_flights > 0
        {
            grant.is_closing = true;
        } else if self.open.remove(&generation).is_some() || was_opening {
            self.say(Message::Close(generation));
        }
    }

    fn landed(&mut self, generation: Generation) {
        if let Some(grant) = self.open.get_mut(&generation) {
            grant.num_flights = grant.num_flights.saturating_sub(1);
            if grant.is_closing && grant.num_flights == 0 {
                self.open.remove(&generation);
                self.say(Message::Close(generation));
            }
        }
    }

    fn say(&self, message: Message) {
        if let Err(error) = socket::send_at_once(&self.socket, &message.encode()) {
            // The peer learns it by the end of the connection. The listener sees that, too.
            warn!(?message, %error, "cannot speak to an rdma peer: disconnecting");
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn link(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the link of this socket away, and says whether there was one.
    fn unlink(&self, socket: &Arc<TcpStream>) -> bool {
        let link = {
            let mut slot = self.link();
            if slot.as_ref().is_none_or(|link| !Arc::ptr_eq(socket, &link.socket)) {
                return false;
            }
            slot.take()
        };
        let _ = socket.shutdown(Shutdown::Both);
        for (_, open) in link.into_iter().flat_map(|link| link.opening) {
            open.fail(RouteError::Unreachable("the peer is gone".into()));
        }
        true
    }
}

fn run(shared: &Arc<Shared>) {
    let mut connection: Option<Connection> = None;
    let mut num_idle = 0;
    loop {
        let num_flights = connection.as_ref().map_or(0, |connection| connection.flights.len());
        let job = match num_flights {
            0 => Poll::Ready(shared.jobs.next()),
            _ if connection.as_ref().is_some_and(|connection| !connection.has_room()) => Poll::Pending,
            _ => shared.jobs.poll(),
        };
        match job {
            Poll::Ready(None) => break,
            Poll::Ready(Some(Job::Open(open))) => {
                if connection.as_ref().is_none_or(|connection| !connection.is_linked()) {
                    end(&mut connection, "the peer is gone");
                    match Connection::open(shared) {
                        Ok(new) => connection = Some(new),
                        Err(error) => {
                            open.fail(error);
                            continue;
                        }
                    }
                }
                shared.say_open(open);
            }
            Poll::Ready(Some(Job::Frame(frame))) => match &mut connection {
                Some(connection) => connection.post(frame),
                None => frame.fail(PushError::Lost("the peer is gone".into())),
            },
            Poll::Pending => {}
        }
        let Some(some) = &mut connection else { continue };
        match some.land() {
            Err(why) => end(&mut connection, &why),
            Ok(0) => {
                num_idle += 1;
                if num_idle > NUM_SPINS { thread::sleep(PAUSE) } else { thread::yield_now() }
            }
            Ok(_) => num_idle = 0,
        }
    }
    end(&mut connection, "the sender is shut down");
}

fn end(connection: &mut Option<Connection>, why: &str) {
    if let Some(connection) = connection.take() {
        connection.end(why);
    }
}

impl Shared {
    fn say_open(&self, open: Open) {
        let mut slot = self.link();
        let Some(link) = slot.as_mut() else {
            return open.fail(RouteError::Unreachable("the peer is gone".into()));
        };
        let generation = open.generation;
        link.say(Message::Open(generation));
        link.opening.insert(generation, open);
    }
}

/// A connected pool, as its thread sees it.
struct Connection {
    shared: Arc<Shared>,
    socket: Arc<TcpStream>,
    agent: Arc<Agent>,
    remote: RemoteAgent,
    pool: Welcome,
    flights: Vec<Flight>,
    staging: Staging,
    listener: JoinHandle<()>,
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
    fn open(shared: &Arc<Shared>) -> Result<Connection, RouteError> {
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
        };
        socket::send_at_once(&socket, &hello.encode()).map_err(unreachable)?;
        let mut bytes = [0; MESSAGE_BYTES];
        // The peer registers its memory before it answers, which takes longer than a greeting.
        let timeout = config.connect_timeout.max(config.io_timeout);
        socket::receive_exact(&socket, &mut bytes, timeout).map_err(unreachable)?;
        let pool = match Message::decode(&bytes) {
            Some(Message::Welcome(pool)) if pool.is_sound(layout.block_bytes()) => pool,
            Some(Message::OtherPool) => return Err(RouteError::OtherIncarnation(shared.address.clone())),
            Some(Message::Refused) => {
                return Err(RouteError::Unreachable(format!("{} refuses rdma", shared.address)));
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
        *shared.link() =
            Some(Link { socket: Arc::clone(&socket), opening: HashMap::new(), open: HashMap::new() });
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
            listener,
        })
    }

    fn is_linked(&self) -> bool {
        self.shared.link().as_ref().is_some_and(|link| Arc::ptr_eq(&link.socket, &self.socket))
    }

    fn has_room(&self) -> bool {
        self.flights.len() < MAX_FLIGHTS && !self.staging.free.is_empty()
    }

    fn post(&mut self, frame: Frame) {
        let route = Arc::clone(frame.route());
        let Some(targets) = self.targets(&frame) else {
            return frame.fail(PushError::Refused("the peer has no such block".into()));
        };
        let Some(active) = route.enter() else { return frame.fail(PushError::Closed) };
        {
            let mut slot = self.shared.link();
            let Some(link) = slot.as_mut().filter(|link| Arc::ptr_eq(&link.socket, &self.socket)) else {
                return frame.fail(PushError::Lost("the peer is gone".into()));
            };
            match link.open.get_mut(&route.generation()).filter(|grant| !grant.is_closing) {
                Some(grant) => grant.num_flights += 1,
                None => return frame.fail(PushError::Revoked),
            }
        }
        let place = self.staging.place_for(&route);
        // SAFETY: the pieces are final and kept by the route, which is not idle before `active` is dropped; the
        // place is this flight's alone.
        let sources: Vec<&[u8]> = unsafe { self.staging.sources(&route, &frame.pieces, place) };
        let copies = sources
            .iter()
            .zip(targets)
            .map(|(source, target)| Copy { source: NonNull::from(*source).cast(), target });
        let copies: Vec<Copy> = copies.collect();
        let since = Instant::now();
        // SAFETY: nobody writes the pieces, as above, until the flight is dropped; that is after the transfer
        // has ended, or after the agent is gone. Their targets are granted: until this flight has landed, nobody
        // says `Close`.
        let written =
            unsafe { self.agent.write(&self.remote, self.pool.memory, &copies, route.piece_bytes()) };
        let transfer = match written {
            Ok(transfer) => transfer,
            Err(error) => {
                warn!(address = %self.shared.address, %error, "rdma write refused: disconnecting");
                // The rest is done when the flights are looked at next.
                self.shared.unlink(&self.socket);
                drop(active);
                return frame.fail(PushError::Lost(error.to_string()));
            }
        };
        // Hashed while the device reads the same bytes.
        let pieces = frame.pieces.iter().zip(sources).map(|(piece, source)| Piece {
            block_idx: piece.block_idx,
            layer_idx: piece.layer_idx,
            checksum: checksum(source, route.generation()),
        });
        let pieces = pieces.collect();
        self.flights.push(Flight { transfer, since, frame, pieces, place, active });
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
    /// When the connection is of no use any more, in words.
    fn land(&mut self) -> Result<usize, String> {
        let io_timeout = self.shared.context.config.io_timeout;
        let mut num_landed = 0;
        let mut idx = 0;
        while idx < self.flights.len() {
            let flight = &self.flights[idx];
            if flight.transfer.is_done().map_err(|error| error.to_string())? {
                let Flight { transfer, frame, pieces, place, active, .. } = self.flights.remove(idx);
                drop(transfer);
                self.staging.free.extend(place);
                if let Some(link) = self.shared.link().as_mut() {
                    link.landed(frame.route().generation());
                }
                // Whoever waits for the route to be idle may go on before the push is answered, not after.
                drop(active);
                frame.done(pieces);
                num_landed += 1;
            } else if flight.since.elapsed() >= io_timeout {
                return Err(format!("not written within {io_timeout:?}"));
            } else {
                idx += 1;
            }
        }
        if self.is_linked() { Ok(num_landed) } else { Err("the peer is gone".into()) }
    }

    /// Ends everything that is under way, then says so.
    fn end(self, why: &str) {
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
        for (frame, active) in lost {
            drop(active);
            frame.fail(PushError::Lost(why.to_owned()));
        }
        // A panic there has been reported by the panic hook.
        let _ = listener.join();
    }
}

/// Registered memory in which pieces are put together that are not the same on both sides.
struct Staging {
    memory: Arc<BlockStorage>,
    /// Places of a frame each that no flight uses.
    free: Vec<usize>,
    num_per_place: usize,
    vectors: Vec<f32>,
}

impl Staging {
    /// Room for pieces of this layout, in frames of so many bytes.
    fn new(layout: &KvLayout, frame_bytes: usize) -> io::Result<Staging> {
        let num_per_place = max_pieces(frame_bytes, layout.layer_bytes());
        let num_blocks = (NUM_PLACES * num_per_place).div_ceil(layout.num_layers);
        let memory = Arc::new(BlockStorage::new(*layout, num_blocks)?);
        Ok(Staging { memory, free: (0..NUM_PLACES).collect(), num_per_place, vectors: Vec::new() })
    }

    /// A place, if the route's pieces need one.
    fn place_for(&mut self, route: &RouteState) -> Option<usize> {
        (route.room_bytes() > 0).then(|| self.free.pop().expect("a frame is taken only while there is room"))
    }

    /// The bytes of a frame's pieces, where a device can read them.
    ///
    /// # Safety
    /// As of [`RouteState::bytes`], and nobody uses the place as long as the bytes.
    unsafe fn sources<'a>(
        &mut self,
        route: &'a RouteState,
        pieces: &[PieceWrite],
        place: Option<usize>,
    ) -> Vec<&'a [u8]> {
        let num_layers = self.memory.layout().num_layers;
        let sources = pieces.iter().enumerate().map(|(nth, piece)| {
            let room: &mut [u8] = match place {
                Some(place) => {
                    let nth = place * self.num_per_place + nth;
                    let block = BlockId((nth / num_layers) as u32);
                    // SAFETY: the place is the frame's alone.
                    unsafe { self.memory.layer_mut(block, nth % num_layers) }
                }
                None => &mut [],
            };
            // SAFETY: by the caller's word.
            let bytes = unsafe { route.bytes(piece, room, &mut self.vectors) };
            // SAFETY: own blocks are kept by the route, and the place by the caller's word.
            unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) }
        });
        sources.collect()
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
        match message {
            Message::Opened(generation) => {
                if let Some(open) = link.opening.remove(&generation) {
                    // An older route of the same grant may have flights left.
                    link.open.entry(generation).or_default().is_closing = false;
                    if !open.succeed() {
                        link.close(generation);
                    }
                }
            }
            Message::Unknown(generation) => {
                if let Some(open) = link.opening.remove(&generation) {
                    open.fail(RouteError::Unreachable("the grant is revoked".into()));
                }
            }
            Message::Revoke(generation) => link.close(generation),
            other => break format!("unexpected {other:?}"),
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
