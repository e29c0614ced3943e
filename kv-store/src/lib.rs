//! Tiers below a worker's block pool: KV that the pool no longer holds, in host memory, on disk and in an object store.
//!
//! - `store`: [`KvStore`], which copies blocks out of the pool and back; `saves`: how blocks become records of the tiers; `reads`: how
//!   it finds and reads them; `forgets`: how it forgets them;
//! - `slots`: the seam of the stores, [`Slots`]; `host` and `disk` are two, and `shared` one that all workers of a machine have;
//! - `object`: what is in an object store, shared by workers; its policy is `object/catalogue`, pure;
//! - `record`: a block outside the pool, and what proves that it is whole and of this model; `seal`: what encrypts it.
//!
//! It stands on the formats of `kv-cache`. It knows neither engines nor requests, and no protocol.

#![deny(unsafe_code)]

mod buffer;
#[allow(unsafe_code)] // the bytes of a pool; each call says who owns the block
mod copy;
mod counts;
mod disk;
mod forgets;
mod host;
mod object;
mod reads;
mod record;
mod save_queue;
mod saves;
mod seal;
mod shared;
mod slots;
mod store;
#[cfg(test)]
mod testing;

pub use counts::TierCounts;
pub use disk::{DiskSlots, Medium, StoreOpenError};
pub use host::HostSlots;
pub use object::{ObjectConfig, ObjectOpenError, SegmentChanges, SegmentReader};
pub use record::{Fingerprint, Record, RecordName};
pub use save_queue::{MAX_SAVES, SaveRest, SequenceBlocks};
pub use seal::{KvKey, KvKeyError};
pub use slots::{ReadError, Slots};
pub use store::{DiskConfig, HostConfig, KvStore, StoreConfig, TierOpenError};
