//! What a KV cache is made of: blocks and their names ([`BlockId`], [`BlockHash`]), how a block's
//! bytes are arranged ([`KvLayout`]), divided ([`HeadShard`], [`KvShard`]) and rounded ([`KvDtype`]), which of them belong
//! where on another side ([`KvMapping`]), how they are coded where the way is narrow ([`WireCodec`]), what two workers must
//! agree on to exchange them ([`KvFormat`]), and the memory that holds them ([`BlockStorage`]).
//!
//! It does not know who owns which block (that is the engine's block pool), nor how blocks travel
//! (`kv-transfer`).

mod block;
mod device;
mod divided;
pub mod e4m3;
mod element;
mod format;
mod layout;
pub mod mapping;
mod offload;
mod pages;
mod quantise;
mod region;
mod shard;
mod storage;
mod wire;

pub use block::{BlockHash, BlockId, HashRoot};
pub use device::{BlockKernels, DeviceMemory};
pub use divided::DividedMemory;
pub use format::KvFormat;
pub use layout::{KvDtype, KvLayout};
pub use mapping::KvMapping;
pub use quantise::INT4_GROUP;
pub use region::Region;
pub use shard::{HeadShard, KvShard, ShardError};
pub use storage::BlockStorage;
pub use wire::{WireCodec, WireFormat, WireScratch};
