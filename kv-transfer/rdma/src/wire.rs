//! Messages on the control connection: 72 bytes each, little-endian. A welcome is followed by a message for each rank's
//! memory, and each of these by metadata.
//!
//! ```text
//! magic u64 | kind u32 | a u32 | b u64 | c u64 | d u64 | e u64 | generation u64 | secret
//! ```

use baton_handoff::{AccessKey, Generation, Secret};
use baton_transfer::{ranks::NUM_RANKS, word::Word};

use super::nixl::{MAX_METADATA_BYTES, Memory};

const MAGIC: u64 = u64::from_le_bytes(*b"BKVrdm03");
pub(super) const MESSAGE_BYTES: usize = 72;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// P: names the pool and its shape, and shows an access key.
    Hello { pool: u64, num_layers: u32, layer_bytes: u64, block_bytes: u64, access_key: AccessKey },
    /// D: the size of the pool and the number of its ranks.
    Welcome { num_blocks: u64, num_ranks: u32 },
    /// D: describes the memory of one rank.
    RankMemory(RankMemory),
    /// A message about a grant, from either side.
    Word(Word),
}

/// The memory of one rank's blocks. Its metadata follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankMemory {
    pub(super) memory: Memory,
    pub(super) base: u64,
    pub(super) metadata_bytes: u32,
}

impl RankMemory {
    /// Whether so many blocks of this size fit into the address space from there on.
    pub(super) fn can_hold(&self, num_blocks: u64, block_bytes: usize) -> bool {
        let end = num_blocks.checked_mul(block_bytes as u64).and_then(|size| self.base.checked_add(size));
        num_blocks > 0 && self.base > 0 && end.is_some()
    }
}

impl Message {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        let mut shown = AccessKey { generation: Generation(0), secret: Secret::default() };
        let (kind, a, [b, c, d, e]) = match self {
            Message::Hello { pool, num_layers, layer_bytes, block_bytes, access_key } => {
                shown = access_key;
                (1, num_layers, [pool, layer_bytes, block_bytes, 0])
            }
            Message::Welcome { num_blocks, num_ranks } => (2, num_ranks, [num_blocks, 0, 0, 0]),
            Message::RankMemory(RankMemory { memory, base, metadata_bytes }) => {
                let (kind, device) = memory.code();
                (10, kind, [base, u64::from(device), u64::from(metadata_bytes), 0])
            }
            Message::Word(word) => {
                let (kind, generation, secret) = word.code();
                shown = AccessKey { generation: Generation(generation), secret };
                (kind, 0, [0; 4])
            }
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&u32::to_le_bytes(kind));
        bytes[12..16].copy_from_slice(&a.to_le_bytes());
        for (place, value) in bytes[16..].chunks_exact_mut(8).zip([b, c, d, e, shown.generation.0]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes[56..].copy_from_slice(&shown.secret.0);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Message> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if u64_at(0) != MAGIC {
            return None;
        }
        let (a, [b, c, d]) = (u32_at(12), [16, 24, 32].map(u64_at));
        let secret = Secret(bytes[56..].try_into().expect("sixteen bytes"));
        let access_key = AccessKey { generation: Generation(u64_at(48)), secret };
        Some(match u32_at(8) {
            1 => Message::Hello { pool: b, num_layers: a, layer_bytes: c, block_bytes: d, access_key },
            2 if NUM_RANKS.contains(&a) => Message::Welcome { num_blocks: b, num_ranks: a },
            2 => return None,
            10 => {
                let memory = Memory::from_code(a, u32::try_from(c).ok()?)?;
                let metadata_bytes = u32::try_from(d).ok().filter(|&n| n as usize <= MAX_METADATA_BYTES)?;
                Message::RankMemory(RankMemory { memory, base: b, metadata_bytes })
            }
            kind => Message::Word(Word::from_code(kind, access_key.generation.0, secret)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use baton_transfer_conformance::all_words;

    const MEMORY: RankMemory = RankMemory { memory: Memory::Dram, base: 4096, metadata_bytes: 300 };

    #[test]
    fn what_is_encoded_is_decoded() {
        let access_key = AccessKey { generation: Generation(5), secret: Secret([7; 16]) };
        let messages = [
            Message::Hello { pool: 3, num_layers: 2, layer_bytes: 4096, block_bytes: 8192, access_key },
            Message::Welcome { num_blocks: 10, num_ranks: 4 },
            Message::RankMemory(MEMORY),
            Message::RankMemory(RankMemory { memory: Memory::Vram(3), ..MEMORY }),
        ];
        let words = all_words(Generation(0x0123_4567_89ab_cdef)).map(Message::Word);
        for message in messages.into_iter().chain(words) {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
    }

    #[test]
    fn pools_that_cannot_be_are_refused() {
        for num_ranks in [0, NUM_RANKS.end() + 1] {
            let welcome = Message::Welcome { num_blocks: 10, num_ranks };
            assert_eq!(Message::decode(&welcome.encode()), None);
        }
        let too_long = RankMemory { metadata_bytes: MAX_METADATA_BYTES as u32 + 1, ..MEMORY };
        assert_eq!(Message::decode(&Message::RankMemory(too_long).encode()), None);
        let mut other_memory = Message::RankMemory(MEMORY).encode();
        other_memory[12] = 9;
        assert_eq!(Message::decode(&other_memory), None);

        assert!(MEMORY.can_hold(10, 64));
        for (base, num_blocks) in [(0, 10), (u64::MAX - 639, 10), (4096, 0), (4096, u64::MAX)] {
            assert!(!RankMemory { base, ..MEMORY }.can_hold(num_blocks, 64), "{num_blocks} at {base}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(words in proptest::array::uniform9(any::<u64>()), kind in 0u32..12) {
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
