//! What a prefix cache stores and evicts: [`CacheEvent`]s, numbered from 0 in each life of a worker, and the [`EventLog`]
//! from which readers get them. And what is evicted: the [`EvictionOrder`] of pools and tiers.
//!
//! Pure: it knows neither engines nor the protocol, and no clock.
#![forbid(unsafe_code)]

mod event;
mod log;
mod order;

pub use event::{BatchKind, BlockKey, CacheEvent, CacheLevel, EventBatch, MAX_TIERS, PendingEvents};
pub use log::{BlockHolder, CacheDump, CacheReader, EventLog};
pub use order::{EvictionOrder, Keep};
