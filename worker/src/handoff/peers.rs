//! Connections to the workers that give KV: one per address, shared by every handoff.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use baton_proto::worker::prefill_client::PrefillClient;
use tonic::transport::{Channel, Endpoint};

use crate::server::{KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_MESSAGE_BYTES};

/// A worker that is there accepts at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Beyond this many addresses, all are forgotten; those in use live on in their handoffs.
const MAX_PEERS: usize = 1024;

/// Workers by address. They connect when first used, and again when a connection was lost.
#[derive(Debug, Default)]
pub struct Peers {
    channels: Mutex<HashMap<String, Channel>>,
}

impl Peers {
    /// A client of the worker at `address`.
    ///
    /// # Errors
    /// When it is no address.
    pub fn client(&self, address: &str) -> Result<PrefillClient<Channel>, tonic::transport::Error> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let channel = match channels.get(address) {
            Some(channel) => channel.clone(),
            None => {
                let channel = Endpoint::from_shared(address.to_owned())?
                    .connect_timeout(CONNECT_TIMEOUT)
                    .tcp_nodelay(true)
                    .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
                    .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
                    .http2_adaptive_window(true)
                    .connect_lazy();
                if channels.len() >= MAX_PEERS {
                    channels.clear();
                }
                channels.insert(address.to_owned(), channel.clone());
                channel
            }
        };
        Ok(PrefillClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES))
    }
}
