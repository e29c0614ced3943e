//! A segment: many records in one object, which is written once and never changed.
//!
//! ```text
//! segment   manifest | record 0 | record 1 | …
//! record    head | body: its layers, one after the other
//! manifest  magic 8 | fingerprint 16 | num_records 8 | hashes 16 each | checksum 8
//! sealed    magic 8 | seed 24 | the manifest, encrypted | tag 16
//! ```
//!
//! All records of a format are of one size. So the size of a segment says how many it has, and a record, or one layer of it, is a
//! range known before anything is read.

use std::ops::Range;

use baton_kv_cache::BlockHash;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    buffer::PageBuffer,
    record::{Record, RecordShape},
    seal::{Purpose, SEED_BYTES, TAG_BYTES},
};

const MAGIC: &[u8; 8] = b"BATONSG2";
const SEALED_MAGIC: &[u8; 8] = b"BATONSS2";
const HASHES_AT: usize = 32;

impl RecordShape {
    /// Bytes of a record in a segment.
    pub(super) fn record_bytes(&self) -> usize {
        self.head_bytes() + self.body.bytes
    }

    /// Bytes of the manifest of so many records.
    pub(super) fn manifest_bytes(&self, num_records: usize) -> usize {
        let seal_bytes = if self.key.is_some() { 8 + SEED_BYTES + TAG_BYTES } else { 0 };
        seal_bytes + HASHES_AT + 16 * num_records + 8
    }

    /// Records in a segment of so many bytes; `None`: no segment has that size.
    pub(super) fn num_records(&self, segment_bytes: u64) -> Option<usize> {
        let records_bytes = segment_bytes.checked_sub(self.manifest_bytes(0) as u64)?;
        let each = 16 + self.record_bytes() as u64;
        (records_bytes > 0 && records_bytes.is_multiple_of(each)).then_some((records_bytes / each) as usize)
    }

    /// Where so many records of a segment of `num_records` are, from `first` on.
    pub(super) fn range(&self, num_records: usize, first: u32, count: usize) -> Range<u64> {
        let start = (self.manifest_bytes(num_records) + first as usize * self.record_bytes()) as u64;
        start..start + (count * self.record_bytes()) as u64
    }

    /// The segment of these records.
    pub(super) fn write_segment(&self, records: &[impl AsRef<Record>]) -> Vec<u8> {
        let hashes: Vec<_> = records.iter().map(|record| record.as_ref().name.hash).collect();
        let mut bytes =
            Vec::with_capacity(self.manifest_bytes(records.len()) + records.len() * self.record_bytes());
        bytes.extend(self.write_manifest(&hashes));
        for record in records {
            let record = self.write(record.as_ref());
            bytes.extend(&record.head);
            bytes.extend(record.body());
        }
        bytes
    }

    /// The hashes of a segment's records; `None`: this is not the manifest of so many, of this format and under this key.
    pub(super) fn read_manifest(&self, manifest: &[u8], num_records: usize) -> Option<Vec<BlockHash>> {
        if manifest.len() != self.manifest_bytes(num_records) {
            return None;
        }
        let Some(key) = &self.key else { return self.read_hashes(manifest, num_records) };
        let (magic, rest) = manifest.split_at(8);
        let (seed, rest) = rest.split_at(SEED_BYTES);
        let (inner, tag) = rest.split_at(rest.len() - TAG_BYTES);
        let mut inner = inner.to_vec();
        let opening = key.open(Purpose::Manifest, seed.try_into().expect("of its size"));
        let is_ours = magic == SEALED_MAGIC
            && opening.open_first(magic, &mut inner, tag.try_into().expect("of its size"));
        is_ours.then(|| self.read_hashes(&inner, num_records)).flatten()
    }

    /// The record of a block from its bytes in a segment, if they are whole (invariant 4).
    pub(super) fn read_record(&self, bytes: &[u8], hash: BlockHash) -> Option<Record> {
        let (head, body) = bytes.split_at_checked(self.head_bytes())?;
        let head = self.read_head(head).ok().filter(|head| head.name.hash == hash)?;
        if body.len() != self.body.bytes {
            return None;
        }
        let mut pages = PageBuffer::new(self.body.bytes);
        pages.pages_mut()[..self.body.bytes].copy_from_slice(body);
        self.verified(head, pages)
    }

    fn write_manifest(&self, hashes: &[BlockHash]) -> Vec<u8> {
        let mut manifest = Vec::with_capacity(HASHES_AT + 16 * hashes.len() + 8);
        manifest.extend(MAGIC);
        manifest.extend(self.fingerprint.0);
        manifest.extend((hashes.len() as u64).to_le_bytes());
        hashes.iter().for_each(|hash| manifest.extend(hash.to_bytes()));
        manifest.extend(xxh3_64(&manifest).to_le_bytes());
        let Some(key) = &self.key else { return manifest };
        let sealing = key.seal(Purpose::Manifest);
        let tag = sealing.seal_first(SEALED_MAGIC, &mut manifest);
        [SEALED_MAGIC, &sealing.seed()[..], &manifest, &tag].concat()
    }

    fn read_hashes(&self, manifest: &[u8], num_records: usize) -> Option<Vec<BlockHash>> {
        let (start, checksum) = manifest.split_at(manifest.len() - 8);
        let (head, hashes) = start.split_at(HASHES_AT);
        let expected = [&MAGIC[..], &self.fingerprint.0, &(num_records as u64).to_le_bytes()].concat();
        let is_ours = head == expected && xxh3_64(start).to_le_bytes() == checksum;
        let hash = |bytes: &[u8]| BlockHash::from_bytes(bytes.try_into().expect("chunks of 16"));
        is_ours.then(|| hashes.chunks_exact(16).map(hash).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testing::{body, key, layout, record, shape};

    #[test]
    fn a_segment_says_what_it_holds_and_where() {
        for shape in [shape(), RecordShape { key: Some(key(1)), ..shape() }] {
            let records: Vec<_> = (0..3).map(|idx| Arc::new(record(idx, 5))).collect();
            let segment = shape.write_segment(&records);
            assert_eq!(shape.num_records(segment.len() as u64), Some(3));
            let manifest = &segment[..shape.manifest_bytes(3)];
            let hashes: Vec<_> = records.iter().map(|record| record.name.hash).collect();
            assert_eq!(shape.read_manifest(manifest, 3).as_ref(), Some(&hashes));
            for (idx, &hash) in hashes.iter().enumerate() {
                let range = shape.range(3, idx as u32, 1);
                let bytes = &segment[range.start as usize..range.end as usize];
                assert_eq!(shape.read_record(bytes, hash).expect("it is there").body(), body(hash));
                assert!(shape.read_record(bytes, hashes[(idx + 1) % 3]).is_none(), "another block");
                assert!(shape.read_record(&bytes[..bytes.len() - 1], hash).is_none(), "a part of it");
                // A layer is a range of it.
                if shape.key.is_none() {
                    let layer = &bytes[shape.head_bytes() + layout().layer_bytes()..];
                    assert_eq!(layer, &body(hash)[layout().layer_bytes()..]);
                }
            }
            for bit in 0..manifest.len() * 8 {
                let mut flipped = manifest.to_vec();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(shape.read_manifest(&flipped, 3), None, "bit {bit}");
            }
            assert_eq!(shape.read_manifest(&manifest[1..], 3), None);
            assert_eq!(shape.read_manifest(manifest, 2), None);
        }
    }

    #[test]
    fn other_sizes_keys_and_formats_are_no_segments() {
        let (plain, sealed) = (shape(), RecordShape { key: Some(key(1)), ..shape() });
        let size = plain.write_segment(&[Arc::new(record(0, 1))]).len() as u64;
        for bytes in [0, 1, size - 1, size + 1, plain.manifest_bytes(0) as u64] {
            assert_eq!(plain.num_records(bytes), None, "{bytes}");
        }
        let segment = sealed.write_segment(&[Arc::new(record(0, 1))]);
        let manifest = &segment[..sealed.manifest_bytes(1)];
        assert!(sealed.read_manifest(manifest, 1).is_some());
        assert_eq!(RecordShape { key: Some(key(2)), ..shape() }.read_manifest(manifest, 1), None);
        let other = RecordShape { fingerprint: crate::record::Fingerprint([1; 16]), ..sealed };
        assert_eq!(other.read_manifest(manifest, 1), None);
    }
}
