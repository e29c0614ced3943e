//! Mutual TLS: certificates and keys from files, and connections that know the identity of the peer.
//!
//! A process uses one certificate and one authority for all connections to other processes of Baton. It shows the same
//! certificate as server and as client, and trusts peers with a certificate of the same authority. Only TLS 1.3 is
//! used. A changed file is read at the next handshake; open connections stay as they are.
//!
//! The crate does not know what is sent over the connections, nor what an identity may do.
#![forbid(unsafe_code)]

mod client;
mod config;
mod error;
mod identity;
mod stream;

pub use client::{TlsClient, TlsClientConfig};
pub use config::{Tls, TlsConfig, compute_with_ring};
pub use error::TlsError;
pub use identity::Identity;
pub use stream::{Accepted, Stream, accept, accept_either, connect};

pub use rustls;
