//! KV through shared memory: the prefill worker maps the decode worker's pool and writes into the
//! granted blocks itself. It is for workers of one user on one host. A peer that maps the pool is trusted
//! with the whole pool.
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
//! A pool on a device is shared by a CUDA IPC handle instead of a descriptor. The prefill worker opens the handle once.
//! It copies from its own device, all pieces of a frame by one launch, or from host memory. A pool on several devices
//! has one handle for each device. Each device of the prefill worker copies its heads to the devices that hold the same
//! heads (`ranks.rs`). It has run on one GPU, with two processes; several GPUs have not run it.
//!
//! Only the writer itself can stop a one-sided write. So a revoked grant stays quarantined until
//! `Close`, `Stopped` on the handoff's stream, or the end of the socket. The kernel closes the sockets of a
//! dying process after its threads have ended, so the end of the socket is late enough. A
//! frozen process keeps its blocks in quarantine while it is frozen. They are counted and never reused.
//!
//! A device may write longer than its process's threads, until the driver's files are closed. So if the pool is on a
//! device, the end of the socket does not fence open grants. The end of the process (its pidfd) does, after all of its
//! files are closed. This assumes that a driver stops then; that was not tested on a device.
//!
//! A device that fails while it copies is waited for. Then the push fails, and the blocks of both sides are freed as after
//! any failed push. If the wait fails, too, both sides keep the blocks until the end of the writer's process.

mod client;
mod host;
mod link;
mod server;
mod target;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod wire;

pub use client::ShmSending;
pub use server::ShmReceiving;
