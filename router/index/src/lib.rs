//! Which workers hold which blocks of KV ([`KvIndex`]), by what they say ([`CacheFeed`]), and which of them hold how much of a
//! prompt ([`Holder`]).
//!
//! In reading order: `run` is blocks that follow each other and who holds how many of them, `table` finds a block in a run,
//! `runs` all of them, `held` what one worker holds of them, `orphans` what it holds and cannot use, `index` all of it, `lookup`
//! the search, `member`, `belief` and `feed` what feeds it, `source` a feed that is shared. Beside it `segments`: what an object store has.
//!
//! Pure: no clock, no thread, no I/O. A writer waits for others that change the same shard; readers of the index never wait. It does not
//! know workers, prompts or tokens: they are numbers here.
// Invariant 12: `cargo xtask verify purity` checks that this crate reaches no runtime and no clock.
#![forbid(unsafe_code)]

mod belief;
mod feed;
mod held;
mod index;
mod lookup;
mod member;
mod orphans;
mod run;
mod runs;
mod segments;
mod source;
mod table;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(test)]
mod tests;

pub use baton_kv_events::{BatchKind, BlockKey, CacheEvent, CacheLevel, EventBatch, MAX_TIERS};
pub use feed::{CacheFeed, FeedError, SourceState};
pub use index::{IndexFull, IndexSize, KvIndex};
pub use lookup::{Holder, LookupScratch};
pub use segments::{StoredBlocks, StoredFront};
pub use source::{CacheSource, SourceReport, TokensHeld};
