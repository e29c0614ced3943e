//! Connections to the workers that hand KV over: one per address, shared by all handoffs.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use baton_cluster::{DialError, Dialed, Dialer};
use baton_proto::worker::{decode_client::DecodeClient, prefill_client::PrefillClient};
use baton_tls::Identity;
use tonic::transport::Channel;

use crate::server::{KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_MESSAGE_BYTES};

/// A running worker accepts at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// At this many addresses all are forgotten; connections in use stay with their handoffs.
const MAX_PEERS: usize = 1024;

/// Connections by address. They are made when first used, and again after a loss.
#[derive(Debug)]
pub struct Peers {
    dialer: Dialer,
    channels: Mutex<HashMap<String, Dialed>>,
}

/// The connection to one worker.
#[derive(Clone, Debug)]
pub struct Link {
    peers: Arc<Peers>,
    address: String,
    dialed: Dialed,
}

impl Peers {
    /// Dials with `dialer`.
    pub fn new(dialer: Dialer) -> Arc<Peers> {
        Arc::new(Peers { dialer, channels: Mutex::default() })
    }

    /// What dials.
    pub fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    /// The connection to the worker at `address`.
    ///
    /// # Errors
    /// When it is no address, or it needs TLS and this worker has none.
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
                    .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
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

    /// As above, of a decode worker.
    pub fn decode_client(&self) -> DecodeClient<Channel> {
        DecodeClient::new(self.dialed.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// The identity in the worker's certificate, once a call was answered; `None` without TLS.
    pub fn identity(&self) -> Option<Identity> {
        self.dialed.peer()
    }

    /// The next handoff makes a new connection, and reads the certificate again. Calls under way continue.
    pub fn forget(&self) {
        self.peers.channels.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.address);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::net::TcpListener;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Streaming, transport::Server};
    use tonic_health::{
        ServingStatus,
        pb::{HealthCheckRequest, HealthCheckResponse, health_client::HealthClient},
        server::HealthReporter,
    };

    use super::*;

    /// A server whose calls send a message for each status that the reporter sets, and a connection to it.
    async fn watched() -> (HealthReporter, HealthClient<Channel>) {
        let (reporter, service) = tonic_health::server::health_reporter();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), pending()));
        let link = Peers::new(Dialer::default()).link(&address).unwrap();
        (reporter, HealthClient::new(link.dialed.channel))
    }

    async fn watch(client: &HealthClient<Channel>) -> Streaming<HealthCheckResponse> {
        let mut stream = client.clone().watch(HealthCheckRequest::default()).await.unwrap().into_inner();
        stream.message().await.unwrap().expect("the first status");
        stream
    }

    async fn set(reporter: &HealthReporter, round: usize) {
        let status = if round.is_multiple_of(2) { ServingStatus::NotServing } else { ServingStatus::Serving };
        reporter.set_service_status("", status).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn streams_may_leave_small_messages_unread() {
        let (reporter, client) = watched().await;
        let mut streams = Vec::new();
        for _ in 0..400 {
            streams.push(watch(&client).await);
        }
        set(&reporter, 0).await;
        // It is answered after the messages of the streams.
        watch(&client).await;
        for mut stream in streams {
            stream.message().await.unwrap().expect("the next status");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn messages_for_cancelled_streams_do_not_end_the_connection() {
        let (reporter, client) = watched().await;
        let mut survivor = watch(&client).await;
        for round in 0..20 {
            let mut streams = Vec::new();
            for _ in 0..200 {
                streams.push(watch(&client).await);
            }
            // Messages are under way while the streams are dropped.
            tokio::join!(set(&reporter, round), async { drop(streams) });
            survivor.message().await.unwrap().expect("the next status");
        }
    }
}
