//! KV through one-sided writes: a network device of the prefill worker's host writes into the decode
//! worker's pool, and no processor there takes part. NIXL does it, over whatever UCX finds on the hosts
//! (verbs; sockets where there is nothing better). The library is loaded at run time.
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
//! That a frame lies in the peer's memory, the sender learns from its completion (NIXL flushes the endpoint);
//! the decode worker learns it from `Written` on the handoff's stream, and believes it when the checksums of
//! its own memory agree.
//!
//! # Ranks
//!
//! Blocks of a model that several ranks compute lie on as many devices, some heads on each. Each rank's memory has an agent
//! of its own, on either side, as each device has a context of its own; a frame is one request for each two ranks that share
//! heads (`ranks.rs`), and has landed when all of them have. It is read and written where it lies, and
//! checksums are of heads where the peer has several ranks: so each device takes those of its own.
//!
//! # Fence
//!
//! The key that a peer is given opens the whole pool, so that grants bind only those who keep to them, as with
//! shared memory. Unlike there, the key can be taken back. So each peer has an agent of its own on this side (of each
//! rank): a registration of the pool, made once for each life of a peer (never for a request), endpoints, and a progress
//! thread. **Dropping the agent is the fence**, and it is the only one besides the writer's own word:
//!
//! - Over verbs its queue pairs are destroyed and its memory region is deregistered: the device drops what
//!   still arrives for either, and the verbs calls return after that holds.
//! - Over UCX's sockets, where the progress thread places what arrives, that thread has ended and the sockets
//!   are closed.
//! - UCX's ways inside of one host (CMA, mapped memory, CUDA IPC) write without asking the target, so that no
//!   key stops them. They are switched off (`SHM_DEVICES`), and a `UCX_SHM_DEVICES` that would switch them on
//!   again is refused. On one host, the `shm` transport is faster anyway.
//!
//! Blocks of a revoked grant stay in quarantine until one of these:
//!
//! - `Close`, or `Stopped` on the handoff's stream: the writer says that its last write has ended.
//! - The control connection ends, or carries nonsense: the agent is dropped, then the blocks are released.
//! - The writer has not let go within `io_timeout` of being asked: the same. It is not the time that frees
//!   the blocks, it is the fence; the time only says how long to be polite.
//!
//! The end of the socket alone would not do: when a process dies, what its device, the network or the
//! receiving socket still hold may arrive later.
//!
//! Whatever comes back from a peer in metadata is parsed by NIXL; it is bounded here, and believed as far as one
//! believes a peer that knows the pool's incarnation.
//!
//! Pieces that are not the same on both sides are put together in registered memory beside the pool, which
//! belongs to the connection as the key does.
//!
//! The price is one registration for each peer, where one for all would do without fences that leave the
//! others alone: with a shared key, one frozen prefill worker would cost every handoff that is under way.
//!
//! The sender fences itself in the same way. A write that fails or takes longer than `io_timeout` (UCX does
//! not notice a silent partition) takes the connection down: first its agent, so that the device reads no
//! source block any more. Frames that were only lost are written once more, over a new connection with a new
//! registration, under grants that the peer opens again if they still stand; what is late of the first time brings
//! the same bytes into the same granted blocks. Of others the routes learn it, and their blocks are freed.
//!
//! # What was not run
//!
//! A real network device: tests run over UCX's sockets, `tests/rdma` over verbs in software (rdma_rxe).
//!
//! GPU memory: pools may lie on a device of either side or both; each is registered by its kind and number, and a
//! welcome names those of the decode worker's. What is handed to NIXL for that, and what comes of it, is tested with a
//! NIXL that copies memory (`tests/fake_nixl.rs`); that the real one says why it cannot register what is no GPU's memory,
//! with the real one; the rest waits for a GPU in `tests/devices.rs`. Checksums are of what lies in the blocks, and taken by the
//! device that has them; a write that GPUDirect has not made visible yet would be found by them.

mod client;
mod connection;
mod link;
mod network;
pub(crate) mod nixl;
mod server;
#[cfg(test)]
mod tests;
mod wire;

use std::path::Path;

pub use client::RdmaSending;
use network::{DEVICES, num_network_devices};
use nixl::Nixl;
pub use server::RdmaReceiving;

/// Whether this host has what makes `rdma` better than `tcp`: a device for it, and NIXL. Where there is none,
/// `rdma` still works if it is asked for, over sockets and slower than `tcp`.
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
