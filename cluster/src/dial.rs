//! gRPC connections between the processes of Baton, over TLS where certificates are configured.

use std::{
    io,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use baton_tls::{Identity, Stream, Tls};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Bytes that a process sends of all calls of a connection before the other one reads them: the most that HTTP/2 has. All calls share
/// it, so those whose clients do not read must not use it up. h2 counts each small message as 256 bytes or more, and ends the connection
/// when those that are not read reach half of it.
pub const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// Opens channels to routers and workers.
#[derive(Clone, Debug, Default)]
pub struct Dialer {
    tls: Option<Tls>,
}

/// A channel, and the identity of its peer.
#[derive(Clone, Debug)]
pub struct Dialed {
    /// Connects when it is first used, and again when it is used after a loss.
    pub channel: Channel,
    peer: Arc<Mutex<Option<Identity>>>,
}

impl Dialed {
    /// The identity of the newest connection's peer; none without TLS. A running call uses that connection, or an older one
    /// that is lost.
    pub fn peer(&self) -> Option<Identity> {
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An address that cannot be dialled, and why.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The address is no URL.
    #[error("{address:?} is no address: {why}")]
    Address {
        /// The given address.
        address: String,
        /// Why it cannot be dialled.
        why: String,
    },
    /// This process speaks TLS, the other one does not.
    #[error(
        "{0} does not speak TLS, and this process speaks nothing else to workers and routers: give both --tls-cert, \
         --tls-key and --tls-ca, and write https://"
    )]
    Plain(String),
    /// The other process speaks TLS, this one does not.
    #[error("{0} speaks TLS: give this process --tls-cert, --tls-key and --tls-ca, too")]
    NoCertificates(String),
}

impl Dialer {
    /// A dialer with these certificates. Without certificates it does not use TLS.
    pub fn new(tls: Option<Tls>) -> Dialer {
        Dialer { tls }
    }

    /// Whether it speaks TLS.
    pub fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// An endpoint for this address, whose connection any number of calls may share, be left unread or be cancelled. The caller sets
    /// timeouts.
    ///
    /// # Errors
    /// When the address is no URL, or only one side uses TLS.
    pub fn endpoint(&self, address: &str) -> Result<Endpoint, DialError> {
        let wrong = |why: String| DialError::Address { address: address.to_owned(), why };
        let uri: Uri = address.parse().map_err(|error| wrong(format!("{error}")))?;
        match (uri.scheme_str(), &self.tls) {
            (Some("http"), None) => Endpoint::from_shared(address.to_owned()),
            // This module opens the TLS connection itself, so tonic must not.
            (Some("https"), Some(_)) => Endpoint::from_shared(address.replacen("https", "http", 1)),
            (Some("http"), Some(_)) => return Err(DialError::Plain(address.to_owned())),
            (Some("https"), None) => return Err(DialError::NoCertificates(address.to_owned())),
            _ => return Err(wrong("expected http://host:port".to_owned())),
        }
        .map(|endpoint| {
            // h2 counts messages that arrive for a cancelled call as errors, and by default ends the connection at the 1,024th.
            endpoint
                .initial_connection_window_size(CONNECTION_WINDOW)
                .http2_max_local_error_reset_streams(None)
        })
        .map_err(|error| wrong(error.to_string()))
    }

    /// A channel that connects when it is used.
    pub fn dial(&self, endpoint: Endpoint) -> Dialed {
        let peer = Arc::new(Mutex::new(None));
        let channel = match &self.tls {
            None => endpoint.connect_lazy(),
            Some(tls) => endpoint.connect_with_connector_lazy(connector(tls.clone(), Arc::clone(&peer))),
        };
        Dialed { channel, peer }
    }

    /// A connected channel.
    ///
    /// # Errors
    /// When no peer answers, or its certificate has another name.
    pub async fn connect(&self, endpoint: Endpoint) -> Result<Channel, tonic::transport::Error> {
        match &self.tls {
            None => endpoint.connect().await,
            Some(tls) => endpoint.connect_with_connector(connector(tls.clone(), Arc::default())).await,
        }
    }
}

fn connector(
    tls: Tls,
    peer: Arc<Mutex<Option<Identity>>>,
) -> impl tower::Service<
    Uri,
    Response = TokioIo<Stream>,
    Error = io::Error,
    Future = impl Future<Output = io::Result<TokioIo<Stream>>> + Send + 'static,
> + Clone
+ Send
+ 'static {
    tower::service_fn(move |uri: Uri| {
        let (tls, peer) = (tls.clone(), Arc::clone(&peer));
        async move {
            let host = uri.host().unwrap_or_default();
            let socket = TcpStream::connect(format!("{host}:{}", uri.port_u16().unwrap_or(443))).await?;
            socket.set_nodelay(true)?;
            let (stream, identity) = baton_tls::connect(&tls, host, socket).await?;
            // Known before the first call is sent.
            *peer.lock().unwrap_or_else(PoisonError::into_inner) = Some(identity);
            Ok(TokioIo::new(stream))
        }
    })
}

/// Whether a host name or address, as it stands in a URL, means the host that uses it.
pub fn is_loopback_host(host: &str) -> bool {
    // As URLs write addresses of IPv6.
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    address.map_or(host == "localhost", |address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_have_tls_or_neither() {
        let dialer = Dialer::default();
        let error = |address: &str| dialer.endpoint(address).unwrap_err().to_string();
        assert!(error("https://worker:1").contains("give this process --tls-cert"));
        assert!(error("worker:1").contains("expected http://host:port"));
        assert!(dialer.endpoint("http://worker:1").is_ok());
    }
}
