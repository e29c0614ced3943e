//! KV over sockets.
//!
//! ```text
//! P: TcpPool, one per pool                          D: TcpServer, one per pool
//!   queue of frames --> lane 0 == connection 0 ====> thread: readv into the granted blocks
//!                  \--> lane 1 == connection 1 ====> thread      | ack per frame
//!                       (writev from source blocks)              v
//!   pushes resolve <--- acks, one reader thread per connection <-+
//! ```
//!
//! Neither side copies in user space. A connection begins with a handshake that names the pool's incarnation and the
//! shape of its pieces, and shows the access key of a grant; then frames go one way and acks the other, in order, each
//! frame with the access key of its own grant. Before an access key was shown, a peer costs a thread and a descriptor and
//! nothing else, and whatever is wrong, the answer is the same.
//!
//! With [`Tls`](baton_tls::Tls) all of that happens inside of TLS 1.3, in which both sides have shown certificates, and
//! an access key is worth nothing to other peers than the one that its grant is bound to. The kernel encrypts if it can
//! ([`kernel`]), so that bytes go from and to blocks as without; else this process does, with a copy on each side
//! ([`records`]).

mod channel;
mod client;
mod flight;
mod kernel;
mod records;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub use client::TcpSending;
pub use server::TcpReceiving;
