//! KV through one-sided writes: a network device of the prefill worker's host writes into the decode
//! worker's pool, and no processor of the decode worker takes part. NIXL writes, over the best network that UCX finds
//! on the hosts (verbs, or else sockets). The library is loaded at run time.
//!
//! ```text
//! P: RdmaPool, one per pool            control connection (TCP)         D: RdmaServer, one per pool
//!   Hello{pool, layout}   ----------------------------------->  same pool? agents for this peer alone
//!                         <-----------------------------------  Welcome{number of blocks, of ranks}
//!                         <-----------------------------------  for each rank: RankMemory{base, kind} + metadata
//!   Open{generation}      ----------------------------------->  registers a one-sided writer
//!                         <-----------------------------------  Opened
//!   writes pieces: one request of NIXL for each frame, of up to 256 pieces
//!                         <-----------------------------------  Revoke{generation}   (if it must end)
//!   Close{generation}     ----------------------------------->  the last write has ended
//!   (process ends)        -------- end of stream ------------>  fenced
//! ```
//!
//! The completion tells the sender that a frame is in the peer's memory (NIXL flushes the endpoint). `Written` on
//! the handoff's stream tells the decode worker, which then compares checksums with its own memory.
//!
//! # Ranks
//!
//! The blocks of a model with several ranks are spread over their devices: each device holds some heads. Each rank's
//! memory has its own agent on each side, because each device has its own context. A frame is one request for each pair
//! of ranks that share heads (`ranks.rs`). It has landed when all of its requests have. Pieces are read and written in
//! place. If the peer has several ranks, checksums cover heads, so that each device computes those of its own heads.
//!
//! # Fence
//!
//! A peer's memory key opens the whole pool. So, as with shared memory, only a correct peer keeps to its grants. Unlike
//! with shared memory, the key can be revoked. So this side has an agent for each peer and rank: a registration of the
//! pool, endpoints and a progress thread. The registration is made once for each connection, never for a request.
//! **Dropping the agent is the fence**, and the only one besides the writer's own word:
//!
//! - Over verbs its queue pairs are destroyed and its memory region is deregistered. When the verbs calls return, the
//!   device drops everything that still arrives for either.
//! - Over UCX's sockets, where the progress thread places what arrives, that thread has ended and the sockets
//!   are closed.
//! - UCX's transports inside of one host (CMA, mapped memory, CUDA IPC) write without the target, so no key stops
//!   them. They are switched off (`SHM_DEVICES`), and a `UCX_SHM_DEVICES` that would switch them on is refused.
//!   On one host, the `shm` transport is faster anyway.
//!
//! Blocks of a revoked grant stay in quarantine until one of these:
//!
//! - `Close`: the writer says that its last write has completed. `Stopped` on the handoff's stream is not enough: the
//!   handoff has stopped, but an aborted write may be under way until the agent is dropped.
//! - The commit of a grant that no other connection holds open: all its pieces were verified, so each write has completed.
//! - The control connection ends or carries a malformed message: the agent is dropped, then the blocks are released.
//! - The writer was asked to close the grant and did not within `io_timeout`: the agent is dropped, then the blocks are
//!   released. The fence frees the blocks, not the time.
//!
//! The end of the control connection alone is not enough: when a process dies, bytes in its device, in the network or
//! in the receiving socket may arrive later.
//!
//! NIXL parses the metadata that a peer sends. This crate bounds its size. The metadata is trusted as far as a peer is
//! that knows the pool's incarnation.
//!
//! Pieces that are not the same on both sides are assembled in registered memory beside the pool. It belongs to the
//! connection, as the key does.
//!
//! The price is one registration for each peer. One key for all peers would need one registration only, but then the
//! fence of one frozen prefill worker would fail the handoffs of all peers. A sender ends a connection that no handoff
//! has used for five minutes, so the price is paid for peers that send.
//!
//! The sender fences itself in the same way. A write that fails or takes longer than `io_timeout` (UCX does
//! not notice a silent partition) ends the connection. Its agent is dropped first, so that the device reads no
//! source block any more. Frames of a lost connection are written once more, over a new connection with a new
//! registration; the peer opens their grants again if they still stand. A late write of the first connection brings the
//! same bytes into the same granted blocks. All other frames fail, and their blocks are freed.
//!
//! # What was not run
//!
//! A real network device. Tests run over UCX's sockets, and `tests/rdma` over verbs in software (rdma_rxe).
//!
//! GPU memory. The pools of either side may be on a device. Each is registered with its kind and number, and the
//! welcome names those of the decode worker. A fake NIXL that copies memory (`tests/fake_nixl.rs`) tests the calls to
//! NIXL and their results. The real NIXL is tested to explain why it cannot register memory that is not a GPU's. The
//! tests in `tests/devices.rs` need a GPU. The device that holds the blocks computes the checksums. They would find a
//! write that GPUDirect has not made visible yet.

mod client;
mod connection;
mod link;
mod network;
pub(crate) mod nixl;
mod server;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod wire;

use std::path::Path;

pub use client::RdmaSending;
use network::{DEVICES, num_network_devices};
use nixl::Nixl;
pub use server::RdmaReceiving;

/// Whether this host has an RDMA device and NIXL, so that `rdma` is better than `tcp`. Without a device, `rdma` still
/// works if it is configured, over sockets and slower than `tcp`.
///
/// `nixl` is the library or its folder; `None` leaves that to the system.
///
/// # Errors
/// What is missing, in words.
pub fn finds_rdma(nixl: Option<&Path>) -> Result<(), String> {
    if num_network_devices() == 0 {
        return Err(format!("no rdma device in {DEVICES}"));
    }
    Nixl::load(nixl).map(drop).map_err(|error| error.to_string())
}
