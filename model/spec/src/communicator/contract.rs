//! How ranks that compute a model together on processors reach each other: the seam between the forward pass and whatever
//! carries numbers from one rank to the others. Ranks on devices sum up behind a seam of the devices' own.
//!
//! All ranks call the same operations in the same order, with buffers of the same length; each call is one step of all.
//! It does not know what the numbers mean, nor who computes them.

use crate::shard::Rank;

/// One rank's end of what connects all. Dropped, it is gone for the others: whoever waits for it, or comes to wait, gets
/// [`CommunicatorError::Lost`], and nobody waits for ever.
///
/// Sums are of the ranks in their order, whatever the time at which they come: every rank has the same bits, in every
/// run.
pub trait Communicator: Send {
    /// Whose end it is.
    fn rank(&self) -> Rank;

    /// Makes `buffer` the sum of the ranks' buffers.
    ///
    /// # Errors
    /// When a rank is gone, or does something else; the buffer's contents are then unspecified, and so they are below.
    fn all_reduce_sum(&mut self, buffer: &mut [f32]) -> Result<(), CommunicatorError>;

    /// Fills in the first rank's `all` with the ranks' parts, one after the other. The others have no `all`.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    ///
    /// # Panics
    /// When the first rank has no `all` with room for just the parts, or another rank has one.
    fn gather(&mut self, part: &[f32], all: Option<&mut [f32]>) -> Result<(), CommunicatorError>;

    /// Ends when every rank has come here: what each wrote to memory before, all see after.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    fn barrier(&mut self) -> Result<(), CommunicatorError>;
}

/// Ranks do not come together any more: what is left to do is to drop the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommunicatorError {
    /// One has ended.
    #[error("rank {rank} is gone")]
    Lost {
        /// Which.
        rank: usize,
    },
    /// One called another operation, or with a buffer of another length.
    #[error("rank {rank} does something else than the first")]
    Differs {
        /// Which.
        rank: usize,
    },
}
