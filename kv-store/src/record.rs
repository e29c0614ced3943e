//! One block outside the pool: [`Record`], and its head as bytes.
//!
//! ```text
//! head   magic 8 | fingerprint 16 | root 16 | hash 16 | parent 16 | block_idx 4 | num_tokens 4 | checksum of the body 8 |
//!        tokens 4 each | zeros | checksum of the head 8
//! body   the block's KV, as in the pool: layer after layer
//!
//! sealed head   magic 8 | root 16 | seed 24 | the head, encrypted | tag of the body 16 | tag of all before it 16
//! sealed body   the body, encrypted
//! ```
//!
//! Numbers are little-endian, checksums XXH3-64. A head proves itself: its checksum, the format's fingerprint, and the hash,
//! which is that of the parent and the tokens. The body's checksum is that of the checksums of its parts, which are one head's K
//! or V of one layer: a device that holds some heads computes theirs. It is seeded with the hash, so the body of another record
//! does not match. This guards against accidents, not against a process that may write the files. [Sealed](crate::seal) records guard
//! against that, too: their key is derived from the root, which is that of a tenant and salt, and from a seed of their own.

use baton_kv_cache::{BlockHash, HashRoot, HostBlock, KvFormat, KvLayout};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::{
    buffer::PageBuffer,
    seal::{KvKey, Purpose, SEED_BYTES, Seed, TAG_BYTES, Tag},
    shared::SlotState,
};

const MAGIC: &[u8; 8] = b"BATONKV3";
const SEALED_MAGIC: &[u8; 8] = b"BATONKS3";
const TOKENS_AT: usize = 88;
/// What is before the encrypted part of a sealed head, and what is after it.
const SEALED_AT: usize = 24 + SEED_BYTES;
const TAGS_BYTES: usize = 2 * TAG_BYTES;
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
    /// The start of its chain of hashes: of the model, the tenant and the salt.
    pub root: BlockHash,
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
    body: Body,
    shape: BodyShape,
    checksum: u64,
}

/// Where the bytes of a block are.
#[derive(Debug)]
enum Body {
    Own(PageBuffer),
    /// The pool's device reads them itself.
    Reached(HostBlock),
    /// The pool, or its device, reads them itself, and other processes may write them. They were the record's while the slot had this
    /// state.
    Shared(HostBlock, SlotState),
}

/// The bytes of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyShape {
    pub(crate) bytes: usize,
    /// Of one head's K or V of one layer.
    pub(crate) part_bytes: usize,
}

/// How records of one format become bytes.
#[derive(Clone, Debug)]
pub(crate) struct RecordShape {
    pub(crate) fingerprint: Fingerprint,
    /// Tokens in a block.
    pub(crate) block_size: usize,
    pub(crate) body: BodyShape,
    /// Seals records; `None`: they are plain.
    pub(crate) key: Option<KvKey>,
}

/// A record as bytes.
#[derive(Debug)]
pub(crate) struct RecordBytes<'a> {
    pub(crate) head: Vec<u8>,
    record: &'a Record,
    sealed: Option<PageBuffer>,
}

/// A head that proved itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) name: RecordName,
    pub(crate) checksum: u64,
    seal: Option<(Seed, Tag)>,
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
        shape: BodyShape,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Record, E> {
        let mut body = PageBuffer::new(shape.bytes);
        let bytes = &mut body.pages_mut()[..shape.bytes];
        fill(bytes)?;
        let checksum = body_checksum(name.hash, &shape.sums(bytes));
        Ok(Record { name, body: Body::Own(body), shape, checksum })
    }

    /// A record of a block that the pool's device copied. `sums` are the checksums of the body's parts, if the device computed them.
    pub(crate) fn reached(
        name: RecordName,
        shape: BodyShape,
        block: HostBlock,
        sums: Option<Vec<u64>>,
    ) -> Record {
        let checksum = body_checksum(name.hash, &sums.unwrap_or_else(|| shape.sums(block.bytes())));
        Record { name, body: Body::Reached(block), shape, checksum }
    }

    /// A record in memory that others may write, as its head says. The device that reads it verifies it.
    pub(crate) fn to_verify(head: Head, shape: BodyShape, block: HostBlock, state: SlotState) -> Record {
        Record { name: head.name, body: Body::Shared(block, state), shape, checksum: head.checksum }
    }

    /// The slot that had the record in this state, if other processes may write it.
    pub(crate) fn shared_slot(&self) -> Option<(u32, SlotState)> {
        match &self.body {
            Body::Shared(block, state) => Some((block.idx(), *state)),
            _ => None,
        }
    }

    /// The block's bytes.
    ///
    /// # Panics
    /// When other processes may write them: then [they are copied and verified](crate::KvStore::write_to_pool).
    pub fn body(&self) -> &[u8] {
        &self.pages()[..self.shape.bytes]
    }

    /// The block, if the pool's device reads it itself.
    pub(crate) fn as_reached(&self) -> Option<&HostBlock> {
        match &self.body {
            Body::Own(_) => None,
            Body::Reached(block) | Body::Shared(block, _) => Some(block),
        }
    }

    /// Whether the body is what it was when the record was made. False if a device alone can verify it.
    pub(crate) fn is_whole(&self) -> bool {
        let is_readable = self.as_reached().is_none_or(HostBlock::is_own);
        is_readable && self.matches(&self.shape.sums(self.body()))
    }

    /// Whether these are the checksums of the parts of the body as it was when the record was made.
    pub(crate) fn matches(&self, sums: &[u64]) -> bool {
        body_checksum(self.name.hash, sums) == self.checksum
    }

    /// The body in whole pages, zeros at their end.
    fn pages(&self) -> &[u8] {
        match &self.body {
            Body::Own(pages) => pages.pages(),
            Body::Reached(block) | Body::Shared(block, _) => block.bytes(),
        }
    }
}

impl BodyShape {
    pub(crate) fn new(layout: &KvLayout) -> BodyShape {
        BodyShape { bytes: layout.block_bytes(), part_bytes: layout.head_bytes() }
    }

    /// Parts of a body.
    pub(crate) fn num_parts(self) -> usize {
        self.bytes / self.part_bytes
    }

    /// The checksum of each part of a body, or of some of its layers.
    pub(crate) fn sums(self, body: &[u8]) -> Vec<u64> {
        body.chunks_exact(self.part_bytes).map(xxh3_64).collect()
    }
}

impl RecordBytes<'_> {
    /// The body in whole pages, zeros at their end.
    pub(crate) fn pages(&self) -> &[u8] {
        self.sealed.as_ref().map_or(self.record.pages(), PageBuffer::pages)
    }

    /// The body alone.
    pub(crate) fn body(&self) -> &[u8] {
        &self.pages()[..self.record.shape.bytes]
    }
}

impl RecordShape {
    pub(crate) fn new(format: &KvFormat, layout: &KvLayout, key: Option<KvKey>) -> RecordShape {
        let body = BodyShape::new(layout);
        RecordShape { fingerprint: Fingerprint::new(format), block_size: format.block_size, body, key }
    }

    /// Bytes of a head.
    pub(crate) fn head_bytes(&self) -> usize {
        let seal_bytes = if self.key.is_some() { SEALED_AT + TAGS_BYTES } else { 0 };
        (TOKENS_AT + 4 * self.block_size + 8 + seal_bytes).next_multiple_of(SECTOR)
    }

    /// A record as bytes, sealed under a fresh seed if there is a key.
    pub(crate) fn write<'a>(&self, record: &'a Record) -> RecordBytes<'a> {
        let mut head = vec![0; self.head_bytes()];
        let Some(key) = &self.key else {
            self.write_head(record, &mut head);
            return RecordBytes { head, record, sealed: None };
        };
        let sealing = key.seal(Purpose::Record(record.name.root));
        let num_bytes = self.body.bytes;
        let mut body = PageBuffer::new(num_bytes);
        body.pages_mut()[..num_bytes].copy_from_slice(record.body());
        let body_tag = sealing.seal_second(&mut body.pages_mut()[..num_bytes]);
        let (start, tags) = head.split_at_mut(self.head_bytes() - TAGS_BYTES);
        let (clear, inner) = start.split_at_mut(SEALED_AT);
        clear[..8].copy_from_slice(SEALED_MAGIC);
        clear[8..24].copy_from_slice(&record.name.root.to_bytes());
        clear[24..].copy_from_slice(sealing.seed());
        self.write_head(record, inner);
        let clear = [&*clear, &body_tag].concat();
        let head_tag = sealing.seal_first(&clear, inner);
        tags.copy_from_slice(&[body_tag, head_tag].concat());
        RecordBytes { head, record, sealed: Some(body) }
    }

    /// Reads a head.
    pub(crate) fn read_head(&self, head: &[u8]) -> Result<Head, HeadError> {
        if head.len() != self.head_bytes() {
            return Err(HeadError::Damaged);
        }
        if head.iter().all(|&byte| byte == 0) {
            return Err(HeadError::Empty);
        }
        let Some(key) = &self.key else { return self.read_plain(head, None) };
        let (start, tags) = head.split_at(head.len() - TAGS_BYTES);
        let (clear, inner) = start.split_at(SEALED_AT);
        if clear[..8] != *SEALED_MAGIC {
            return Err(HeadError::Damaged);
        }
        let (body_tag, head_tag): (Tag, Tag) = (array(tags, 0), array(tags, TAG_BYTES));
        let (root, seed) = (hash(clear, 8), array(clear, 24));
        let mut inner = inner.to_vec();
        let clear = [clear, &body_tag].concat();
        let opening = key.open(Purpose::Record(root), seed);
        if !opening.open_first(&clear, &mut inner, head_tag) {
            return Err(HeadError::Damaged);
        }
        let head = self.read_plain(&inner, Some((seed, body_tag)))?;
        if head.name.root == root { Ok(head) } else { Err(HeadError::Damaged) }
    }

    /// A record from its head and the pages of its body, if the body is that of the head.
    pub(crate) fn verified(&self, head: Head, mut body: PageBuffer) -> Option<Record> {
        if let (Some(key), Some((seed, tag))) = (&self.key, head.seal) {
            let opening = key.open(Purpose::Record(head.name.root), seed);
            if !opening.open_second(&mut body.pages_mut()[..self.body.bytes], tag) {
                return None;
            }
        }
        let (body, shape) = (Body::Own(body), self.body);
        let record = Record { name: head.name, body, shape, checksum: head.checksum };
        record.is_whole().then_some(record)
    }

    fn write_head(&self, record: &Record, head: &mut [u8]) {
        let name = &record.name;
        head[..8].copy_from_slice(MAGIC);
        head[8..24].copy_from_slice(&self.fingerprint.0);
        head[24..40].copy_from_slice(&name.root.to_bytes());
        head[40..56].copy_from_slice(&name.hash.to_bytes());
        head[56..72].copy_from_slice(&name.parent.to_bytes());
        head[72..76].copy_from_slice(&name.block_idx.to_le_bytes());
        head[76..80].copy_from_slice(&(name.tokens.len() as u32).to_le_bytes());
        head[80..88].copy_from_slice(&record.checksum.to_le_bytes());
        for (bytes, token) in head[TOKENS_AT..].chunks_exact_mut(4).zip(&name.tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        let end = head.len() - 8;
        let checksum = xxh3_64(&head[..end]);
        head[end..].copy_from_slice(&checksum.to_le_bytes());
    }

    fn read_plain(&self, head: &[u8], seal: Option<(Seed, Tag)>) -> Result<Head, HeadError> {
        let (start, checksum) = head.split_at(head.len() - 8);
        if &start[..8] != MAGIC || xxh3_64(start).to_le_bytes() != checksum {
            return Err(HeadError::Damaged);
        }
        if start[8..24] != self.fingerprint.0 || number(start, 76) as usize != self.block_size {
            return Err(HeadError::Foreign);
        }
        let name = RecordName {
            root: hash(start, 24),
            hash: hash(start, 40),
            parent: hash(start, 56),
            block_idx: number(start, 72),
            tokens: (0..self.block_size).map(|idx| number(start, TOKENS_AT + 4 * idx)).collect(),
        };
        let follows = name.block_idx > 0 || name.parent == name.root;
        if !follows || name.parent.child(&name.tokens) != name.hash {
            return Err(HeadError::Damaged);
        }
        Ok(Head { name, checksum: u64::from_le_bytes(array(start, 80)), seal })
    }
}

fn body_checksum(hash: BlockHash, sums: &[u64]) -> u64 {
    let sums: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    xxh3_64_with_seed(&sums, hash.short())
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
    use baton_kv_cache::KvDtype;

    use super::*;
    use crate::testing::{BLOCK_SIZE, key, record, shape};

    /// Plain records, and sealed ones.
    fn shapes() -> [RecordShape; 2] {
        [shape(), RecordShape { key: Some(key(1)), ..shape() }]
    }

    /// A record that was written, and read again after `change`.
    fn read_again(shape: &RecordShape, record: &Record, change: impl FnOnce(&mut [u8])) -> Option<Record> {
        let bytes = shape.write(record);
        let head = shape.read_head(&bytes.head).expect("as written");
        let mut body = PageBuffer::new(shape.body.bytes);
        body.pages_mut().copy_from_slice(bytes.pages());
        change(&mut body.pages_mut()[..shape.body.bytes]);
        shape.verified(head, body)
    }

    #[test]
    fn a_head_comes_back_and_any_changed_bit_is_found() {
        for shape in shapes() {
            let record = record(3, 1);
            let head = shape.write(&record).head;
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
    }

    #[test]
    fn a_name_that_its_tokens_do_not_prove_is_damage() {
        for shape in shapes() {
            let mut forged = record(3, 1);
            forged.name.tokens[0] += 1;
            assert_eq!(shape.read_head(&shape.write(&forged).head), Err(HeadError::Damaged));
            let mut moved = record(0, 1);
            moved.name.root = moved.name.hash;
            assert_eq!(shape.read_head(&shape.write(&moved).head), Err(HeadError::Damaged));
        }
    }

    #[test]
    fn what_is_sealed_shows_neither_tokens_nor_kv_and_opens_with_its_key_alone() {
        let [plain, sealed] = shapes();
        let record = record(3, 1);
        let (one, other) = (sealed.write(&record), sealed.write(&record));
        let shown = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).any(|window| window == what);
        let tokens: Vec<u8> = record.name.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        assert!(shown(&plain.write(&record).head, &tokens) && !shown(&one.head, &tokens));
        assert!(!shown(one.body(), &record.body()[..16]));
        assert_ne!(one.body(), other.body(), "each is sealed under a seed of its own");
        assert_eq!(read_again(&sealed, &record, |_| ()).expect("it opens").body(), record.body());
        let wrong = RecordShape { key: Some(key(2)), ..shape() };
        assert_eq!(wrong.read_head(&one.head), Err(HeadError::Damaged));
        // As another tenant's.
        let mut moved = one.head.clone();
        moved[8..24].copy_from_slice(&record.name.parent.to_bytes());
        assert_eq!(sealed.read_head(&moved), Err(HeadError::Damaged));
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
            assert_eq!(foreign.read_head(&shape().write(&record).head), Err(HeadError::Foreign));
        }
    }

    #[test]
    fn the_body_of_another_record_does_not_match() {
        for shape in shapes() {
            let (one, other) = (record(0, 1), record(1, 1));
            assert!(read_again(&shape, &one, |_| ()).is_some());
            assert!(
                read_again(&shape, &one, |body| body.copy_from_slice(shape.write(&other).body())).is_none()
            );
            assert!(read_again(&shape, &one, |body| body[7] ^= 1).is_none());
        }
    }
}
