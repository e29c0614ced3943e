//! Encoded messages of both sides, for fuzzing: a fuzz target edits them. It does not know the edits.

use baton_handoff::AccessKey;
use baton_kv_cache::{KvLayout, WireCodec, WireFormat};

use crate::wire::{self, Ack, AckStatus, FrameHeader, Hello, Welcome};

/// Bytes of a hello.
pub const HELLO_BYTES: usize = wire::HELLO_BYTES;
/// Bytes of the header of a frame.
pub const FRAME_BYTES: usize = wire::FRAME_BYTES;

/// P: the first message, about a pool of this layout.
pub fn hello(pool: u64, layout: &KvLayout, access_key: AccessKey) -> [u8; HELLO_BYTES] {
    let (layer_bytes, num_layers) = (layout.layer_bytes() as u64, layout.num_layers as u32);
    Hello { version: wire::VERSION, pool, layer_bytes, num_layers, access_key }.encode()
}

/// D: the answer to it.
pub fn welcome() -> [u8; wire::WELCOME_BYTES] {
    Welcome::Accepted.encode()
}

/// P: the header of a frame. A [`piece`] follows for each piece, then the bytes of all pieces.
pub fn frame_header(
    num_pieces: u16,
    format: WireFormat,
    access_key: AccessKey,
    sequence: u64,
    payload_bytes: u64,
) -> [u8; FRAME_BYTES] {
    FrameHeader { num_pieces, format, access_key, sequence, payload_bytes }.encode()
}

/// P: where a piece belongs.
pub fn piece(layer_idx: u32, block_idx: u32) -> [u8; wire::PIECE_BYTES] {
    wire::encode_piece(layer_idx, block_idx)
}

/// D: from the header of a frame, its sequence number and how many bytes follow. `None`: it is malformed.
pub fn frame_rest(header: &[u8; FRAME_BYTES], layout: &KvLayout) -> Option<(u64, u64)> {
    let piece_bytes = |format| {
        WireCodec::new(layout, format).map_or_else(|| layout.layer_bytes(), |codec| codec.piece_bytes())
    };
    let header = FrameHeader::decode(header, piece_bytes)?;
    let rest = u64::from(header.num_pieces) * wire::PIECE_BYTES as u64 + header.payload_bytes;
    Some((header.sequence, rest))
}

/// D: the answers to a frame, one of each status. The first says that its pieces are placed.
pub fn acks(sequence: u64) -> [[u8; wire::ACK_BYTES]; 4] {
    [AckStatus::Placed, AckStatus::Revoked, AckStatus::Refused, AckStatus::PlacedBefore]
        .map(|status| Ack { status, sequence }.encode())
}
