//! The bytes on a data connection, all little-endian.
//!
//! ```text
//! hello   P->D  magic u32 | version u32 | pool u64 | layer_bytes u64 | num_layers u32 | 0 u32 | access key
//! welcome D->P  magic u32 | status u32
//! frame   P->D  magic u32 | num_pieces u16 | format u16 | generation u64 | sequence u64 | payload_bytes u64 | secret
//!               then num_pieces x (layer_idx u32 | block_idx u32), then the pieces' bytes in this format
//! ack     D->P  magic u32 | status u32 | sequence u64
//!
//! access key    generation u64 | secret [u8; 16]
//! ```

use baton_kv_cache::WireFormat;

use baton_handoff::{AccessKey, Generation, Secret};

pub(super) const VERSION: u32 = 2;
/// Most pieces of a frame. It bounds the memory that a peer can make the receiver allocate.
pub(super) const MAX_PIECES: usize = 256;

const HELLO: u32 = u32::from_le_bytes(*b"BKVh");
const WELCOME: u32 = u32::from_le_bytes(*b"BKVw");
const FRAME: u32 = u32::from_le_bytes(*b"BKVf");
const ACK: u32 = u32::from_le_bytes(*b"BKVa");

pub(super) const HELLO_BYTES: usize = 56;
pub(super) const WELCOME_BYTES: usize = 8;
pub(super) const FRAME_BYTES: usize = 48;
pub(super) const PIECE_BYTES: usize = 8;
pub(super) const ACK_BYTES: usize = 16;

/// The first message: names the pool and the shape of its pieces, and shows the access key of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) pool: u64,
    pub(super) layer_bytes: u64,
    pub(super) num_layers: u32,
    pub(super) access_key: AccessKey,
}

/// Answer to [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Welcome {
    Accepted,
    /// The same answer for every reason, so that an unauthenticated peer learns nothing.
    Refused,
    /// Accepted, and the checksums are [of heads](baton_transfer::checksum::SumOf).
    AcceptedForHeads,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub(super) num_pieces: u16,
    pub(super) format: WireFormat,
    pub(super) access_key: AccessKey,
    pub(super) sequence: u64,
    pub(super) payload_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ack {
    pub(super) status: AckStatus,
    pub(super) sequence: u64,
}

/// The result of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AckStatus {
    /// The frame's bytes are in the granted blocks.
    Placed,
    /// The grant does not exist or is revoked. The frame was dropped.
    Revoked,
    /// A piece is not in the grant, or another connection is writing it. The frame was dropped.
    Refused,
    /// All pieces were placed before. The frame was dropped.
    PlacedBefore,
}

impl Hello {
    pub(super) fn encode(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        put(&mut bytes, 0, HELLO.to_le_bytes());
        put(&mut bytes, 4, self.version.to_le_bytes());
        put(&mut bytes, 8, self.pool.to_le_bytes());
        put(&mut bytes, 16, self.layer_bytes.to_le_bytes());
        put(&mut bytes, 24, self.num_layers.to_le_bytes());
        put(&mut bytes, 32, self.access_key.generation.0.to_le_bytes());
        put(&mut bytes, 40, self.access_key.secret.0);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Hello> {
        (u32_at(bytes, 0) == HELLO).then(|| Hello {
            version: u32_at(bytes, 4),
            pool: u64_at(bytes, 8),
            layer_bytes: u64_at(bytes, 16),
            num_layers: u32_at(bytes, 24),
            access_key: AccessKey { generation: Generation(u64_at(bytes, 32)), secret: secret_at(bytes, 40) },
        })
    }
}

impl Welcome {
    const ALL: [Welcome; 3] = [Welcome::Accepted, Welcome::Refused, Welcome::AcceptedForHeads];

    pub(super) fn encode(self) -> [u8; WELCOME_BYTES] {
        let mut bytes = [0; WELCOME_BYTES];
        put(&mut bytes, 0, WELCOME.to_le_bytes());
        put(&mut bytes, 4, (self as u32).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; WELCOME_BYTES]) -> Option<Welcome> {
        let status = u32_at(bytes, 4);
        Self::ALL.into_iter().find(|welcome| u32_at(bytes, 0) == WELCOME && *welcome as u32 == status)
    }
}

impl FrameHeader {
    pub(super) fn encode(self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        put(&mut bytes, 0, FRAME.to_le_bytes());
        put(&mut bytes, 4, self.num_pieces.to_le_bytes());
        put(&mut bytes, 6, (self.format as u16).to_le_bytes());
        put(&mut bytes, 8, self.access_key.generation.0.to_le_bytes());
        put(&mut bytes, 16, self.sequence.to_le_bytes());
        put(&mut bytes, 24, self.payload_bytes.to_le_bytes());
        put(&mut bytes, 32, self.access_key.secret.0);
        bytes
    }

    /// `None`: the header is malformed. `piece_bytes` returns the bytes of a piece in the frame's format.
    pub(super) fn decode(
        bytes: &[u8; FRAME_BYTES],
        piece_bytes: impl Fn(WireFormat) -> usize,
    ) -> Option<FrameHeader> {
        let num_pieces = u16_at(bytes, 4);
        let format = WireFormat::ALL.into_iter().find(|format| *format as u16 == u16_at(bytes, 6))?;
        let payload_bytes = u64_at(bytes, 24);
        let is_sound = u32_at(bytes, 0) == FRAME
            && (1..=MAX_PIECES).contains(&(num_pieces as usize))
            && u64::from(num_pieces).checked_mul(piece_bytes(format) as u64) == Some(payload_bytes);
        is_sound.then(|| FrameHeader {
            num_pieces,
            format,
            access_key: AccessKey { generation: Generation(u64_at(bytes, 8)), secret: secret_at(bytes, 32) },
            sequence: u64_at(bytes, 16),
            payload_bytes,
        })
    }
}

pub(super) fn encode_piece(layer_idx: u32, block_idx: u32) -> [u8; PIECE_BYTES] {
    let mut bytes = [0; PIECE_BYTES];
    put(&mut bytes, 0, layer_idx.to_le_bytes());
    put(&mut bytes, 4, block_idx.to_le_bytes());
    bytes
}

/// The (layer, position in the grant) of each piece.
pub(super) fn decode_pieces(bytes: &[u8]) -> Vec<(u32, u32)> {
    bytes.chunks_exact(PIECE_BYTES).map(|piece| (u32_at(piece, 0), u32_at(piece, 4))).collect()
}

impl Ack {
    pub(super) fn encode(self) -> [u8; ACK_BYTES] {
        let mut bytes = [0; ACK_BYTES];
        put(&mut bytes, 0, ACK.to_le_bytes());
        put(&mut bytes, 4, (self.status as u32).to_le_bytes());
        put(&mut bytes, 8, self.sequence.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; ACK_BYTES]) -> Option<Ack> {
        let status = u32_at(bytes, 4);
        let status = [AckStatus::Placed, AckStatus::Revoked, AckStatus::Refused, AckStatus::PlacedBefore]
            .into_iter()
            .find(|known| *known as u32 == status)?;
        (u32_at(bytes, 0) == ACK).then(|| Ack { status, sequence: u64_at(bytes, 8) })
    }
}

fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn secret_at(bytes: &[u8], at: usize) -> Secret {
    Secret(bytes[at..at + 16].try_into().expect("sixteen bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let access_key = AccessKey { generation: Generation(5), secret: Secret([9; 16]) };
        let hello = Hello { version: 1, pool: 77, layer_bytes: 4096, num_layers: 3, access_key };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        for welcome in Welcome::ALL {
            assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
        }
        for format in WireFormat::ALL {
            let header = FrameHeader { num_pieces: 2, format, access_key, sequence: 9, payload_bytes: 8192 };
            assert_eq!(FrameHeader::decode(&header.encode(), |_| 4096), Some(header));
            let other = |other| if other == format { 4095 } else { 4096 };
            assert_eq!(FrameHeader::decode(&header.encode(), other), None, "of another size");
        }
        assert_eq!(decode_pieces(&[encode_piece(1, 2), encode_piece(3, 4)].concat()), [(1, 2), (3, 4)]);
        let ack = Ack { status: AckStatus::Refused, sequence: 3 };
        assert_eq!(Ack::decode(&ack.encode()), Some(ack));
    }

    #[test]
    fn headers_that_promise_too_much_are_refused() {
        let header = |num_pieces, payload_bytes| {
            let format = WireFormat::AsIs;
            let access_key = AccessKey { generation: Generation(1), secret: Secret::default() };
            FrameHeader { num_pieces, format, access_key, sequence: 0, payload_bytes }.encode()
        };
        assert!(FrameHeader::decode(&header(256, 256 * 64), |_| 64).is_some());
        let mut unknown = header(1, 64);
        unknown[6] = 4;
        assert_eq!(FrameHeader::decode(&unknown, |_| 64), None);
        for (num_pieces, payload_bytes) in
            [(0, 0), (257, 257 * 64), (1, 65), (1, u64::MAX), (u16::MAX, u64::MAX), (2, 64)]
        {
            assert_eq!(FrameHeader::decode(&header(num_pieces, payload_bytes), |_| 64), None);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), HELLO_BYTES), layer_bytes: usize) {
            let _ = Hello::decode(bytes[..].try_into().unwrap());
            let _ = FrameHeader::decode(bytes[..FRAME_BYTES].try_into().unwrap(), |_| layer_bytes);
            let _ = Welcome::decode(bytes[..8].try_into().unwrap());
            let _ = Ack::decode(bytes[..16].try_into().unwrap());
            let _ = decode_pieces(&bytes);
        }
    }
}
