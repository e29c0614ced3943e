//! Connections to the workers that give KV: one per address, shared by every handoff.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use baton_cluster::{DialError, Dialed, Dialer};
use baton_proto::worker::prefill_client::PrefillClient;
use baton_tls::Identity;
use tonic::transport::Channel;

use crate::server::{KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_MESSAGE_BYTES};

/// A worker that is there accepts at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Beyond this many addresses, all are forgotten; those in use live on in their handoffs.
const MAX_PEERS: usize = 1024;

/// Workers by address. They connect when first used, and again when a connection was lost.
#[derive(Debug)]
pub struct Peers {
    dialer: Dialer,
    channels: Mutex<HashMap<String, Dialed>>,
}

/// The way to one worker.
#[derive(Clone, Debug)]
pub struct Link {
    peers: Arc<Peers>,
    address: String,
    dialed: Dialed,
}

impl Peers {
    /// Calls them by this dialer.
    pub fn new(dialer: Dialer) -> Arc<Peers> {
        Arc::new(Peers { dialer, channels: Mutex::default() })
    }

    /// How they are called.
    pub fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    /// The way to the worker at `address`.
    ///
    /// # Errors
    /// When it is no address, or it has TLS and this worker has not.
    pub fn link(self: &Arc<Self>, address: &str) -> Result<Link, DialError> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let dialed = match channels.get(address) {
            Some(dialed) => dialed.clone(),
            None => {
                let endpoint = self
                    .dialer
                    .endpoint(address)?
                    .connect_timeout(CONNECT_TIMEOUT)
                    .tcp_nodelay(true)
                    .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
                    .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
                    .http2_adaptive_window(true);
                let dialed = self.dialer.dial(endpoint);
                if channels.len() >= MAX_PEERS {
                    channels.clear();
                }
                channels.insert(address.to_owned(), dialed.clone());
                dialed
            }
        };
        Ok(Link { peers: Arc::clone(self), address: address.to_owned(), dialed })
    }
}

impl Link {
    /// A client of the worker.
    pub fn client(&self) -> PrefillClient<Channel> {
        PrefillClient::new(self.dialed.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Who the worker is by its certificate, once a call was answered; nobody without TLS.
    pub fn identity(&self) -> Option<Identity> {
        self.dialed.peer()
    }

    /// The next handoff connects anew, and learns anew who is there. Calls that are under way go on.
    pub fn forget(&self) {
        self.peers.channels.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.address);
    }
}
