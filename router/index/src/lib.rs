//! Which workers hold which blocks of KV ([`KvIndex`]), by what they say ([`CacheFeed`]), and which of them hold how much of a
//! prompt ([`Holder`]).
//!
//! In reading order: `members` is a set of workers, `shard` a table of such sets, `chain` what one worker holds and can use,
//! `index` all of it, `lookup` the search, `member`, `belief` and `feed` what feeds it, `source` a feed that is shared.
//!
//! Pure: no clock, no thread, no I/O. Writers of one shard wait for each other; readers never wait. It does not know
//! workers, prompts or tokens: they are numbers here.
// Invariant 12: `cargo xtask verify purity` checks that this crate reaches no runtime and no clock.
#![forbid(unsafe_code)]

mod belief;
mod chain;
mod feed;
mod index;
mod lookup;
mod member;
mod members;
mod shard;
mod source;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(test)]
mod tests;

pub use baton_kv_events::{BatchKind, BlockKey, CacheEvent, EventBatch};
pub use feed::{CacheFeed, FeedError, SourceState};
pub use index::{IndexFull, IndexSize, KvIndex};
pub use lookup::{Holder, LookupScratch};
pub use source::{CacheSource, SourceReport};
