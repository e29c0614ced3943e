//! Several ranks that compute one model together, each on a thread of its own, behind one executor.
//!
//! ```text
//! caller           rank 0 (the caller's thread)        rank 1 .. (a thread each)
//! execute ---+---> its part of every layer <--meets--> its part of every layer <--- job
//!            +---> logits <------------------gathers-- its tokens' logits      ---> outcome
//! ```
//! Ranks that sample leave that to the first, which has all logits, and take its tokens from there ([`sampling`]).
//!
//! A rank that fails leaves the others, which fails them, too; the executor then says who was first, and cannot be used
//! any more. What a rank computes with, and how it meets the others, is its own business.

mod executor;
mod rank;
mod sampling;
mod thread;

pub use executor::ParallelExecutor;
pub use rank::{RankError, RankExecutor, SamplingRank};
