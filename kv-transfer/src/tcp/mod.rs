//! KV over sockets.
//!
//! ```text
//! P: TcpPeer, one per pool                          D: TcpServer, one per pool
//!   queue of frames --> lane 0 == connection 0 ====> thread: readv into the granted blocks
//!                  \--> lane 1 == connection 1 ====> thread      | ack per frame
//!                       (writev from source blocks)              v
//!   pushes resolve <--- acks, one reader thread per connection <-+
//! ```
//!
//! Neither side copies in user space. A connection begins with a handshake that names the pool's
//! incarnation and the shape of its pieces; then frames go one way and acks the other, in order.

mod client;
#[cfg(test)]
mod faults;
mod server;
pub(crate) mod socket;
mod wire;

pub(crate) use client::{TcpPeer, connect};
pub(crate) use server::TcpServer;
