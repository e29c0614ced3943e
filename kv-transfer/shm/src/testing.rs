//! Encoded messages of both sides, for fuzzing: a fuzz target edits them. It does not know the edits.

use std::{
    io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
};

use baton_kv_cache::KvLayout;
use baton_transfer::word::Word;

use crate::wire::{self, Message};

/// Bytes of a message.
pub const MESSAGE_BYTES: usize = wire::MESSAGE_BYTES;

/// P: the first message, about a pool of this layout.
pub fn hello(pool: u64, layout: &KvLayout) -> [u8; MESSAGE_BYTES] {
    let (layer_bytes, num_layers) = (layout.layer_bytes() as u64, layout.num_layers as u32);
    Message::Hello { pool, layer_bytes, num_layers }.encode()
}

/// D: the answer to it. The descriptor of the pool comes with it.
pub fn welcome(num_blocks: u64) -> [u8; MESSAGE_BYTES] {
    Message::Welcome { num_blocks }.encode()
}

/// A message about a grant, from either side.
pub fn word(word: Word) -> [u8; MESSAGE_BYTES] {
    Message::Word(word).encode()
}

/// Sends a message and a descriptor with it.
///
/// # Errors
/// When the peer is gone or does not read.
pub fn send(
    socket: &UnixStream,
    message: [u8; MESSAGE_BYTES],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    wire::send_encoded(socket, message, descriptor)
}
