//! The threads that compute on CPUs, the processors that they are pinned to, memory that they share, and their right to tile registers.
//!
//! This crate does not know what they compute.

mod affinity;
mod memory;
mod pool;
mod scratch;
mod shared;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub use affinity::{CpuList, CpuListError};
pub use memory::{Aligned, anonymous};
pub use pool::ThreadPool;
pub use scratch::{ComputeScratch, ThreadScratch};
pub use shared::SharedMut;
#[cfg(target_arch = "x86_64")]
pub use tiles::has_tiles;
