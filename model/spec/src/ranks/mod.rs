//! Several ranks that compute one model together, each on its own thread, as one executor.
//!
//! ```text
//! caller           rank 0 (the caller's thread)        rank 1 .. (a thread each)
//! execute ---+---> its part of every layer <--meets--> its part of every layer <--- job
//!            +---> logits <------------------gathers-- its tokens' logits      ---> outcome
//! ```
//! If ranks sample, the first rank has all logits and samples; the others get its tokens from it ([`sampling`]).
//!
//! When a rank fails, it leaves the group, and the other ranks fail, too. The executor then reports the first failure
//! and cannot be used any more. How a rank computes, and how it communicates, is up to its type.

mod executor;
mod rank;
mod sampling;
mod thread;

pub use executor::ParallelExecutor;
pub use rank::{RankError, RankExecutor, SamplingRank};
