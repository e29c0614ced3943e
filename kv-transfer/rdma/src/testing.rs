//! Encoded messages of both sides, for fuzzing: a fuzz target edits them. It does not know the edits.

use baton_handoff::AccessKey;
use baton_kv_cache::KvLayout;
use baton_transfer::word::Word;

use crate::{
    nixl::Memory,
    wire::{self, Message, RankMemory},
};

/// Bytes of a message.
pub const MESSAGE_BYTES: usize = wire::MESSAGE_BYTES;

/// P: the first message, about a pool of this layout.
pub fn hello(pool: u64, layout: &KvLayout, access_key: AccessKey) -> [u8; MESSAGE_BYTES] {
    let num_layers = layout.num_layers as u32;
    let (layer_bytes, block_bytes) = (layout.layer_bytes() as u64, layout.block_bytes() as u64);
    Message::Hello { pool, num_layers, layer_bytes, block_bytes, access_key }.encode()
}

/// D: the answer to it. A message about the memory of each rank follows.
pub fn welcome(num_blocks: u64, num_ranks: u32) -> [u8; MESSAGE_BYTES] {
    Message::Welcome { num_blocks, num_ranks }.encode()
}

/// D: describes the memory of one rank, which is memory of the host. So many bytes of metadata follow.
pub fn rank_memory(base: u64, metadata_bytes: u32) -> [u8; MESSAGE_BYTES] {
    Message::RankMemory(RankMemory { memory: Memory::Dram, base, metadata_bytes }).encode()
}

/// A message about a grant, from either side.
pub fn word(word: Word) -> [u8; MESSAGE_BYTES] {
    Message::Word(word).encode()
}
