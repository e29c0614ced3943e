//! How a receiver is configured, and how its transports listen.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    time::Duration,
};

use baton_handoff::TransportKind;

/// Settings of every transport of a [`Receiver`](crate::Receiver). Each transport has its own settings beside these.
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// The host name or address at which peers reach this receiver. Default: the listener's address.
    pub advertise_host: Option<String>,
    /// Longest wait for the next byte of a handshake, a frame or an answer that has begun.
    pub io_timeout: Duration,
    /// Longest time until a new peer has shown a valid access key.
    pub handshake_timeout: Duration,
    /// Most connections of peers that have shown an access key. Further ones are closed at once. A peer keeps up to two while it uses
    /// them and some minutes longer, and any worker of a cluster may be one.
    pub max_connections: usize,
    /// Most peers that have not shown an access key yet. One more closes the oldest of them.
    pub max_unauthenticated: usize,
}

impl Default for ReceiverConfig {
    fn default() -> ReceiverConfig {
        ReceiverConfig {
            advertise_host: None,
            io_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(3),
            max_connections: 4096,
            max_unauthenticated: 64,
        }
    }
}

/// Listens for peers. Returns the listener, and the "host:port" at which peers reach it.
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
