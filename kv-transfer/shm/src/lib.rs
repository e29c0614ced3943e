//! KV through shared memory: the prefill worker maps the decode worker's pool and writes into the
//! granted blocks itself. For workers of one user on one host; whoever maps the pool is trusted
//! with all of it.
//!
//! ```text
//! P: ShmPool, one per pool              unix socket             D: ShmServer, one per pool
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
//! A pool on a device is shared by its handle instead of a descriptor (CUDA IPC): the prefill worker opens it once, and
//! copies from its own pool by the device, or from host memory; an event behind each frame tells when that is done. One that
//! lies on several devices has a handle for each, and each device of the prefill worker copies its heads to those that have
//! them, too (`ranks.rs`). No GPU was there to run it on: see `devices.rs`.
//!
//! Nobody can stop a one-sided writer but itself, so a revoked grant stays quarantined until
//! `Close`, or `Stopped` on the handoff's stream, or the end of the socket. The kernel closes a
//! dying process's sockets after its threads are gone, so the end of the socket is late enough. A
//! frozen process may hold blocks for as long as it is frozen; they are counted, never reused. What its device does ends
//! later, when the driver's files are closed: so where the pool is on a device, the end of the socket ends only grants
//! that were closed before, and the others with the process (its pidfd), after all of its files. Should a driver go on
//! even then, this does not hold; that has to be seen on a device.

mod client;
mod host;
mod server;
mod target;
#[cfg(test)]
mod tests;
mod wire;

pub use client::ShmSending;
pub use server::ShmReceiving;
