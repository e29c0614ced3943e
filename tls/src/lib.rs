//! Who a peer is: certificates and keys from files, and TLS connections that know the identity of the other end.
//!
//! One certificate and one authority serve everything that a process says to other processes of Baton: it shows the same
//! certificate as a server and as a client, and believes a peer that shows one of the same authority. Only TLS 1.3 is
//! spoken. Files that change are read again by the next handshake; connections that are open stay as they are.
//!
//! It does not know what travels over the connections, nor what an identity may do.
#![forbid(unsafe_code)]

mod client;
mod config;
mod error;
mod identity;
mod stream;

pub use client::{TlsClient, TlsClientConfig};
pub use config::{Tls, TlsConfig};
pub use error::TlsError;
pub use identity::Identity;
pub use stream::{Accepted, Stream, accept, accept_either, connect};

pub use rustls;
