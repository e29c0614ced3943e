//! The decode worker's end: a control port, and one thread for each peer. The thread receives the peer's groups into
//! granted blocks.

use std::{
    io::{self, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use baton_handoff::{TransportKind, TransportOffer};
use baton_kv_cache::BlockStorage;
use baton_transfer::{
    Listening, ReceiverConfig, ReceivingTransport,
    receiver::{Acceptor, Grants, PeerAdmission, Service, listen},
    socket,
};
use tracing::{debug, info, warn};

use super::{
    communicators::{Communicators, MAX_COMMUNICATORS, Slot},
    cuda,
    fabric::{Fabric, NcclCommunicator, NcclRank},
    joining::wait_until_ready,
    peer::{Peer, Sharing},
    session::Session,
    wire::{MESSAGE_BYTES, Message, decode},
};

/// Receives through NCCL.
pub struct NcclReceiving {
    fabric: Arc<dyn Fabric>,
    listen: SocketAddr,
}

impl NcclReceiving {
    /// Peers connect to `listen`; port 0 takes a free port. `library` is NCCL's library or its folder. `None`: the
    /// system's loader finds it.
    ///
    /// # Errors
    /// When NCCL or a device is missing, or `storage` is on several devices.
    pub fn start(
        storage: &BlockStorage,
        library: Option<&Path>,
        listen: SocketAddr,
    ) -> io::Result<NcclReceiving> {
        cuda::refuse_divided(storage)?;
        Ok(NcclReceiving::over(cuda::start(library, storage)?, listen))
    }

    /// Uses another fabric than NCCL.
    pub fn over(fabric: Arc<dyn Fabric>, listen: SocketAddr) -> NcclReceiving {
        NcclReceiving { fabric, listen }
    }
}

impl ReceivingTransport for NcclReceiving {
    fn kind(&self) -> TransportKind {
        TransportKind::Nccl
    }

    /// The guard's drop ends every communicator, so nothing is written after it.
    fn listen(self: Box<Self>, grants: &Arc<Grants>, config: &ReceiverConfig) -> io::Result<Listening> {
        let pool = self.fabric.reach(grants.storage()).map_err(io::Error::other)?;
        let (listener, address) = listen(TransportKind::Nccl, self.listen, config)?;
        let offer = TransportOffer::Nccl { address, pool: grants.pool() };
        let sharing = Arc::new(Sharing {
            grants: Arc::clone(grants),
            fabric: self.fabric,
            pool,
            communicators: Communicators::new(MAX_COMMUNICATORS),
            io_timeout: config.io_timeout,
            handshake_timeout: config.handshake_timeout,
        });
        Ok(Listening { offer, guard: Box::new(Acceptor::start(sharing, listener, config)?) })
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
        // Fails when the peer has closed it first.
        let _ = peer.socket.shutdown(Shutdown::Both);
    }

    fn serve(&self, peer: &Arc<Peer>, admission: &PeerAdmission) {
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
                warn!(peer = %peer.address, %error, "nccl connection ended: its communicator is aborted");
            }
            Err(error) => admission.reject(&peer.address, &error),
        }
        if !admission.is_admitted() && !admission.is_stopping() {
            counters.rejected();
        }
        // The acceptor keeps the descriptor until its next sweep. The peer must see the end now.
        let _ = peer.socket.shutdown(Shutdown::Both);
    }
}

impl Sharing {
    /// The communicator with the peer, once both have joined.
    fn greet(
        &self,
        peer: &Peer,
        admission: &PeerAdmission,
    ) -> io::Result<Option<(Slot, Box<dyn NcclCommunicator>)>> {
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
                // The same answer for every reason, so that an unauthenticated peer learns nothing.
                peer.send(Message::Refused)?;
            }
            message => return Err(unexpected(message)),
        }
        Ok(None)
    }

    fn join(&self, peer: &Peer) -> io::Result<Option<(Slot, Box<dyn NcclCommunicator>)>> {
        let evict = {
            let (socket, is_evicted) = (Arc::clone(&peer.socket), Arc::clone(&peer.is_evicted));
            move || {
                is_evicted.store(true, Ordering::SeqCst);
                let _ = socket.shutdown(Shutdown::Both);
            }
        };
        // Half of the time that the peer waits for an answer.
        let Some(slot) = self.communicators.enter(evict, self.io_timeout / 2) else {
            warn!(peer = %peer.address, max_communicators = MAX_COMMUNICATORS, "nccl connection rejected: all communicators are busy");
            peer.send(Message::Busy)?;
            return Ok(None);
        };
        let joining = self
            .fabric
            .unique_id()
            .and_then(|id| self.fabric.join(&id, NcclRank::Receiver).map(|communicator| (id, communicator)));
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
            // Nothing was posted, so no block depends on this abort.
            let _ = communicator.abort();
            return Err(error);
        }
        Ok(Some((slot, communicator)))
    }
}

fn unexpected(message: Message) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected {message:?}"))
}
