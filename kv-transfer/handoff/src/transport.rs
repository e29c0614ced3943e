//! The kinds of transport, and what a decode worker offers so that a peer can reach granted blocks. How a transport works is
//! not known here.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

/// A means of moving KV between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransportKind {
    /// Shared memory: the peer maps the decode worker's blocks. Both have the same user and host.
    Shm,
    /// One-sided writes by a network device, through NIXL.
    Rdma,
    /// From one GPU to another, through NCCL.
    Nccl,
    /// TCP sockets.
    Tcp,
}

impl TransportKind {
    /// Every kind, best first.
    pub const ALL: [TransportKind; 4] =
        [TransportKind::Shm, TransportKind::Rdma, TransportKind::Nccl, TransportKind::Tcp];

    /// "shm", "rdma", "nccl" or "tcp".
    pub fn name(self) -> &'static str {
        match self {
            TransportKind::Shm => "shm",
            TransportKind::Rdma => "rdma",
            TransportKind::Nccl => "nccl",
            TransportKind::Tcp => "tcp",
        }
    }

    /// Whether it can write into blocks that are divided among ranks, each with some of the heads.
    pub fn supports_ranks(self) -> bool {
        self != TransportKind::Nccl
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<TransportKind> {
        TransportKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a peer reaches the decode worker's blocks over one transport. `pool` is the incarnation of the block pool. If the
/// worker at this address reports another one, it has restarted, and nothing is written.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransportOffer {
    /// Shared memory.
    Shm {
        /// Boot id and name of the host.
        host_id: String,
        /// Unix socket that sends a descriptor of the pool's memory.
        socket_path: PathBuf,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// One-sided writes by a network device.
    Rdma {
        /// "host:port" of the control listener, which sends memory addresses and keys.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// From one GPU to another, through NCCL.
    Nccl {
        /// "host:port" of the control listener, through which both sides create communicators.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// TCP sockets.
    Tcp {
        /// "host:port" of the data listener.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
}

impl TransportOffer {
    /// The transport of the offer.
    pub fn kind(&self) -> TransportKind {
        match self {
            TransportOffer::Shm { .. } => TransportKind::Shm,
            TransportOffer::Rdma { .. } => TransportKind::Rdma,
            TransportOffer::Nccl { .. } => TransportKind::Nccl,
            TransportOffer::Tcp { .. } => TransportKind::Tcp,
        }
    }

    /// Where the peer listens: a socket's path, or "host:port".
    pub fn address(&self) -> String {
        match self {
            TransportOffer::Shm { socket_path, .. } => socket_path.display().to_string(),
            TransportOffer::Rdma { address, .. }
            | TransportOffer::Nccl { address, .. }
            | TransportOffer::Tcp { address, .. } => address.clone(),
        }
    }
}
