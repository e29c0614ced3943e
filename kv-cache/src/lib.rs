//! The parts of a KV cache: blocks and their names ([`BlockId`], [`BlockHash`]), the arrangement of a block's bytes
//! ([`KvLayout`]), its division among ranks ([`HeadShard`], [`KvShard`]) and its element types ([`KvDtype`]), the
//! mapping between two arrangements ([`KvMapping`]), the encoding for slow links ([`WireCodec`]), what two workers
//! must agree on to exchange KV ([`KvFormat`]), and the memory of blocks ([`BlockStorage`]).
//!
//! Names, layouts and formats are `baton-kv-layout`'s, which is pure.
//!
//! It does not know the owners of blocks (that is the engine's block pool), nor how blocks are transferred
//! (`kv-transfer`).

mod block;
mod device;
mod divided;
pub mod e4m3;
mod element;
mod host_blocks;
mod machine_memory;
pub mod mapping;
mod memory_limit;
mod offload;
mod pages;
mod pages_ahead;
mod quantise;
mod region;
mod storage;
mod wire;

pub use baton_kv_layout::{BlockId, HeadShard, KvDtype, KvFormat, KvLayout, KvShard, ShardError};
pub use block::{BlockHash, HashRoot};
pub use device::{BlockKernels, DeviceCopy, DeviceMemory, HostAccess};
pub use divided::DividedMemory;
pub use element::VectorCodec;
pub use host_blocks::{HostBlock, HostBlocks};
pub use machine_memory::MachineMemory;
pub use mapping::KvMapping;
pub use memory_limit::MemoryLimit;
pub use pages_ahead::PagesAhead;
pub use quantise::INT4_GROUP;
pub use region::Region;
pub use storage::BlockStorage;
pub use wire::{WireCodec, WireFormat, WireScratch};
