//! How a receiver is configured, and how its transports listen.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    time::Duration,
};

use baton_handoff::TransportKind;

/// What holds for every transport of a [`Receiver`](crate::Receiver). What only one of them needs is configured there.
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// The host that peers reach this one by; by default the listener's address.
    pub advertise_host: Option<String>,
    /// For the next byte of something begun (a handshake, a frame, an answer).
    pub io_timeout: Duration,
    /// For everything that a peer has to say until it is known to have a grant.
    pub handshake_timeout: Duration,
    /// Peers that are known to have a grant; those beyond are closed at once.
    pub max_connections: usize,
    /// Peers that have not shown an access key yet; when one more comes, the one that has been longest about it is closed.
    pub max_unauthenticated: usize,
}

impl Default for ReceiverConfig {
    fn default() -> ReceiverConfig {
        ReceiverConfig {
            advertise_host: None,
            io_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(3),
            max_connections: 256,
            max_unauthenticated: 64,
        }
    }
}

/// Listens for peers, and says at which "host:port" they reach it.
pub fn listen(
    kind: TransportKind,
    address: SocketAddr,
    config: &ReceiverConfig,
) -> io::Result<(TcpListener, String)> {
    let listener = TcpListener::bind(address).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot listen for {kind} peers on {address}: {error}"))
    })?;
    let bound = listener.local_addr()?;
    let host = config.advertise_host.clone().unwrap_or_else(|| match bound {
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    });
    Ok((listener, format!("{host}:{}", bound.port())))
}
