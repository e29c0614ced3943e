//! What the threads of the decode worker's end share: the pool, and one peer's connection each.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use baton_handoff::{Generation, TransportKind};
use baton_transfer::{
    receiver::{EndedBy, Grants, OneSidedWriter, WriterId},
    socket,
};

use super::{
    communicators::Communicators,
    fabric::{Fabric, ReachableMemory},
    wire::Message,
};

/// What all connections share.
pub(super) struct Sharing {
    pub(super) grants: Arc<Grants>,
    pub(super) fabric: Arc<dyn Fabric>,
    pub(super) pool: ReachableMemory,
    pub(super) communicators: Arc<Communicators>,
    pub(super) io_timeout: Duration,
    pub(super) handshake_timeout: Duration,
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

/// The writer of a grant is this side's own communicator, so the peer's word cannot stop it.
impl OneSidedWriter for Peer {
    fn kind(&self) -> TransportKind {
        TransportKind::Nccl
    }

    fn ask_to_close(&self, _: Generation) {
        // Posted groups end or are aborted within `io_timeout`, and no group is posted after a revocation.
    }

    fn ended_by(&self) -> EndedBy {
        EndedBy::Nothing
    }
}
