//! The arrangement of KV, as plain data: block ids ([`BlockId`]), the bytes of a block ([`KvLayout`]) and their element
//! types ([`KvDtype`]), the division among ranks ([`HeadShard`], [`KvShard`]), and what two workers must agree on to
//! exchange KV ([`KvFormat`]).
//!
//! It does not know memory, numbers or hashes of blocks: `baton-kv-cache` does.
#![forbid(unsafe_code)]

mod block;
mod format;
mod layout;
mod shard;

pub use block::BlockId;
pub use format::{KvClass, KvFormat};
pub use layout::{KvDtype, KvLayout};
pub use shard::{HeadShard, KvShard, ShardError};
