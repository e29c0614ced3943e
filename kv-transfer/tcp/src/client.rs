//! The prefill worker's connections to one pool: a queue of frames, and lanes that send them.
//!
//! A lane is a thread with one connection. It connects when the first job comes, and again when the connection is lost.
//! It ends a connection that carries nothing for a while.
//! Frames of a lost connection are sent again: the receiver places each piece once, so a second arrival
//! changes nothing.

use std::{
    io,
    net::{Shutdown, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, Piece, PushError, RouteError, TransportKind, TransportOffer};
use baton_kv_cache::KvLayout;
use baton_tls::{Identity, Tls};
use baton_transfer::{
    SendingTransport,
    checksum::SumOf,
    sender::{Active, Frame, Job, Jobs, Open, RemotePool, RouteState, SenderContext, Staging, unread},
    socket::{self, Places, connect},
};
use tracing::{info, warn};

use super::{
    channel::{Channel, Reader, Writer},
    flight::{Flight, Landed},
    wire::{self, Ack, AckStatus, FrameHeader, Hello, Welcome},
};

/// How long a lane that cannot connect leaves the jobs to the lanes that are connected.
const LANE_PAUSE: Duration = Duration::from_secs(2);

/// Writes over sockets.
#[derive(Clone, Debug)]
pub struct TcpSending {
    /// Connections to one pool.
    pub streams_per_peer: usize,
    /// Bytes of a socket's send buffer. `None`: the kernel chooses and adjusts it.
    pub socket_buffer_bytes: Option<usize>,
    /// This side's certificate and the authorities that it trusts. `None`: no TLS.
    pub tls: Option<Tls>,
}

impl Default for TcpSending {
    fn default() -> TcpSending {
        TcpSending { streams_per_peer: 2, socket_buffer_bytes: None, tls: None }
    }
}

impl SendingTransport for TcpSending {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn takes_wire_formats(&self) -> bool {
        true
    }

    fn pool(
        &self,
        context: &Arc<SenderContext>,
        offer: &TransportOffer,
        layout: &KvLayout,
    ) -> Arc<dyn RemotePool> {
        let TransportOffer::Tcp { address, pool } = offer else { unreachable!("an offer of tcp") };
        let shared = Arc::new(Shared {
            context: Arc::clone(context),
            config: self.clone(),
            address: address.clone(),
            pool: *pool,
            layout: *layout,
            jobs: Jobs::default(),
            num_connected: AtomicUsize::new(0),
            sockets: Mutex::default(),
            sum_of: OnceLock::new(),
        });
        Arc::new(TcpPool { shared, lanes: Mutex::default() })
    }
}

/// One pool, reached over sockets.
struct TcpPool {
    shared: Arc<Shared>,
    lanes: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    context: Arc<SenderContext>,
    config: TcpSending,
    address: String,
    pool: u64,
    /// The layout of its blocks.
    layout: KvLayout,
    jobs: Jobs,
    num_connected: AtomicUsize,
    /// The sockets of all lanes. The drop shuts them down.
    sockets: Mutex<Vec<Arc<TcpStream>>>,
    /// What checksums cover, from the peer's first welcome. It is the same on all connections to the pool.
    sum_of: OnceLock<SumOf>,
}

impl TcpPool {
    fn start_lanes(&self) -> io::Result<()> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        while lanes.len() < self.shared.config.streams_per_peer.max(1) {
            let shared = Arc::clone(&self.shared);
            lanes.push(thread::Builder::new().name("kv-tcp-send".into()).spawn(move || run_lane(&shared))?);
        }
        Ok(())
    }
}

impl RemotePool for TcpPool {
    fn open(&self, open: Open) {
        match self.start_lanes() {
            Ok(()) => self.shared.jobs.open(open),
            Err(error) => open.fail(RouteError::Unreachable(format!("cannot start a thread: {error}"))),
        }
    }

    fn push(&self, frame: Frame) {
        self.shared.jobs.push(frame);
    }

    fn retire(&self, route: &Arc<RouteState>) {
        self.shared.jobs.retire(route);
    }

    fn is_cold(&self) -> bool {
        !self.shared.is_connected()
    }

    fn sum_of(&self) -> SumOf {
        *self.shared.sum_of.get().expect("connected")
    }
}

impl Drop for TcpPool {
    fn drop(&mut self) {
        self.shared.jobs.close();
        for socket in self.shared.sockets().iter() {
            // Fails when the socket is closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        for lane in self.lanes.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // A panic there has been reported by the panic hook.
            let _ = lane.join();
        }
    }
}

impl Shared {
    fn sockets(&self) -> MutexGuard<'_, Vec<Arc<TcpStream>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any lane is connected.
    fn is_connected(&self) -> bool {
        self.num_connected.load(Ordering::SeqCst) > 0
    }

    /// Queues a frame again whose connection broke. A failure often breaks all connections, and a lane notices only
    /// when it sends. So a frame may be lost once on every lane before it is sent on a new connection.
    fn retry(&self, frame: Frame, why: &str) {
        self.jobs.retry(frame, self.config.streams_per_peer.max(1), why);
    }
}

fn run_lane(shared: &Arc<Shared>) {
    let mut connection: Option<Connection> = None;
    loop {
        let job = match &connection {
            None => Poll::Ready(shared.jobs.next()),
            Some(_) => shared.jobs.next_within(shared.context.config.idle_timeout),
        };
        let job = match job {
            Poll::Ready(Some(job)) => job,
            Poll::Ready(None) => break,
            Poll::Pending => {
                drop(connection.take_if(|connection| connection.is_idle()));
                continue;
            }
        };
        if let Some(worn) = connection.take_if(|connection| connection.is_worn()) {
            worn.drain();
        }
        if connection.as_ref().is_none_or(Connection::is_dead) {
            drop(connection.take());
            match Connection::open(shared, job.access_key()) {
                Ok(new) => connection = Some(new),
                // A refusal, too, may be about the connection: the peer has as many as it allows. If it is about the grant,
                // the other ones learn that from the acks.
                Err(error) if shared.is_connected() => {
                    warn!(address = %shared.address, %error, "kv data connection not opened: the other ones carry its frames");
                    shared.jobs.hand_back(job);
                    shared.jobs.pause(LANE_PAUSE);
                    continue;
                }
                Err(error) => {
                    job.fail(&error);
                    // The peer refused this grant. It may accept other grants.
                    if !matches!(error, RouteError::OtherIncarnation(_)) {
                        shared.jobs.fail_all(&error);
                    }
                    continue;
                }
            }
        }
        let connection = connection.as_mut().expect("opened above");
        match job {
            // Every frame names its grant, so a grant that no route waits for needs no close.
            Job::Open(open) => drop(open.succeed()),
            Job::Frame(frame) => connection.send(frame),
        }
    }
}

/// One connection. Its lane sends frames, and a thread of its own reads the acks.
struct Connection {
    shared: Arc<Shared>,
    socket: Arc<TcpStream>,
    writer: Writer,
    /// This side's identity when it connected.
    identity: Option<Identity>,
    flight: Arc<Mutex<Flight<Sent>>>,
    next_sequence: u64,
    staging: Staging,
    acks: Option<JoinHandle<()>>,
}

/// A frame on the wire. The second field keeps its route busy until the peer has answered.
type Sent = (Frame, Active);

impl Connection {
    fn open(shared: &Arc<Shared>, access_key: AccessKey) -> Result<Connection, RouteError> {
        let unreachable = |error: io::Error| RouteError::Unreachable(format!("{}: {error}", shared.address));
        let config = &shared.context.config;
        let socket = connect(&shared.address, config.connect_timeout).map_err(unreachable)?;
        socket::configure(&socket, config.io_timeout).map_err(unreachable)?;
        if let Some(num_bytes) = shared.config.socket_buffer_bytes {
            socket::set_buffer(&socket, libc::SO_SNDBUF, num_bytes).map_err(unreachable)?;
        }
        let socket = Arc::new(socket);
        let deadline = Instant::now() + config.connect_timeout;
        let identity = shared.config.tls.as_ref().map(Tls::identity);
        let channel = match &shared.config.tls {
            Some(tls) => Channel::connect(tls, host_of(&shared.address), Arc::clone(&socket), deadline),
            None => Ok(Channel::plain(Arc::clone(&socket))),
        };
        let Channel { mut reader, mut writer, .. } = channel.map_err(unreachable)?;
        let layout = &shared.layout;
        let hello = Hello {
            version: wire::VERSION,
            pool: shared.pool,
            layer_bytes: layout.layer_bytes() as u64,
            num_layers: layout.num_layers as u32,
            access_key,
        };
        writer.send(&hello.encode()).map_err(unreachable)?;
        let mut bytes = [0; wire::WELCOME_BYTES];
        reader.receive_until(&mut bytes, deadline).map_err(unreachable)?;
        let sum_of = match Welcome::decode(&bytes) {
            Some(Welcome::Accepted) => SumOf::Pieces,
            Some(Welcome::AcceptedForHeads) => SumOf::Heads(layout.head_bytes()),
            Some(Welcome::Refused) => return Err(RouteError::OtherIncarnation(shared.address.clone())),
            None => return Err(RouteError::Unreachable(format!("{} is no kv data port", shared.address))),
        };
        shared.sum_of.get_or_init(|| sum_of);

        let flight = Arc::new(Mutex::new(Flight::new()));
        let acks = thread::Builder::new()
            .name("kv-tcp-acks".into())
            .spawn({
                let (shared, socket, flight) = (Arc::clone(shared), Arc::clone(&socket), Arc::clone(&flight));
                move || read_acks(&shared, &mut reader, &socket, &flight)
            })
            .map_err(unreachable)?;
        shared.sockets().push(Arc::clone(&socket));
        if shared.jobs.is_closed() {
            // The pool's drop closes the jobs first. It may have shut down the sockets before this one was listed.
            let _ = socket.shutdown(Shutdown::Both);
        }
        shared.num_connected.fetch_add(1, Ordering::SeqCst);
        info!(address = %shared.address, "kv data connection opened");
        Ok(Connection {
            shared: Arc::clone(shared),
            socket,
            writer,
            identity,
            flight,
            next_sequence: 0,
            staging: Staging::default(),
            acks: Some(acks),
        })
    }

    /// Whether a new connection must replace this one: its key is worn out, or this side has a new certificate.
    fn is_worn(&self) -> bool {
        self.writer.is_worn() || self.identity != self.shared.config.tls.as_ref().map(Tls::identity)
    }

    /// Waits until the peer has answered all frames on the wire, or the connection is lost.
    fn drain(self) {
        while !self.is_dead() && !self.is_idle() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_dead(&self) -> bool {
        lock(&self.flight).is_dead()
    }

    /// Whether the peer owes no ack.
    fn is_idle(&self) -> bool {
        lock(&self.flight).is_empty()
    }

    fn send(&mut self, frame: Frame) {
        let route = Arc::clone(frame.route());
        // `reading` keeps the source blocks while this thread reads them, `active` until the peer has answered.
        let (Some(reading), Some(active)) = (route.enter(), route.enter()) else {
            frame.fail(PushError::Closed);
            return;
        };
        let wire_bytes = route.wire_bytes();
        let header = FrameHeader {
            num_pieces: frame.pieces.len() as u16,
            format: route.wire(),
            access_key: route.access_key(),
            sequence: self.next_sequence,
            payload_bytes: (frame.pieces.len() * wire_bytes) as u64,
        };
        let mut head = header.encode().to_vec();
        let (rooms, scratch) = self.staging.of(&route, frame.pieces.len());
        // SAFETY: the pieces are final, and the route's guard keeps their blocks.
        let loaded = match unsafe { route.load_all(&frame.pieces, rooms, scratch) } {
            Ok(loaded) => loaded,
            Err(error) => return frame.fail(unread(&error)),
        };
        let mut idxs = Vec::with_capacity(frame.pieces.len());
        for piece in &frame.pieces {
            head.extend(wire::encode_piece(piece.layer_idx, piece.block_idx));
            idxs.push((piece.layer_idx, piece.block_idx));
        }
        let mut places = Places::default();
        places.push(head.as_mut_ptr(), head.len());
        loaded.pieces.iter().for_each(|bytes| places.push(bytes.as_ptr().cast_mut(), bytes.len()));

        let sequence = self.next_sequence;
        let begun = lock(&self.flight).begin(sequence, (frame, active));
        if let Err((frame, active)) = begun {
            drop(active);
            return self.shared.retry(frame, "closed by the peer");
        }
        self.next_sequence += 1;
        // SAFETY: `head` lives until the call returns. The pieces are in blocks that `reading` keeps, or in `staging`,
        // which is not touched meanwhile.
        if let Err(error) = unsafe { self.writer.send_all(places) } {
            warn!(address = %self.shared.address, %error, "kv data connection closed: the peer takes no more bytes");
            // The thread that reads acks sees the end and ends the frames in flight.
            let _ = self.socket.shutdown(Shutdown::Both);
            return;
        }
        // Hash while the bytes travel.
        let sums = route.sums(loaded, scratch);
        let summed = sums.into_iter().zip(idxs);
        let piece = |(checksum, (layer_idx, block_idx))| Piece { block_idx, layer_idx, checksum };
        let pieces = summed.map(piece).collect();
        let landed = lock(&self.flight).summed(sequence, pieces);
        drop(reading);
        if let Some(landed) = landed {
            land(landed);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Fails when it is closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(acks) = self.acks.take() {
            // A panic there has been reported by the panic hook.
            let _ = acks.join();
        }
        self.shared.sockets().retain(|socket| !Arc::ptr_eq(socket, &self.socket));
    }
}

fn read_acks(shared: &Shared, reader: &mut Reader, socket: &TcpStream, flight: &Mutex<Flight<Sent>>) {
    let error = loop {
        if let Err(error) = read_ack(shared, reader, flight) {
            break error;
        }
    };
    // This also ends a send in progress.
    let _ = socket.shutdown(Shutdown::Both);
    let lost = lock(flight).end();
    shared.num_connected.fetch_sub(1, Ordering::SeqCst);
    if !lost.is_empty() {
        shared.context.counters.of(TransportKind::Tcp).failed();
        warn!(address = %shared.address, %error, num_frames = lost.len(), "kv data connection lost: its frames are sent again");
    }
    // The oldest goes to the front of the queue last.
    for (frame, active) in lost.into_iter().rev() {
        drop(active);
        shared.retry(frame, &error.to_string());
    }
}

fn read_ack(shared: &Shared, reader: &mut Reader, flight: &Mutex<Flight<Sent>>) -> io::Result<()> {
    let io_timeout = shared.context.config.io_timeout;
    while !reader.wait(Some(io_timeout / 4))? {
        if lock(flight).is_overdue(io_timeout) {
            return Err(socket::timed_out("an ack"));
        }
    }
    let mut bytes = [0; wire::ACK_BYTES];
    reader.receive_exact(&mut bytes, io_timeout)?;
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let ack = Ack::decode(&bytes).ok_or_else(|| invalid("malformed ack"))?;
    let answered = lock(flight).answered(&ack);
    if let Some(landed) = answered.map_err(|()| invalid("ack of a frame that was not sent"))? {
        land(landed);
    }
    Ok(())
}

fn land(((frame, active), pieces, status): Landed<Sent>) {
    // The route must be idle before the push is answered: the caller may close the route and wait right after.
    drop(active);
    match status {
        AckStatus::Placed => frame.done(pieces),
        AckStatus::PlacedBefore if frame.num_tries > 0 => frame.done(pieces),
        AckStatus::PlacedBefore => frame.fail(PushError::Refused("pieces were written before".into())),
        AckStatus::Refused => frame.fail(PushError::Refused("pieces are not in the grant".into())),
        AckStatus::Revoked => frame.fail(PushError::Revoked),
    }
}

/// The host of an address, without the port.
fn host_of(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

fn lock(flight: &Mutex<Flight<Sent>>) -> MutexGuard<'_, Flight<Sent>> {
    flight.lock().unwrap_or_else(PoisonError::into_inner)
}
