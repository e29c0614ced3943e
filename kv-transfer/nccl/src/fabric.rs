//! The seam between the transport and the code that moves bytes: NCCL on CUDA devices (`cuda.rs`), or, in tests,
//! threads that copy memory.
//!
//! No call here waits, except for `abort`. The caller polls until its own deadline has passed, and then aborts.

use std::{
    fmt::{self, Debug},
    sync::Arc,
};

use baton_cuda::nccl::NcclError;
pub use baton_cuda::nccl::UniqueId;
use baton_kv_cache::BlockStorage;
use thiserror::Error;

/// The rank of a process in a communicator of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NcclRank {
    /// The decode worker.
    Receiver,
    /// The prefill worker.
    Sender,
}

/// Whether a group sends or receives its places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferDirection {
    /// Reads the places.
    Send,
    /// Writes the places.
    Receive,
}

/// Address and length of one piece, as the fabric sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Address of the first byte.
    pub address: u64,
    /// Number of bytes.
    pub len: usize,
}

/// Why a fabric cannot be used, or has stopped working.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FabricError {
    /// NCCL's library is missing, or it lacks a function.
    #[error(
        "no nccl without NCCL's library: {0}; install it (the wheel nvidia-nccl-cu12 or, for CUDA 13, nvidia-nccl-cu13 \
         has it), and let BATON_NCCL name libnccl.so.2 or its folder"
    )]
    Absent(String),
    /// There is no CUDA driver or no device.
    #[error("no nccl without a CUDA device: {0}")]
    NoDevice(String),
    /// A call failed. Its groups may go on until the communicator is aborted.
    #[error("{call} failed: {why}")]
    Failed {
        /// The function that failed.
        call: &'static str,
        /// The error.
        why: String,
    },
}

impl From<NcclError> for FabricError {
    fn from(error: NcclError) -> FabricError {
        match error {
            NcclError::Absent(why) => FabricError::Absent(why),
            NcclError::Failed { call, why } => FabricError::Failed { call, why },
        }
    }
}

/// Moves bytes between the pools of two processes.
pub trait Fabric: Debug + Send + Sync {
    /// Makes a pool reachable for the fabric. Called once for each pool, never for a request.
    fn reach(&self, memory: &Arc<BlockStorage>) -> Result<ReachableMemory, FabricError>;

    /// A new id for a communicator. The sender passes it to `join`, too.
    fn unique_id(&self) -> Result<UniqueId, FabricError>;

    /// Begins to join the peer's rank. [`NcclCommunicator::is_ready`] says when both have joined.
    fn join(&self, id: &UniqueId, rank: NcclRank) -> Result<Box<dyn NcclCommunicator>, FabricError>;
}

/// A communicator of two ranks. Groups run one after another, in the order in which each side posts them. The n-th
/// place that one rank sends goes to the n-th place that its peer receives.
pub trait NcclCommunicator: Send {
    /// Whether the last join or post has started, so that the next group may be posted.
    fn is_ready(&mut self) -> Result<bool, FabricError>;

    /// Posts one group. Call it only when [`is_ready`](Self::is_ready) has returned true.
    ///
    /// # Safety
    /// The fabric can reach the places. Until the group is done or the communicator is aborted, places of a `Send` are
    /// not written and places of a `Receive` are not used.
    unsafe fn post(&mut self, direction: TransferDirection, places: &[Place]) -> Result<(), FabricError>;

    /// The number of posted groups that are done. Their places hold the received bytes and are not used any more.
    fn num_done(&mut self) -> Result<u64, FabricError>;

    /// Ends all groups. After this returns without an error, no place is read or written any more. The peer's rank is
    /// not told and goes on waiting.
    ///
    /// # Errors
    /// When the groups may still run.
    fn abort(&mut self) -> Result<(), FabricError>;
}

/// A pool that a fabric can read and write while this value lives.
pub struct ReachableMemory {
    base: u64,
    // Dropped before the memory.
    registration: Option<Box<dyn Send + Sync>>,
    memory: Arc<BlockStorage>,
}

impl Debug for ReachableMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReachableMemory({:#x})", self.base)
    }
}

impl Drop for ReachableMemory {
    fn drop(&mut self) {
        drop(self.registration.take());
    }
}

impl ReachableMemory {
    /// `base` is the address at which the fabric sees the first byte. Dropping `registration` unregisters the memory.
    pub fn new(
        memory: &Arc<BlockStorage>,
        base: u64,
        registration: Option<Box<dyn Send + Sync>>,
    ) -> ReachableMemory {
        ReachableMemory { base, registration, memory: Arc::clone(memory) }
    }

    /// The pool.
    pub fn memory(&self) -> &Arc<BlockStorage> {
        &self.memory
    }

    /// `len` bytes from `offset` of the memory on.
    ///
    /// # Panics
    /// When they are not all in the memory. Offsets come from its own layout.
    pub fn place(&self, offset: usize, len: usize) -> Place {
        let size_bytes = self.memory.size_bytes();
        assert!(offset <= size_bytes && len <= size_bytes - offset, "a place outside of the memory");
        Place { address: self.base + offset as u64, len }
    }
}
