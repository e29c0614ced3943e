//! The decode worker's end: a control port, and for each peer a thread that receives what it announces into the
//! blocks that it was granted.

use std::{
    io::{self, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use baton_handoff::{Generation, TransportKind, TransportOffer};
use tracing::{debug, info, warn};

use super::{
    communicators::{Communicators, MAX_COMMUNICATORS, Slot},
    fabric::{Communicator, Fabric, Rank, Reached},
    session::Session,
    wire::{MESSAGE_BYTES, Message},
};
use crate::{
    receiver::{Acceptor, Admission, Grants, OneSidedWriter, ReceiverConfig, Service, WriterId, listen},
    tcp::socket,
};

/// Listens until dropped. Every communicator is gone then, so that nothing is written any more.
pub(crate) struct NcclServer {
    _acceptor: Acceptor<Sharing>,
    offer: TransportOffer,
}

/// What every connection needs.
pub(super) struct Sharing {
    pub(super) grants: Arc<Grants>,
    fabric: Arc<dyn Fabric>,
    pub(super) pool: Reached,
    communicators: Arc<Communicators>,
    pub(super) io_timeout: Duration,
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
pub(super) struct Peer {
    pub(super) socket: Arc<TcpStream>,
    pub(super) address: SocketAddr,
    pub(super) writer: WriterId,
    pub(super) is_evicted: Arc<AtomicBool>,
}

impl Peer {
    pub(super) fn send(&self, message: Message) -> io::Result<()> {
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
            Message::Hello { pool, num_layers, layer_bytes, block_bytes, access_key } => {
                let is_sound = pool == self.grants.pool() && (num_layers, layer_bytes, block_bytes) == shape;
                if is_sound && self.grants.admit(&access_key, None).is_some() && admission.admit() {
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

pub(super) fn decode(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Message> {
    Message::decode(bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed message"))
}

fn unexpected(message: Message) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected {message:?}"))
}
