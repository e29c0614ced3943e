//! The configuration of a sender, and what its transports share.

use std::{sync::Arc, time::Duration};

use baton_kv_cache::BlockStorage;

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
}

impl Default for SenderConfig {
    fn default() -> SenderConfig {
        SenderConfig {
            frame_bytes: 1 << 20,
            connect_timeout: Duration::from_secs(3),
            io_timeout: Duration::from_secs(10),
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
}
