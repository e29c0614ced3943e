//! One block outside the pool: [`Record`], and its head as bytes.
//!
//! ```text
//! head   magic 8 | fingerprint 16 | hash 16 | parent 16 | block_idx 4 | num_tokens 4 | checksum of the body 8 |
//!        tokens 4 each | zeros | checksum of the head 8
//! body   the block's KV, as in the pool
//! ```
//!
//! Numbers are little-endian, checksums XXH3-64. A head proves itself: its checksum, the format's fingerprint, and the hash,
//! which is that of the parent and the tokens. The body's checksum is seeded with the hash, so the body of another record does
//! not match. This guards against accidents, not against a process that may write the files.

use baton_kv_cache::{BlockHash, HashRoot, KvFormat};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::buffer::PageBuffer;

const MAGIC: &[u8; 8] = b"BATONKV1";
const TOKENS_AT: usize = 72;
/// A head is a multiple of this, in bytes: the smallest unit that disks write as a whole.
const SECTOR: usize = 512;

/// Everything that a block's bytes mean: 128 bits of a hash of the [`KvFormat`]. Only KV of an equal one can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub(crate) [u8; 16]);

impl Fingerprint {
    /// Of this format.
    pub fn new(format: &KvFormat) -> Fingerprint {
        let KvFormat { model_revision, dtype, block_size, num_layers, num_kv_heads, head_dim, .. } = format;
        let shape = format!(
            "{} {block_size} {num_layers} {num_kv_heads} {head_dim} {}",
            dtype.name(),
            format.tensor_parallel
        );
        Fingerprint(HashRoot::new(model_revision, &shape, &format.rope).hash().to_bytes())
    }
}

/// The name of a block, and what proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordName {
    /// Of its tokens and every token before them.
    pub hash: BlockHash,
    /// The hash of the block before it, or of the root.
    pub parent: BlockHash,
    /// Its place in the sequence. Only block 0 follows a root.
    pub block_idx: u32,
    /// Its tokens.
    pub tokens: Vec<u32>,
}

impl RecordName {
    /// The block before it; `None` for the first one of a sequence.
    pub fn block_before(&self) -> Option<BlockHash> {
        (self.block_idx > 0).then_some(self.parent)
    }
}

/// A block outside the pool.
#[derive(Debug)]
pub struct Record {
    /// Its name.
    pub name: RecordName,
    body: PageBuffer,
    body_bytes: usize,
    checksum: u64,
}

/// What a slot of a file should hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordShape {
    pub(crate) fingerprint: Fingerprint,
    /// Tokens in a block.
    pub(crate) block_size: usize,
    /// Bytes of a block.
    pub(crate) body_bytes: usize,
}

/// A head that proved itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) name: RecordName,
    pub(crate) checksum: u64,
}

/// What is wrong with a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadError {
    /// There is none.
    Empty,
    /// It is not what was written.
    Damaged,
    /// It is of another model or format.
    Foreign,
}

impl Record {
    /// A record whose body `fill` writes.
    pub(crate) fn new<E>(
        name: RecordName,
        body_bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Record, E> {
        let mut body = PageBuffer::new(body_bytes);
        fill(&mut body.pages_mut()[..body_bytes])?;
        let checksum = body_checksum(name.hash, &body.pages()[..body_bytes]);
        Ok(Record { name, body, body_bytes, checksum })
    }

    /// A record from its head and the pages of its body, if the body is that of the head.
    pub(crate) fn verified(head: Head, body: PageBuffer, body_bytes: usize) -> Option<Record> {
        let record = Record { name: head.name, body, body_bytes, checksum: head.checksum };
        record.is_whole().then_some(record)
    }

    /// The block's bytes.
    pub fn body(&self) -> &[u8] {
        &self.body.pages()[..self.body_bytes]
    }

    /// The body in whole pages.
    pub(crate) fn pages(&self) -> &[u8] {
        self.body.pages()
    }

    /// Whether the body is what it was when the record was made.
    pub(crate) fn is_whole(&self) -> bool {
        body_checksum(self.name.hash, self.body()) == self.checksum
    }

    pub(crate) fn head(&self, shape: &RecordShape) -> Vec<u8> {
        let mut head = vec![0; shape.head_bytes()];
        head[..8].copy_from_slice(MAGIC);
        head[8..24].copy_from_slice(&shape.fingerprint.0);
        head[24..40].copy_from_slice(&self.name.hash.to_bytes());
        head[40..56].copy_from_slice(&self.name.parent.to_bytes());
        head[56..60].copy_from_slice(&self.name.block_idx.to_le_bytes());
        head[60..64].copy_from_slice(&(self.name.tokens.len() as u32).to_le_bytes());
        head[64..72].copy_from_slice(&self.checksum.to_le_bytes());
        for (bytes, token) in head[TOKENS_AT..].chunks_exact_mut(4).zip(&self.name.tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        let end = head.len() - 8;
        let checksum = xxh3_64(&head[..end]);
        head[end..].copy_from_slice(&checksum.to_le_bytes());
        head
    }
}

impl RecordShape {
    /// Bytes of a head.
    pub(crate) fn head_bytes(&self) -> usize {
        (TOKENS_AT + 4 * self.block_size + 8).next_multiple_of(SECTOR)
    }

    /// Reads a head.
    pub(crate) fn read_head(&self, head: &[u8]) -> Result<Head, HeadError> {
        if head.len() != self.head_bytes() {
            return Err(HeadError::Damaged);
        }
        if head.iter().all(|&byte| byte == 0) {
            return Err(HeadError::Empty);
        }
        let (start, checksum) = head.split_at(head.len() - 8);
        if &start[..8] != MAGIC || xxh3_64(start).to_le_bytes() != checksum {
            return Err(HeadError::Damaged);
        }
        if start[8..24] != self.fingerprint.0 || number(start, 60) as usize != self.block_size {
            return Err(HeadError::Foreign);
        }
        let name = RecordName {
            hash: hash(start, 24),
            parent: hash(start, 40),
            block_idx: number(start, 56),
            tokens: (0..self.block_size).map(|idx| number(start, TOKENS_AT + 4 * idx)).collect(),
        };
        if name.parent.child(&name.tokens) != name.hash {
            return Err(HeadError::Damaged);
        }
        Ok(Head { name, checksum: u64::from_le_bytes(array(start, 64)) })
    }
}

fn body_checksum(hash: BlockHash, body: &[u8]) -> u64 {
    xxh3_64_with_seed(body, hash.short())
}

fn hash(head: &[u8], at: usize) -> BlockHash {
    BlockHash::from_bytes(array(head, at))
}

fn number(head: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(head, at))
}

fn array<const N: usize>(head: &[u8], at: usize) -> [u8; N] {
    head[at..at + N].try_into().expect("a slice of N bytes")
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::{KvDtype, KvLayout};

    use super::*;
    use crate::testing::{BLOCK_SIZE, record, shape};

    #[test]
    fn a_head_comes_back_and_any_changed_bit_is_found() {
        let (shape, record) = (shape(), record(3, 1));
        let head = record.head(&shape);
        assert_eq!(head.len() % SECTOR, 0);
        let read = shape.read_head(&head).expect("as written");
        assert_eq!((&read.name, read.checksum), (&record.name, record.checksum));
        assert_eq!(read.name.tokens.len(), BLOCK_SIZE);
        for bit in 0..head.len() * 8 {
            let mut flipped = head.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(shape.read_head(&flipped), Err(HeadError::Damaged), "bit {bit}");
        }
        assert_eq!(shape.read_head(&vec![0; head.len()]), Err(HeadError::Empty));
        assert_eq!(shape.read_head(&head[1..]), Err(HeadError::Damaged));
    }

    #[test]
    fn a_name_that_its_tokens_do_not_prove_is_damage() {
        let shape = shape();
        let mut forged = record(3, 1);
        forged.name.tokens[0] += 1;
        assert_eq!(shape.read_head(&forged.head(&shape)), Err(HeadError::Damaged));
    }

    #[test]
    fn every_part_of_the_format_is_in_the_fingerprint() {
        let layout =
            KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 2, head_dim: 64, dtype: KvDtype::Bf16 };
        let format = KvFormat::new("r1".into(), &layout, "theta=10000".into());
        let own = Fingerprint::new(&format);
        assert_eq!(own, Fingerprint::new(&format.clone()));
        let others = [
            KvFormat { model_revision: "r2".into(), ..format.clone() },
            KvFormat { dtype: KvDtype::F16, ..format.clone() },
            KvFormat { block_size: 32, ..format.clone() },
            KvFormat { num_layers: 3, ..format.clone() },
            KvFormat { num_kv_heads: 1, ..format.clone() },
            KvFormat { head_dim: 32, ..format.clone() },
            KvFormat { tensor_parallel: 2, ..format.clone() },
            KvFormat { rope: "theta=500000".into(), ..format.clone() },
        ];
        for other in others {
            assert_ne!(Fingerprint::new(&other), own, "{other:?}");
            let foreign = RecordShape { fingerprint: Fingerprint::new(&other), ..shape() };
            let record = record(0, 0);
            assert_eq!(foreign.read_head(&record.head(&shape())), Err(HeadError::Foreign));
        }
    }

    #[test]
    fn the_body_of_another_record_does_not_match() {
        let (shape, one, other) = (shape(), record(0, 1), record(1, 1));
        let head = || shape.read_head(&one.head(&shape)).expect("as written");
        let body = |of: &Record| {
            let mut body = PageBuffer::new(shape.body_bytes);
            body.pages_mut().copy_from_slice(of.pages());
            body
        };
        assert!(Record::verified(head(), body(&one), shape.body_bytes).is_some());
        assert!(Record::verified(head(), body(&other), shape.body_bytes).is_none());
    }
}
