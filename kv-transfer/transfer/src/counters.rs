//! Counters of the KV that moves, for metrics. They can be read at any time.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_handoff::TransportKind;

/// Monotonic counts of one transport, in one direction.
#[derive(Debug, Default)]
pub struct TransportCounters {
    bytes: AtomicU64,
    pieces: AtomicU64,
    routes: AtomicU64,
    fallbacks: AtomicU64,
    late_bytes: AtomicU64,
    failures: AtomicU64,
    rejections: AtomicU64,
}

/// The counts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportCounts {
    /// KV bytes placed in granted blocks.
    pub bytes: u64,
    /// Pieces placed.
    pub pieces: u64,
    /// Sender: handoffs that took this transport. Receiver: peers that connected.
    pub routes: u64,
    /// Sender: handoffs that took this transport because a better offer failed, just now or lately.
    pub fallbacks: u64,
    /// Receiver: bytes that were dropped because their grant was revoked or never existed.
    pub late_bytes: u64,
    /// Connections that ended before their work was done. Receiver: of admitted peers.
    pub failures: u64,
    /// Receiver: connections that ended before their peer was admitted.
    pub rejections: u64,
}

impl TransportCounters {
    /// Counts pieces, of `num_bytes` in all, that are in granted blocks.
    pub fn placed(&self, pieces: usize, bytes: usize) {
        self.pieces.fetch_add(pieces as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a route that was opened or a peer that connected. `fallback`: a better transport failed, or pauses.
    pub fn routed(&self, fallback: bool) {
        self.routes.fetch_add(1, Ordering::Relaxed);
        if fallback {
            self.fallbacks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts bytes that came too late and were dropped.
    pub fn late(&self, bytes: usize) {
        self.late_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a connection that ended before its work was done.
    pub fn failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection whose peer was not admitted.
    pub fn rejected(&self) {
        self.rejections.fetch_add(1, Ordering::Relaxed);
    }

    /// The counts now.
    pub fn read(&self) -> TransportCounts {
        TransportCounts {
            bytes: self.bytes.load(Ordering::Relaxed),
            pieces: self.pieces.load(Ordering::Relaxed),
            routes: self.routes.load(Ordering::Relaxed),
            fallbacks: self.fallbacks.load(Ordering::Relaxed),
            late_bytes: self.late_bytes.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            rejections: self.rejections.load(Ordering::Relaxed),
        }
    }
}

/// The counters of every transport, in one direction: a receiver has one, a sender has one.
#[derive(Debug, Default)]
pub struct Counters {
    shm: TransportCounters,
    rdma: TransportCounters,
    nccl: TransportCounters,
    tcp: TransportCounters,
}

impl Counters {
    /// Those of one transport.
    pub fn of(&self, kind: TransportKind) -> &TransportCounters {
        match kind {
            TransportKind::Shm => &self.shm,
            TransportKind::Rdma => &self.rdma,
            TransportKind::Nccl => &self.nccl,
            TransportKind::Tcp => &self.tcp,
        }
    }
}
