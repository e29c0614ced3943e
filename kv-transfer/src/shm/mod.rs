//! KV through shared memory: the prefill worker maps the decode worker's pool and writes into the
//! granted blocks itself. For workers of one user on one host; whoever maps the pool is trusted
//! with all of it.
//!
//! ```text
//! P: ShmPeer, one per pool              unix socket             D: ShmServer, one per pool
//!   Hello{pool, layout}   ----------------------------------->  same user? same pool?
//!                         <-----------------------------------  Welcome{num_blocks} + descriptor
//!   Open{generation}      ----------------------------------->  registers a one-sided writer
//!                         <-----------------------------------  Opened
//!   copies pieces into the mapping
//!                         <-----------------------------------  Revoke{generation}   (if it must end)
//!   Close{generation}     ----------------------------------->  fenced
//!   (process ends)        -------- end of stream ------------>  everything of it is fenced
//! ```
//!
//! Nobody can stop a one-sided writer but itself, so a revoked grant stays quarantined until
//! `Close`, or `Stopped` on the handoff's stream, or the end of the socket. The kernel closes a
//! dying process's sockets after its threads are gone, so the end of the socket is late enough. A
//! frozen process may hold blocks for as long as it is frozen; they are counted, never reused.

mod client;
#[cfg(test)]
mod faults;
mod host;
mod server;
mod wire;

pub(crate) use client::ShmPeer;
pub(crate) use host::host_id;
pub(crate) use server::ShmServer;
