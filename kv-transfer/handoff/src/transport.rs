//! The kinds of transport, and the ways to granted blocks that a decode worker offers. What a transport does is not
//! known here.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

/// What moves KV between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransportKind {
    /// The decode worker's memory, mapped: same user, same host.
    Shm,
    /// One-sided writes by a network device, through NIXL.
    Rdma,
    /// From one device to another, through NCCL.
    Nccl,
    /// Sockets.
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

    /// Whether it carries blocks that are on several devices, some heads on each.
    pub fn takes_ranks(self) -> bool {
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

/// A way to reach the decode worker's blocks. `pool` is the incarnation of its block pool: a peer that answers at the address
/// with another one has restarted, and is not written to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransportOffer {
    /// Shared memory.
    Shm {
        /// Boot id and name of the host.
        host_id: String,
        /// Unix socket that hands out the pool's memory.
        socket_path: PathBuf,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// One-sided writes by a network device.
    Rdma {
        /// "host:port" of the control listener, which hands out addresses and keys.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// From one device to another, through NCCL.
    Nccl {
        /// "host:port" of the control listener, through which communicators are arranged.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
    /// Sockets.
    Tcp {
        /// "host:port" of the data listener.
        address: String,
        /// Incarnation of the pool.
        pool: u64,
    },
}

impl TransportOffer {
    /// Which transport it is for.
    pub fn kind(&self) -> TransportKind {
        match self {
            TransportOffer::Shm { .. } => TransportKind::Shm,
            TransportOffer::Rdma { .. } => TransportKind::Rdma,
            TransportOffer::Nccl { .. } => TransportKind::Nccl,
            TransportOffer::Tcp { .. } => TransportKind::Tcp,
        }
    }
}
