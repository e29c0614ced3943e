//! How ranks on CPUs exchange numbers: the interface between the forward pass and a transport between ranks. Ranks on
//! GPUs use an interface of their own.
//!
//! All ranks call the same operations in the same order, with buffers of the same length. A communicator does not
//! know what the numbers mean.

use crate::shard::Rank;

/// One rank's end of the group. When it is dropped, the rank is lost: the other ranks' current and later operations
/// return [`CommunicatorError::Lost`], so no rank waits forever.
///
/// A sum adds the ranks' buffers in rank order, whatever the order in which ranks arrive. Every rank gets the same
/// bits, in every run.
pub trait Communicator: Send {
    /// The rank of this end.
    fn rank(&self) -> Rank;

    /// Replaces `buffer` by the sum of all ranks' buffers.
    ///
    /// # Errors
    /// When a rank is lost or calls another operation. The buffer's contents are then unspecified.
    fn all_reduce_sum(&mut self, buffer: &mut [f32]) -> Result<(), CommunicatorError>;

    /// Copies the ranks' parts, one after the other, to the first rank's `all`. The other ranks pass no `all`.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    ///
    /// # Panics
    /// When the first rank's `all` is missing or has another length than all parts together, or another rank passes
    /// one.
    fn gather(&mut self, part: &[f32], all: Option<&mut [f32]>) -> Result<(), CommunicatorError>;

    /// Waits for every rank. All ranks then see what each wrote to memory before.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    fn barrier(&mut self) -> Result<(), CommunicatorError>;
}

/// Ranks can no longer communicate. The only thing left to do with the communicator is to drop it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommunicatorError {
    /// A rank has ended.
    #[error("rank {rank} is lost")]
    Lost {
        /// Its index.
        rank: usize,
    },
    /// A rank called another operation than the first rank, or passed a buffer of another length.
    #[error("rank {rank} called another operation than rank 0")]
    Differs {
        /// Its index.
        rank: usize,
    },
}
