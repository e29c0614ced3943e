//! Messages on the control connection: 64 bytes each, little-endian. A welcome is followed by the unique id, an
//! announcement by its pieces.
//!
//! ```text
//! magic u64 | kind u32 | a u32 | b u64 | c u64 | d u64 | generation u64 | secret
//! piece     layer u32 | position in the grant u32
//! ```

use std::io;

use baton_handoff::{AccessKey, Generation, Secret};

const MAGIC: u64 = u64::from_le_bytes(*b"BKVncl02");
pub(super) const MESSAGE_BYTES: usize = 64;
const PIECE_BYTES: usize = 8;

/// Pieces of one announcement, and so of one group.
pub(super) const MAX_PIECES: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// P: names the pool and its shape, and shows an access key.
    Hello { pool: u64, num_layers: u32, layer_bytes: u64, block_bytes: u64, access_key: AccessKey },
    /// D: asks to join. The unique id follows.
    Welcome,
    /// D: busy. The reason is in its log.
    Busy,
    /// D: refused. The same answer for every reason.
    Refused,
    /// P: announces the next group. Its pieces follow.
    Announce { sequence: u64, access_key: AccessKey, num_pieces: u32 },
    /// D: has posted the receives. P may send.
    Go { sequence: u64 },
    /// D: refuses the group. P must not send it.
    No { sequence: u64, why: Refusal },
    /// D: the group is in the granted blocks.
    Landed { sequence: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The grant does not exist or is revoked.
    Revoked,
    /// A piece is not granted, or was announced before.
    Pieces,
}

impl Message {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        let mut shown = AccessKey { generation: Generation(0), secret: Secret::default() };
        let (kind, a, [b, c, d]) = match self {
            Message::Hello { pool, num_layers, layer_bytes, block_bytes, access_key } => {
                shown = access_key;
                (1, num_layers, [pool, layer_bytes, block_bytes])
            }
            Message::Welcome => (2, 0, [0; 3]),
            Message::Busy => (3, 0, [0; 3]),
            Message::Refused => (4, 0, [0; 3]),
            Message::Announce { sequence, access_key, num_pieces } => {
                shown = access_key;
                (5, num_pieces, [sequence, 0, 0])
            }
            Message::Go { sequence } => (6, 0, [sequence, 0, 0]),
            Message::No { sequence, why: Refusal::Revoked } => (7, 0, [sequence, 0, 0]),
            Message::No { sequence, why: Refusal::Pieces } => (7, 1, [sequence, 0, 0]),
            Message::Landed { sequence } => (8, 0, [sequence, 0, 0]),
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&u32::to_le_bytes(kind));
        bytes[12..16].copy_from_slice(&a.to_le_bytes());
        for (place, value) in bytes[16..].chunks_exact_mut(8).zip([b, c, d, shown.generation.0]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes[48..].copy_from_slice(&shown.secret.0);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Message> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if u64_at(0) != MAGIC {
            return None;
        }
        let (a, [b, c, d]) = (u32_at(12), [16, 24, 32].map(u64_at));
        let secret = Secret(bytes[48..].try_into().expect("sixteen bytes"));
        let access_key = AccessKey { generation: Generation(u64_at(40)), secret };
        Some(match (u32_at(8), a) {
            (1, _) => Message::Hello { pool: b, num_layers: a, layer_bytes: c, block_bytes: d, access_key },
            (2, _) => Message::Welcome,
            (3, _) => Message::Busy,
            (4, _) => Message::Refused,
            (5, 1..) if a as usize <= MAX_PIECES => {
                Message::Announce { sequence: b, access_key, num_pieces: a }
            }
            (6, _) => Message::Go { sequence: b },
            (7, 0) => Message::No { sequence: b, why: Refusal::Revoked },
            (7, 1) => Message::No { sequence: b, why: Refusal::Pieces },
            (8, _) => Message::Landed { sequence: b },
            _ => return None,
        })
    }
}

/// Decodes a message.
pub(super) fn decode(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Message> {
    Message::decode(bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed message"))
}

/// An announcement with its pieces: (layer, position in the grant).
pub(super) fn announcement(
    sequence: u64,
    access_key: AccessKey,
    pieces: impl ExactSizeIterator<Item = (u32, u32)>,
) -> Vec<u8> {
    let num_pieces = pieces.len() as u32;
    let mut bytes = Message::Announce { sequence, access_key, num_pieces }.encode().to_vec();
    for (layer_idx, block_idx) in pieces {
        bytes.extend(layer_idx.to_le_bytes());
        bytes.extend(block_idx.to_le_bytes());
    }
    bytes
}

/// Bytes of so many pieces.
pub(super) fn pieces_bytes(num_pieces: u32) -> usize {
    num_pieces as usize * PIECE_BYTES
}

/// Decodes the pieces that follow an announcement.
pub(super) fn decode_pieces(bytes: &[u8]) -> Vec<(u32, u32)> {
    let u32_of = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
    bytes.chunks_exact(PIECE_BYTES).map(|piece| (u32_of(&piece[..4]), u32_of(&piece[4..]))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use baton_transfer_conformance::some_access_key;

    #[test]
    fn what_is_encoded_is_decoded() {
        let secret = Secret(std::array::from_fn(|idx| idx as u8 + 1));
        let (sequence, access_key) =
            (77, AccessKey { generation: Generation(0x0123_4567_89ab_cdef), secret });
        for message in [
            Message::Hello { pool: 3, num_layers: 2, layer_bytes: 4096, block_bytes: 8192, access_key },
            Message::Welcome,
            Message::Busy,
            Message::Refused,
            Message::Announce { sequence, access_key, num_pieces: MAX_PIECES as u32 },
            Message::Go { sequence },
            Message::No { sequence, why: Refusal::Revoked },
            Message::No { sequence, why: Refusal::Pieces },
            Message::Landed { sequence },
        ] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        let pieces = [(1, 2), (u32::MAX, 0)];
        let bytes = announcement(sequence, access_key, pieces.into_iter());
        let (head, rest) = bytes.split_at(MESSAGE_BYTES);
        let announced = Message::Announce { sequence, access_key, num_pieces: 2 };
        assert_eq!(Message::decode(head.try_into().unwrap()), Some(announced));
        assert_eq!(rest.len(), pieces_bytes(2));
        assert_eq!(decode_pieces(rest), pieces);
    }

    #[test]
    fn announcements_of_nothing_or_too_much_are_refused() {
        for num_pieces in [0, MAX_PIECES as u32 + 1, u32::MAX] {
            let message = Message::Announce { sequence: 0, access_key: some_access_key(1), num_pieces };
            assert_eq!(Message::decode(&message.encode()), None, "{num_pieces}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(words in proptest::array::uniform8(any::<u64>()), kind in 0u32..12) {
            let mut bytes = [0; MESSAGE_BYTES];
            for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
                place.copy_from_slice(&word.to_le_bytes());
            }
            let _ = Message::decode(&bytes);
            bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
            bytes[8..12].copy_from_slice(&kind.to_le_bytes());
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(Message::decode(&message.encode()), Some(message));
            }
        }
    }
}
