//! The index from the bytes of segments: what was written before the router died, or a prefix of it. Pure.

use crate::{
    index::Index,
    record::{Found, Position, Record},
    segment::HEAD,
};

/// What a scan has met beside records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScanCounts {
    /// Places that hold no whole record and are not the end.
    pub(crate) num_damaged: usize,
    /// Records without effect: what they follow is damaged.
    pub(crate) num_unused: usize,
}

/// Takes in the records of a segment whose head is whole. A damaged record loses its session's tokens from there on, which
/// are computed again; other sessions lose nothing unless its length is damaged.
pub(crate) fn scan(segment: u32, bytes: &[u8], index: &mut Index) -> ScanCounts {
    let mut counts = ScanCounts::default();
    let mut offset = HEAD;
    while let Some(rest) = bytes.get(offset..) {
        let position = Position { segment, offset: offset as u32 };
        match Record::decode(rest, position) {
            Found::Record(record, size) => {
                if !index.apply(&record, position, size) {
                    counts.num_unused += 1;
                }
                offset += size;
            }
            Found::Damaged(next) => {
                counts.num_damaged += 1;
                let Some(size) = next else { break };
                offset += size;
            }
            Found::End => break,
        }
    }
    counts
}
