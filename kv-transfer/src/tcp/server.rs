//! The decode worker's listener: one thread accepts, one per connection places frames.

use std::{
    io::{self, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tracing::{debug, info, warn};

use super::{
    socket::{self, Places},
    wire::{self, Ack, AckStatus, FrameHeader, Hello, Welcome},
};
use crate::{
    counters::TransportCounters,
    message::{TransportKind, TransportOffer},
    receiver::{Claim, Grants, LiveGrant, ReceiverConfig},
};

/// Listens until dropped.
pub(crate) struct TcpServer {
    shared: Arc<Shared>,
    offer: TransportOffer,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    grants: Arc<Grants>,
    listener: TcpListener,
    io_timeout: Duration,
    max_connections: usize,
    is_stopping: AtomicBool,
    connections: Mutex<Vec<(Arc<TcpStream>, JoinHandle<()>)>>,
}

impl TcpServer {
    pub(crate) fn start(
        grants: Arc<Grants>,
        address: SocketAddr,
        config: &ReceiverConfig,
    ) -> io::Result<TcpServer> {
        let listener = TcpListener::bind(address).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot listen for kv data on {address}: {error}"))
        })?;
        let address = listener.local_addr()?;
        let host = config.advertise_host.clone().unwrap_or_else(|| match address {
            SocketAddr::V4(address) => address.ip().to_string(),
            SocketAddr::V6(address) => format!("[{}]", address.ip()),
        });
        let offer =
            TransportOffer::Tcp { address: format!("{host}:{}", address.port()), pool: grants.pool() };
        let shared = Arc::new(Shared {
            grants,
            listener,
            io_timeout: config.io_timeout,
            max_connections: config.max_connections,
            is_stopping: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let acceptor = thread::Builder::new().name("kv-tcp-accept".into()).spawn({
            let shared = Arc::clone(&shared);
            move || accept(&shared)
        })?;
        Ok(TcpServer { shared, offer, acceptor: Some(acceptor) })
    }

    pub(crate) fn offer(&self) -> TransportOffer {
        self.offer.clone()
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        // SAFETY: a plain system call on an owned descriptor; wakes the acceptor.
        unsafe { libc::shutdown(self.shared.listener.as_raw_fd(), libc::SHUT_RDWR) };
        if let Some(acceptor) = self.acceptor.take() {
            // A panic there has been reported by the panic hook; the same below.
            let _ = acceptor.join();
        }
        let connections =
            std::mem::take(&mut *self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner));
        for (socket, _) in &connections {
            // Fails when the peer was faster.
            let _ = socket.shutdown(Shutdown::Both);
        }
        for (_, thread) in connections {
            let _ = thread.join();
        }
    }
}

fn accept(shared: &Arc<Shared>) {
    loop {
        let accepted = shared.listener.accept();
        if shared.is_stopping.load(Ordering::SeqCst) {
            return;
        }
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "kv data listener cannot accept");
                // Out of descriptors, mostly: others must close first.
                thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        let mut connections = shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|(_, thread)| !thread.is_finished());
        if connections.len() >= shared.max_connections {
            warn!(%peer, max_connections = shared.max_connections, "too many kv data connections");
            continue;
        }
        let socket = Arc::new(socket);
        let thread = thread::Builder::new().name("kv-tcp-receive".into()).spawn({
            let connection = Connection { shared: Arc::clone(shared), socket: Arc::clone(&socket), peer };
            move || connection.run()
        });
        match thread {
            Ok(thread) => connections.push((socket, thread)),
            Err(error) => warn!(%error, "cannot start a thread for a kv data connection"),
        }
    }
}

struct Connection {
    shared: Arc<Shared>,
    socket: Arc<TcpStream>,
    peer: SocketAddr,
}

impl Connection {
    fn run(self) {
        let peer = self.peer;
        match self.serve() {
            Ok(()) => debug!(%peer, "kv data connection closed"),
            Err(_) if self.shared.is_stopping.load(Ordering::SeqCst) => {}
            Err(error) => {
                self.counters().failed();
                warn!(%peer, %error, "kv data connection ended");
            }
        }
        // The registry keeps the descriptor until its next sweep; the peer must hear of it now.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn serve(&self) -> io::Result<()> {
        socket::configure(&self.socket, self.shared.io_timeout)?;
        if !self.shake_hands()? {
            return Ok(());
        }
        self.counters().routed(false);
        info!(peer = %self.peer, "kv data connection opened");
        let mut scratch = vec![0; 256 << 10];
        while self.wait_for_frame()? {
            self.receive_frame(&mut scratch)?;
        }
        Ok(())
    }

    fn shake_hands(&self) -> io::Result<bool> {
        let mut bytes = [0; wire::HELLO_BYTES];
        socket::receive_exact(&self.socket, &mut bytes, self.shared.io_timeout)?;
        let hello = Hello::decode(&bytes).ok_or_else(|| invalid("not a kv data peer"))?;
        let layout = self.shared.grants.storage().layout();
        let welcome = if hello.version != wire::VERSION {
            Welcome::OtherVersion
        } else if hello.pool != self.shared.grants.pool() {
            Welcome::OtherPool
        } else if (hello.layer_bytes, hello.num_layers)
            != (layout.layer_bytes() as u64, layout.num_layers as u32)
        {
            Welcome::OtherLayout
        } else {
            Welcome::Accepted
        };
        (&*self.socket).write_all(&welcome.encode())?;
        if welcome != Welcome::Accepted {
            debug!(peer = %self.peer, ?welcome, "kv data peer refused");
        }
        Ok(welcome == Welcome::Accepted)
    }

    /// Between frames a peer may be silent for as long as it likes. `false`: it has left.
    fn wait_for_frame(&self) -> io::Result<bool> {
        socket::wait_readable(&self.socket, None)?;
        let mut byte = 0;
        self.socket.peek(std::slice::from_mut(&mut byte)).map(|num_bytes| num_bytes > 0)
    }

    fn receive_frame(&self, scratch: &mut [u8]) -> io::Result<()> {
        let mut bytes = [0; wire::FRAME_BYTES];
        socket::receive_exact(&self.socket, &mut bytes, self.shared.io_timeout)?;
        let layer_bytes = self.shared.grants.storage().layout().layer_bytes();
        let header = FrameHeader::decode(&bytes, layer_bytes).ok_or_else(|| invalid("malformed frame"))?;
        let mut bytes = vec![0; header.num_pieces as usize * wire::PIECE_BYTES];
        socket::receive_exact(&self.socket, &mut bytes, self.shared.io_timeout)?;
        let pieces = wire::decode_pieces(&bytes);

        let num_bytes = header.payload_bytes as usize;
        let status = match self.shared.grants.find(header.generation) {
            None => {
                self.discard(num_bytes, scratch)?;
                AckStatus::Revoked
            }
            Some(grant) => match grant.claim(&pieces) {
                Claim::Taken => self.place(&grant, &pieces, scratch)?,
                Claim::Placed => {
                    self.discard(num_bytes, scratch)?;
                    AckStatus::PlacedBefore
                }
                Claim::Refused => {
                    self.discard(num_bytes, scratch)?;
                    AckStatus::Refused
                }
            },
        };
        (&*self.socket).write_all(&Ack { status, sequence: header.sequence }.encode())
    }

    /// Scatters the payload into the grant's blocks, for as long as the grant is not revoked.
    fn place(&self, grant: &LiveGrant, pieces: &[(u32, u32)], scratch: &mut [u8]) -> io::Result<AckStatus> {
        let storage = self.shared.grants.storage();
        let layer_bytes = storage.layout().layer_bytes();
        let mut places = Places::new();
        for &(layer_idx, block_idx) in pieces {
            let block = grant.block(block_idx).expect("a claimed piece is in the grant");
            places.push(storage.layer_ptr(block, layer_idx as usize).as_ptr(), layer_bytes);
        }
        let claimed = Claimed { grant, pieces };
        while !places.is_done() {
            // SAFETY: the places lie in granted blocks, claimed for this frame alone, and the grant
            // cannot be taken back while the fence is held.
            let received = grant.with_fence(|| unsafe { places.receive(&self.socket) });
            match received {
                None => {
                    self.counters().late(pieces.len() * layer_bytes - places.num_bytes());
                    self.discard(places.num_bytes(), scratch)?;
                    return Ok(AckStatus::Revoked);
                }
                Some(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(Ok(_)) => {}
                Some(Err(error)) if socket::is_retry(&error) => {
                    if !socket::wait_readable(&self.socket, Some(self.shared.io_timeout))? {
                        return Err(socket::timed_out("the rest of a frame"));
                    }
                }
                Some(Err(error)) => return Err(error),
            }
        }
        claimed.placed();
        self.counters().placed(pieces.len(), pieces.len() * layer_bytes);
        Ok(AckStatus::Placed)
    }

    /// Reads what has no place any more, so that the next frame can be found.
    fn discard(&self, mut num_bytes: usize, scratch: &mut [u8]) -> io::Result<()> {
        self.counters().late(num_bytes);
        while num_bytes > 0 {
            let len = num_bytes.min(scratch.len());
            socket::receive_exact(&self.socket, &mut scratch[..len], self.shared.io_timeout)?;
            num_bytes -= len;
        }
        Ok(())
    }

    fn counters(&self) -> &TransportCounters {
        self.shared.grants.counters().of(TransportKind::Tcp)
    }
}

/// Pieces that are given back unless they were placed.
struct Claimed<'a> {
    grant: &'a LiveGrant,
    pieces: &'a [(u32, u32)],
}

impl Claimed<'_> {
    fn placed(self) {
        self.grant.placed(self.pieces);
    }
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        // Finds nothing to do after `placed`.
        self.grant.abandon(self.pieces);
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
