//! Tiers below a worker's block pool: KV that the pool no longer holds, in host memory and on disk.
//!
//! - `store`: [`KvStore`], which copies blocks out of the pool and back;
//! - `directory`: which tier holds which blocks, and which make room: the one policy, pure;
//! - `slots`: the seam of the stores, [`Slots`]; `host` and `disk` are two;
//! - `record`: a block outside the pool, and what proves that it is whole and of this model.
//!
//! It stands on the formats of `kv-cache`. It knows neither engines nor requests, and no protocol.

#![deny(unsafe_code)]

mod buffer;
#[allow(unsafe_code)] // the bytes of a pool; each call says who owns the block
mod copy;
mod counts;
mod directory;
mod disk;
mod host;
mod recency;
mod record;
mod slots;
mod store;
#[cfg(test)]
mod testing;

pub use counts::TierCounts;
pub use directory::{Directory, SlotPlace};
pub use disk::{DiskSlots, Medium, StoreOpenError};
pub use host::HostSlots;
pub use record::{Fingerprint, Record, RecordName};
pub use slots::{ReadError, Slots};
pub use store::{DiskConfig, KvStore, SequenceBlocks, StoreConfig};
