//! KV through NCCL, from device to device, over NVLink, PCIe or the network. Both sides take part: the prefill worker
//! sends, and the decode worker receives into granted blocks. NCCL's library and the CUDA driver are loaded at run
//! time.
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
//! A frame of up to 256 pieces is one group. Up to 16 groups are announced ahead, so that the answer is there when the
//! group before is done. `Landed` completes a push. The end of the sends does not: the bytes may still be on their way.
//!
//! # No deadlock
//!
//! NCCL matches sends and receives by order alone. Each side has one thread for a communicator, and posts groups in the
//! order of announcements on one connection; see `lane.rs`. A group that was answered with `Go` is always sent, even if
//! its route is closed meanwhile: the source blocks are kept until then. So no group can overtake another.
//!
//! # Fence
//!
//! Only receives that this side has posted write into its pool. A revoked grant gets no new receives. Its blocks are
//! released when the last group with pieces in them is done, or when the communicator is **aborted**. The abort is the
//! fence: the kernels have ended, and the buffers that the network writes to are gone. (Blocks are never registered
//! with NCCL, so the network never writes into them.) A communicator is aborted when
//!
//! - the control connection ends, carries a malformed message, or an answer out of order;
//! - the oldest group makes no progress for `io_timeout`;
//! - NCCL reports an error.
//!
//! The peer's word is not needed and not enough: `Stopped` on the handoff's stream does not release blocks that a
//! group of this side may still write. If an abort fails, the blocks stay in quarantine for good, and the log says so.
//! The sender fences its source blocks in the same way. One communicator serves all grants between two pools. So an
//! abort fails the handoffs in progress, but it never corrupts data: unverified pieces are not decoded.
//!
//! # Memory
//!
//! A pool in device memory is read and written in place. A pool in host memory is registered with the driver once, and
//! NCCL's kernels reach it over PCIe. Checksums cover the bytes in the blocks. The device that holds the blocks
//! computes them, or the processors do. Verification is never left out. Pieces that are not the same on both sides are
//! assembled in host memory; blocks on a device do not support that.
//!
//! # What was not run
//!
//! Transfers between two devices. The code outside of NCCL and the driver is tested with `tests/fake_fabric.rs`. Where
//! NCCL's library exists, a test loads it and asks for its version and a unique id. `tests/cuda.rs` has the tests for
//! one GPU. The device memory of a communicator was not measured; [`communicators`] bounds their number.

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
