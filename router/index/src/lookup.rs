//! How much of a prompt each worker holds.
//!
//! The holders of a block hold all blocks before it. So along a chain the sets of holders only shrink, and between two equal
//! ones nothing happens. The places where a set shrinks are found by dividing, and the blocks of a round are read one after the
//! other without a need for the result of any: the processor waits for their memory at the same time.

use baton_kv_events::BlockKey;

use crate::{
    index::KvIndex,
    members::{CHUNK, Mark, Some44, bits},
};

/// A worker that holds the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Whose it is, as it was told when its source joined.
    pub owner: u32,
    /// Blocks at the front that it holds; not 0.
    pub num_blocks: usize,
}

/// Memory for lookups; used again, a lookup allocates nothing.
#[derive(Debug, Default)]
pub struct LookupScratch {
    spans: Vec<Span>,
    next: Vec<Span>,
    /// Places whose set is larger than that of the next one.
    ends: Vec<Place>,
    /// Members that were found, by chunk.
    found: Vec<u64>,
}

/// A block of the prompt, and the mark of its holders.
#[derive(Clone, Copy, Debug)]
struct Place {
    idx: usize,
    mark: Mark,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    first: Place,
    last: Place,
}

/// As long as a round has few spans it divides each into many parts: to read seven blocks takes little longer than one.
const FEW_SPANS: usize = 2;
const MANY_PARTS: usize = 8;

impl KvIndex {
    /// Who holds how much of a prompt, in no order. An owner is named twice if it is believed to hold more, or less, than it
    /// says. `chain` has the prompt's blocks, and `key` names one. What changes meanwhile may be seen or not. It never waits.
    pub fn lookup<T: Copy>(&self, chain: &[T], key: impl Fn(T) -> BlockKey) -> Vec<Holder> {
        let mut holders = Vec::new();
        self.lookup_into(chain, key, &mut LookupScratch::default(), &mut holders);
        holders
    }

    /// As [`lookup`](Self::lookup), with memory of an earlier one. `holders` is cleared first.
    pub fn lookup_into<T: Copy>(
        &self,
        chain: &[T],
        key: impl Fn(T) -> BlockKey,
        scratch: &mut LookupScratch,
        holders: &mut Vec<Holder>,
    ) {
        holders.clear();
        let num_joins = self.num_joins();
        let LookupScratch { spans, next, ends, found } = scratch;
        spans.clear();
        next.clear();
        ends.clear();
        found.clear();
        let mut tables = self.read();
        let mut place = |idx: usize| {
            let (table, key) = tables.table(key(chain[idx]));
            Place { idx, mark: table.arena().mark(table.word(key)) }
        };
        let Some(last) = chain.len().checked_sub(1) else { return };
        let first = place(0);
        if first.mark.count() == 0 {
            return;
        }
        let last = if last == 0 { first } else { place(last) };
        if last.mark.count() > 0 {
            ends.push(last);
        }
        spans.push(Span { first, last });
        while !spans.is_empty() {
            let num_parts = if spans.len() <= FEW_SPANS { MANY_PARTS } else { 2 };
            for Span { first, last } in spans.drain(..) {
                if first.mark == last.mark {
                    continue;
                }
                let length = last.idx - first.idx;
                if length == 1 {
                    ends.push(first);
                    continue;
                }
                let mut before = first;
                for part in 1..num_parts.min(length) {
                    let middle = place(first.idx + length * part / num_parts.min(length));
                    next.push(Span { first: before, last: middle });
                    before = middle;
                }
                next.push(Span { first: before, last });
            }
            std::mem::swap(spans, next);
        }
        // The farthest first: who was found there holds the others, too.
        ends.sort_unstable_by_key(|end| std::cmp::Reverse(end.idx));
        for end in &*ends {
            let (table, key) = tables.table(key(chain[end.idx]));
            table.arena().for_each(table.word(key), |some| {
                let chunk = some.chunk as usize;
                if found.len() <= chunk {
                    found.resize(chunk + 1, 0);
                }
                let new = self.living(Some44 { mask: some.mask & !found[chunk], ..some });
                found[chunk] |= new;
                for bit in bits(new) {
                    if let Some(owner) = self.owner(some.chunk * CHUNK + bit, num_joins) {
                        holders.push(Holder { owner, num_blocks: end.idx + 1 });
                    }
                }
            });
        }
    }
}
