//! The decode worker's end of the data plane: it lets peers write into granted blocks, verifies
//! what they wrote, and takes grants back.
//!
//! ```text
//! grant() --> Granted --- verify() * ---> commit() ---+
//!                |                                    |  one-sided writers: when each said so or is gone
//!                +--- revoke(), drop ----> revoked ---+---------------------> fenced: the guard is released
//! ```
//!
//! Sockets are read by this side's own threads, straight into the blocks and under the grant's
//! fence: once it is closed, nothing more lands, not even the rest of a half-read frame. Shared
//! memory is written by the peer, so a revoked grant that a peer has opened stays quarantined until
//! the peer confirms or its socket closes. [`ReceiverLoad`] counts what is quarantined.

mod acceptor;
mod grants;
mod verify;

use std::{
    future::Future,
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use baton_kv_cache::{BlockId, BlockStorage, WireFormat};
use baton_tls::{Identity, Tls};
use tokio::sync::oneshot;

pub(crate) use acceptor::{Acceptor, Admission, Service};
use baton_handoff::{AccessKey, Generation, KvFault, Piece, TransportKind, TransportOffer};
use grants::End;
pub(crate) use grants::{Claim, Grants, LiveGrant, OneSidedWriter, WriterId};

use crate::{
    counters::Counters,
    cuda::refuse_divided,
    nccl::{self, Fabric, NcclServer},
    rdma::{Nixl, RdmaServer},
    shm::ShmServer,
    tcp::TcpServer,
};

#[cfg(any(test, feature = "testing"))]
use crate::nccl::TestFabric;

/// What a [`Receiver`] offers, and its patience.
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// Where to listen for `tcp`; `None` offers none. Port 0 takes a free one.
    pub tcp_listen: Option<SocketAddr>,
    /// Where to listen for the control connections of `rdma`; `None` offers none.
    pub rdma_listen: Option<SocketAddr>,
    /// NIXL's C library, or the folder that it is in; `None` leaves that to the system.
    pub nixl: Option<PathBuf>,
    /// Where to listen for the control connections of `nccl`; `None` offers none.
    pub nccl_listen: Option<SocketAddr>,
    /// NCCL's library, or the folder that it is in; `None` leaves that to the system.
    pub nccl: Option<PathBuf>,
    /// What tests have in its place.
    #[cfg(any(test, feature = "testing"))]
    pub fabric: Option<TestFabric>,
    /// The host that peers reach this one by; by default the listener's address.
    pub advertise_host: Option<String>,
    /// A private folder for the `shm` socket, made if absent; `None` offers none. Its path must be
    /// short: a socket's path has at most 107 bytes.
    pub shm_dir: Option<PathBuf>,
    /// `tcp`: bytes of a socket's receive buffer; `None` lets the kernel choose, and change it as it goes.
    pub socket_buffer_bytes: Option<usize>,
    /// For the next byte of something begun (a handshake, a frame, an answer).
    pub io_timeout: Duration,
    /// For everything that a peer has to say until it is known to have a grant.
    pub handshake_timeout: Duration,
    /// Peers that are known to have a grant; those beyond are closed at once.
    pub max_connections: usize,
    /// Peers that are not known yet; when one more comes, the one that has been longest about it is closed.
    pub max_strangers: usize,
    /// `tcp`: who this side is, and whom it trusts; `None` speaks plainly.
    pub tls: Option<Tls>,
}

impl Default for ReceiverConfig {
    fn default() -> ReceiverConfig {
        ReceiverConfig {
            tcp_listen: None,
            rdma_listen: None,
            nixl: None,
            nccl_listen: None,
            nccl: None,
            #[cfg(any(test, feature = "testing"))]
            fabric: None,
            advertise_host: None,
            shm_dir: None,
            socket_buffer_bytes: None,
            io_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(3),
            max_connections: 256,
            max_strangers: 64,
            tls: None,
        }
    }
}

impl ReceiverConfig {
    /// What carries `nccl`.
    fn fabric(&self, storage: &BlockStorage) -> io::Result<Arc<dyn Fabric>> {
        #[cfg(any(test, feature = "testing"))]
        if let Some(TestFabric(fabric)) = &self.fabric {
            return Ok(Arc::clone(fabric));
        }
        nccl::start(self.nccl.as_deref(), storage).map_err(io::Error::other)
    }
}

/// What a receiver holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverLoad {
    /// Grants that may be written.
    pub num_grants: usize,
    /// Revoked grants that a one-sided writer has not let go of.
    pub num_quarantined_grants: usize,
    /// Their blocks.
    pub num_quarantined_blocks: usize,
}

/// Lets peers write into granted blocks of one pool. Cheap to clone; the threads stop, and the
/// socket file goes, with the last clone and the last [`Granted`]. That waits up to a second for
/// peers that have a grant open; the guards of those that do not let go are never dropped.
#[derive(Clone)]
pub struct Receiver {
    shared: Arc<Shared>,
}

struct Shared {
    grants: Arc<Grants>,
    verifier: verify::Verifier,
    offers: Vec<TransportOffer>,
    // Dropped in this order: no thread outlives the receiver.
    _rdma: Option<RdmaServer>,
    _nccl: Option<NcclServer>,
    _tcp: Option<TcpServer>,
    _shm: Option<ShmServer>,
}

impl Receiver {
    /// Listens for peers that write into `storage`.
    ///
    /// # Errors
    /// When an address or the folder of the socket cannot be used, NIXL is not there and asked for, blocks that lie on
    /// several devices are to travel over nccl, or a thread cannot be started.
    pub fn start(storage: Arc<BlockStorage>, config: ReceiverConfig) -> io::Result<Receiver> {
        let offered = [
            (TransportKind::Shm, config.shm_dir.is_some()),
            (TransportKind::Rdma, config.rdma_listen.is_some()),
            (TransportKind::Nccl, config.nccl_listen.is_some()),
        ];
        for (kind, _) in offered.into_iter().filter(|(_, is_offered)| *is_offered) {
            refuse_divided(&storage, kind)?;
        }
        let pool = u64::from_ne_bytes(random());
        let grants = Arc::new(Grants::new(storage, pool));
        let mut offers = Vec::new();
        let shm = match &config.shm_dir {
            Some(dir) => Some(ShmServer::start(Arc::clone(&grants), dir, &config)?),
            None => None,
        };
        offers.extend(shm.as_ref().map(ShmServer::offer));
        let rdma = match config.rdma_listen {
            Some(address) => {
                let nixl = Nixl::start(config.nixl.as_deref(), grants.storage()).map_err(io::Error::other)?;
                Some(RdmaServer::start(Arc::clone(&grants), nixl, address, &config)?)
            }
            None => None,
        };
        offers.extend(rdma.as_ref().map(RdmaServer::offer));
        let nccl = match config.nccl_listen {
            Some(address) => {
                let fabric = config.fabric(grants.storage())?;
                Some(NcclServer::start(Arc::clone(&grants), fabric, address, &config)?)
            }
            None => None,
        };
        offers.extend(nccl.as_ref().map(NcclServer::offer));
        let tcp = match config.tcp_listen {
            Some(address) => Some(TcpServer::start(Arc::clone(&grants), address, &config)?),
            None => None,
        };
        offers.extend(tcp.as_ref().map(TcpServer::offer));
        let verifier = verify::Verifier::start(Arc::clone(&grants))?;
        let shared = Shared { grants, verifier, offers, _rdma: rdma, _nccl: nccl, _tcp: tcp, _shm: shm };
        Ok(Receiver { shared: Arc::new(shared) })
    }

    /// As [`grant_as`](Self::grant_as), of pieces that travel as they are.
    ///
    /// # Panics
    /// As there.
    pub fn grant<K: Send + 'static>(&self, blocks: Vec<BlockId>, keep: K) -> Granted<K> {
        self.grant_as(blocks, Some(WireFormat::AsIs), keep)
    }

    /// Lets whoever shows the access key write into `blocks`, pieces travelling as they are or as `wire` says; with
    /// `None` in any form. `keep` is what holds the blocks
    /// allocated; it comes back from [`Granted::commit`] or [`Granted::revoke`], or is dropped,
    /// once no writer can reach them.
    ///
    /// # Panics
    /// When a block is not of the receiver's storage, or the system has no randomness to give.
    pub fn grant_as<K: Send + 'static>(
        &self,
        blocks: Vec<BlockId>,
        wire: Option<WireFormat>,
        keep: K,
    ) -> Granted<K> {
        let (give_back, fenced) = oneshot::channel();
        let release = Box::new(move |end| match end {
            // Nobody waits for it: then it is dropped, which is as good.
            End::Fenced => drop(give_back.send(keep)),
            End::Abandoned => std::mem::forget(keep),
        });
        let access_key = self.shared.grants.insert(blocks, wire, release);
        Granted { access_key, receiver: self.clone(), fenced: Some(fenced) }
    }

    /// The peer has said, on the handoff's stream, that nothing of it writes under a grant any more: a
    /// grant that was revoked meanwhile need not be quarantined any longer.
    pub fn writer_stopped(&self, generation: Generation) {
        self.shared.grants.writers_stopped(generation);
    }

    /// Ways to reach the pool, best first.
    pub fn offers(&self) -> &[TransportOffer] {
        &self.shared.offers
    }

    /// What arrived, by transport.
    pub fn counters(&self) -> &Counters {
        self.shared.grants.counters()
    }

    /// What is granted and quarantined now.
    pub fn load(&self) -> ReceiverLoad {
        self.shared.grants.load()
    }
}

/// Blocks that a peer may write into. Dropping it revokes the grant.
#[must_use = "dropping a grant revokes it"]
pub struct Granted<K> {
    access_key: AccessKey,
    receiver: Receiver,
    fenced: Option<oneshot::Receiver<K>>,
}

impl<K> Granted<K> {
    /// Its name.
    pub fn generation(&self) -> Generation {
        self.access_key.generation
    }

    /// What its writer shows, to be told to the one peer that shall write.
    pub fn access_key(&self) -> AccessKey {
        self.access_key
    }

    /// From now on only this peer may write over data connections that know who is there. To be called before the access key
    /// is told to anybody; only the first call counts.
    pub fn bind(&self, writer: Identity) {
        if let Some(grant) = self.receiver.shared.grants.find(self.generation()) {
            grant.bind(writer);
        }
    }

    /// Whether somebody else than the [bound](Self::bind) peer has shown the access key: it has another key now, or the access key was
    /// stolen.
    pub fn met_stranger(&self) -> bool {
        self.receiver.shared.grants.find(self.generation()).is_some_and(|grant| grant.met_stranger())
    }

    /// Ways to reach the blocks, best first.
    pub fn offers(&self) -> &[TransportOffer] {
        self.receiver.offers()
    }

    /// Compares checksums with the blocks' memory, on the receiver's own thread.
    ///
    /// # Errors
    /// The first piece that is unknown or wrong.
    pub fn verify(&self, pieces: Vec<Piece>) -> impl Future<Output = Result<(), KvFault>> + Send + use<K> {
        self.receiver.shared.verifier.verify(self.generation(), pieces)
    }

    /// Ends the grant after everything was verified: the writer has nothing left to write.
    pub fn commit(self) -> Fenced<K> {
        self.receiver.writer_stopped(self.generation());
        self.revoke()
    }

    /// Takes the grant back. Sockets are fenced when this returns; the result resolves when
    /// everything is. Dropping the result is fine: then `keep` is dropped at that time.
    pub fn revoke(mut self) -> Fenced<K> {
        self.receiver.shared.grants.revoke(self.generation());
        Fenced(self.fenced.take().expect("taken only here, where the grant is consumed"))
    }
}

impl<K> Drop for Granted<K> {
    fn drop(&mut self) {
        if self.fenced.take().is_some() {
            self.receiver.shared.grants.revoke(self.generation());
        }
    }
}

/// Resolves to the grant's guard when no writer can reach its blocks; to `None` only if the
/// receiver was torn down.
pub struct Fenced<K>(oneshot::Receiver<K>);

impl<K> Future for Fenced<K> {
    type Output = Option<K>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<K>> {
        Pin::new(&mut self.0).poll(context).map(Result::ok)
    }
}

/// Listens for peers, and says at which "host:port" they reach it.
pub(crate) fn listen(
    kind: TransportKind,
    address: SocketAddr,
    config: &ReceiverConfig,
) -> io::Result<(TcpListener, String)> {
    let listener = TcpListener::bind(address).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot listen for {kind} peers on {address}: {error}"))
    })?;
    let bound = listener.local_addr()?;
    let host = config.advertise_host.clone().unwrap_or_else(|| match bound {
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    });
    Ok((listener, format!("{host}:{}", bound.port())))
}

/// Bytes that nobody can guess.
///
/// # Panics
/// When the kernel has none, which it promises to have.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: the buffer is valid for its length; so few bytes are never returned in part.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(got, N as isize, "the kernel's randomness is available: {}", io::Error::last_os_error());
    bytes
}
