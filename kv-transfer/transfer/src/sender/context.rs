//! The configuration of a sender, and what its transports share.

use std::{
    fmt::Display,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use baton_handoff::TransportOffer;
use baton_kv_cache::BlockStorage;
use tracing::warn;

use super::ranking::Ranking;
use crate::counters::Counters;

/// Settings of every transport of a [`Sender`](crate::Sender). Each transport has its own settings beside these.
#[derive(Clone, Debug)]
pub struct SenderConfig {
    /// KV bytes of one frame, at least one piece. Large frames cost less, small ones spread better over streams.
    pub frame_bytes: usize,
    /// Longest time to connect to a peer and to finish the handshake.
    pub connect_timeout: Duration,
    /// Longest time for a peer to take or to confirm what is written.
    pub io_timeout: Duration,
    /// How long a connection stays open that nothing uses, over rdma and tcp. The peer keeps threads for it, and over rdma a
    /// registration of its pool.
    pub idle_timeout: Duration,
    /// How long an offer that failed is tried after the other ones. It doubles with each further failure, up to five
    /// minutes.
    pub failure_pause: Duration,
}

impl Default for SenderConfig {
    fn default() -> SenderConfig {
        SenderConfig {
            frame_bytes: 1 << 20,
            connect_timeout: Duration::from_secs(3),
            io_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(300),
            failure_pause: Duration::from_secs(10),
        }
    }
}

/// What the transports of one sender share.
pub struct SenderContext {
    /// The source blocks.
    pub storage: Arc<BlockStorage>,
    /// Limits and deadlines.
    pub config: SenderConfig,
    /// What was sent, by transport.
    pub counters: Counters,
    ranking: Mutex<Ranking>,
}

impl SenderContext {
    pub(super) fn new(storage: Arc<BlockStorage>, config: SenderConfig) -> SenderContext {
        SenderContext { storage, config, counters: Counters::default(), ranking: Mutex::default() }
    }

    /// What is known about offers.
    pub(super) fn ranking(&self) -> MutexGuard<'_, Ranking> {
        self.ranking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that an offer failed: others are tried before it for a while.
    pub(super) fn failed(&self, offer: &TransportOffer, error: &dyn Display) {
        let pause = self.ranking().failed(offer, self.config.failure_pause, Instant::now());
        if let Some(pause) = pause {
            warn!(transport = %offer.kind(), peer = %offer.address(), %error, ?pause, "a kv transport failed: during the pause it is tried after the other ones");
        }
    }
}
