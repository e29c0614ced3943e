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
//! Neither side copies in user space. A connection begins with a handshake: the sender names the pool's incarnation and
//! the shape of its pieces, and shows the access key of a grant. Then frames go to the receiver and acks come back, in
//! order. Each frame carries the access key of its own grant. A peer that has not shown an access key costs one thread
//! and one descriptor, and every refusal has the same answer. The sender ends a connection that it has not used for five
//! minutes.
//!
//! With [`Tls`](baton_tls::Tls) all of this happens inside of TLS 1.3, and both sides show certificates. Then only the
//! peer that a grant is bound to can use the grant's access key. The kernel encrypts if it can ([`kernel`]); bytes then
//! go directly from and to blocks, as without TLS. Otherwise this process encrypts, with one copy on each side
//! ([`records`]).

mod channel;
mod client;
mod flight;
mod kernel;
mod records;
mod server;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod wire;

pub use client::TcpSending;
pub use server::TcpReceiving;
