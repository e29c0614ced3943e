//! The narrow seam between the transport and what moves the bytes: NCCL on CUDA devices (`cuda.rs`), and, for
//! tests, threads that copy memory.
//!
//! Nothing here waits: whoever uses a fabric asks again until a deadline of its own has passed, and aborts then.

use std::{
    fmt::{self, Debug},
    sync::Arc,
};

use baton_cuda::nccl::NcclError;
pub use baton_cuda::nccl::UniqueId;
use baton_kv_cache::BlockStorage;
use thiserror::Error;

/// Which of the two a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NcclRank {
    /// The decode worker.
    Receiver,
    /// The prefill worker.
    Sender,
}

/// What a group does with its places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferDirection {
    /// The source.
    Send,
    /// The destination.
    Receive,
}

/// Bytes of one piece, as the fabric sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Of the first.
    pub address: u64,
    /// How many.
    pub len: usize,
}

/// Why a fabric cannot be used, or has stopped to work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FabricError {
    /// No NCCL, or one that lacks something.
    #[error(
        "no nccl without NCCL's library: {0}; install it (the wheel nvidia-nccl-cu12 or, for CUDA 13, nvidia-nccl-cu13 \
         has it), and let BATON_NCCL name libnccl.so.2 or its folder"
    )]
    Absent(String),
    /// No driver, or no device of it.
    #[error("no nccl without a CUDA device: {0}")]
    NoDevice(String),
    /// A call failed. What it had begun may go on until the communicator is aborted.
    #[error("{call} failed: {why}")]
    Failed {
        /// Which.
        call: &'static str,
        /// Its error.
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

/// What moves bytes between the pools of two processes.
pub trait Fabric: Debug + Send + Sync {
    /// Lets the fabric read and write a pool: once for each, not for a request.
    fn reach(&self, memory: &Arc<BlockStorage>) -> Result<ReachableMemory, FabricError>;

    /// A new one, of which the other rank is told.
    fn unique_id(&self) -> Result<UniqueId, FabricError>;

    /// Begins to join the other rank; [`NcclCommunicator::is_ready`] says when that has happened.
    fn join(&self, id: &UniqueId, rank: NcclRank) -> Result<Box<dyn NcclCommunicator>, FabricError>;
}

/// The connection of two ranks. Groups are carried out one after the other, in the order in which each side posted
/// them: the n-th place that one sends goes to the n-th that the other receives, whatever they belong to.
pub trait NcclCommunicator: Send {
    /// Whether what was begun last, joining or posting, has taken hold, so that the next group may be posted.
    fn is_ready(&mut self) -> Result<bool, FabricError>;

    /// Posts one group. Only when [`is_ready`](Self::is_ready).
    ///
    /// # Safety
    /// The places are reached by the fabric. Until the group is done, or the communicator is aborted, nobody writes
    /// those of a `Send`, and nobody uses those of a `Receive`.
    unsafe fn post(&mut self, direction: TransferDirection, places: &[Place]) -> Result<(), FabricError>;

    /// How many groups are done, of all that were posted: their places are not used any more, and hold what came.
    fn num_done(&mut self) -> Result<u64, FabricError>;

    /// Ends everything: when this has returned without an error, no place is read or written any more. The other
    /// rank is not told; it waits.
    ///
    /// # Errors
    /// When that cannot be promised.
    fn abort(&mut self) -> Result<(), FabricError>;
}

/// A pool that a fabric can read and write, for as long as this lives.
pub struct ReachableMemory {
    base: u64,
    // Ends before the memory goes.
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
    /// `base` is where the fabric sees the first byte of the memory; dropping `registration` ends that.
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

    /// So many bytes from `offset` of the memory on.
    ///
    /// # Panics
    /// When they do not lie in it: offsets come from its own layout.
    pub fn place(&self, offset: usize, len: usize) -> Place {
        let size_bytes = self.memory.size_bytes();
        assert!(offset <= size_bytes && len <= size_bytes - offset, "a place outside of the memory");
        Place { address: self.base + offset as u64, len }
    }
}
