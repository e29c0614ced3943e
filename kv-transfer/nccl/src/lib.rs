//! KV through NCCL, from device to device: over NVLink, PCIe or the network, whichever NCCL finds. Both sides take
//! part: the decode worker receives into granted blocks what the prefill worker sends. NCCL's library and the CUDA
//! driver are loaded at run time.
//!
//! ```text
//! P: NcclPool, one per pool            control connection (TCP)         D: NcclServer, one per pool
//!   Hello{pool, layout, access key} --------------------------->  such a grant? a slot free?
//!                         <-----------------------------------  Welcome + unique id
//!   joins as rank 1       ==== communicator of two ranks =====  joins as rank 0
//!   Announce{n, access key, pieces} --------------------------->  granted to it? not announced before?
//!                         <-----------------------------------  Go{n}: posts one group of receives into the blocks
//!   posts one group of sends ================================>
//!                         <-----------------------------------  Landed{n}: the group is done
//! ```
//!
//! A frame of up to 256 pieces is one group. Up to 16 are announced ahead, so that the answer is there when the one
//! before is done. `Landed` is what completes a push: that the sends are done says only that the bytes are on their way.
//!
//! # No deadlock
//!
//! NCCL matches sends and receives by order alone. Both sides have one thread for a communicator, and post in the
//! order of announcements on one connection; see `lane.rs`. What was announced and answered with `Go` is always sent,
//! also when its route is closed meanwhile: source blocks are kept until then. So no chunk can overtake another.
//!
//! # Fence
//!
//! Nothing is written into a pool but by receives that this side has posted itself. A grant that is revoked gets no
//! new ones, and its blocks are released when the last group that has pieces in them is done, or the communicator is
//! **aborted**, which is the fence: its kernels have ended, and the buffers that the network writes to are gone
//! (blocks are never registered with NCCL, so that nobody else writes to them). That happens when
//!
//! - the control connection ends, carries nonsense, or an answer out of order;
//! - nothing has become of the oldest group for `io_timeout`;
//! - NCCL reports an error.
//!
//! The peer's word is not needed, and not enough: `Stopped` on the handoff's stream does not release blocks that a
//! group of this side may still write. Should an abort fail, the blocks stay in quarantine for good, and it is logged.
//! The sender fences its source blocks in the same way. A communicator serves all grants between two pools; so an
//! abort costs those that are under way, never data, as what was not verified is not decoded.
//!
//! # Memory
//!
//! A pool in device memory is read and written where it is. One in host memory is registered with the driver, once,
//! and NCCL's kernels reach it over PCIe. Checksums are of what lies in the blocks, and are taken by the device that has
//! them, or by processors. Verification is never left out. Pieces that are not the same on both sides are put together in
//! host memory, which blocks on a device do not take part in.
//!
//! # What was not run
//!
//! Anything with a device: what is not NCCL's or the driver's is tested with `tests/fake_fabric.rs` in their place, and the
//! library is loaded, asked for its version and for a unique id where it is. See `tests/cuda.rs` for what one GPU can
//! show. What a communicator costs in device memory was not measured; [`communicators`] bounds their number.

mod client;
mod communicators;
mod connection;
mod cuda;
mod fabric;
mod findings;
mod joining;
mod lane;
mod peer;
mod pool;
mod server;
mod session;
#[cfg(test)]
mod tests;
mod wire;

pub use client::NcclSending;
pub use fabric::{
    Fabric, FabricError, NcclCommunicator, NcclRank, Place, ReachableMemory, TransferDirection, UniqueId,
};
pub use findings::NcclFindings;
pub use server::NcclReceiving;
