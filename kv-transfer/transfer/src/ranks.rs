//! The copies between ranks when devices write themselves and the heads of blocks are spread over several ranks of
//! either side.
//!
//! ```text
//! whole piece     | K: head 0 | 1 | 2 | 3 | V: head 0 | 1 | 2 | 3 |
//! source, 2 ranks | rank 0        | rank 1        | ...
//! target, 4 ranks | 0     | 1     | 2     | 3     | ...           0 -> 0, 0 -> 1, 1 -> 2, 1 -> 3: a span of K, one of V
//! ```
//! Apart from that, pieces are the same on both sides. Between equal ranks, a piece is one span. Every replica of a
//! head at the target is written. Replicas at the source are read in turn.

use std::ops::RangeInclusive;

use baton_kv_cache::{DeviceCopy, KvLayout, KvMapping, KvShard, ShardError, mapping::RunKind};

/// The most ranks that a peer may announce. A peer's message must not make this side register or open memory without a
/// bound.
pub const NUM_RANKS: RangeInclusive<u32> = 1..=64;

/// Two ranks that share heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPair {
    /// Rank of the pool that is read.
    pub source: usize,
    /// Rank of the pool that is written.
    pub target: usize,
    spans: Vec<Span>,
}

/// Bytes that are contiguous in both ranks' pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    source: usize,
    target: usize,
    len: usize,
}

impl RankPair {
    /// All pairs that blocks of layout `whole` need between `num_sources` and `num_targets` ranks.
    ///
    /// # Errors
    /// When the heads cannot be divided among so many ranks. The numbers may come from a peer.
    pub fn all(
        whole: &KvLayout,
        num_sources: usize,
        num_targets: usize,
    ) -> Result<Vec<RankPair>, ShardError> {
        let mut pairs = Vec::new();
        for source in 0..num_sources {
            for target in 0..num_targets {
                let from = KvShard::new(whole, num_sources, source)?;
                let to = KvShard::new(whole, num_targets, target)?;
                let runs = KvMapping::new(&from, &to)?.runs(0..whole.block_size);
                let spans: Vec<Span> = runs
                    .map(|run| match run.kind {
                        RunKind::Bytes(len) => {
                            Span { source: run.source.offset, target: run.destination.offset, len }
                        }
                        RunKind::Vectors { .. } => unreachable!("of the same type"),
                    })
                    .collect();
                if !spans.is_empty() {
                    pairs.push(RankPair { source, target, spans });
                }
            }
        }
        Ok(pairs)
    }

    /// The copies of a piece that begins at these addresses in the memories of the two ranks.
    pub fn copies(&self, source: u64, target: u64) -> impl Iterator<Item = DeviceCopy> {
        self.spans.iter().map(move |span| DeviceCopy {
            source: source + span.source as u64,
            target: target + span.target as u64,
            len: span.len,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::LAYOUT;

    /// `source > target: from+..to` for each pair, and each of its spans.
    fn check(num_kv_heads: usize, num_sources: usize, num_targets: usize, expected: &str) {
        let whole = KvLayout { num_kv_heads, ..LAYOUT };
        let text = |pair: &RankPair| {
            let spans = pair.copies(0, 0).map(|copy| format!("{}>{}:{}", copy.source, copy.target, copy.len));
            format!("{}>{} {}", pair.source, pair.target, spans.collect::<Vec<_>>().join(" "))
        };
        let pairs = RankPair::all(&whole, num_sources, num_targets).unwrap();
        let found: Vec<String> = pairs.iter().map(text).collect();
        assert_eq!(found.join(", "), expected, "{num_sources} to {num_targets}");
    }

    #[test]
    fn ranks_give_what_the_others_have_too() {
        // A head's K is 4 tokens of 8 numbers of 4 bytes.
        assert_eq!(LAYOUT.head_bytes(), 128);
        check(4, 1, 1, "0>0 0>0:1024");
        check(4, 2, 2, "0>0 0>0:512, 1>1 0>0:512");
        check(4, 1, 2, "0>0 0>0:256 512>256:256, 0>1 256>0:256 768>256:256");
        check(
            4,
            4,
            2,
            "0>0 0>0:128 128>256:128, 1>0 0>128:128 128>384:128, 2>1 0>0:128 128>256:128, 3>1 0>128:128 128>384:128",
        );
        // Replicas: all are written, and of two at the source each gives to one.
        check(1, 1, 2, "0>0 0>0:256, 0>1 0>0:256");
        check(1, 2, 2, "0>0 0>0:256, 1>1 0>0:256");
        check(1, 2, 1, "0>0 0>0:256");
        let impossible = RankPair::all(&KvLayout { num_kv_heads: 4, ..LAYOUT }, 1, 3).unwrap_err();
        assert_eq!(impossible, ShardError::Indivisible { num_kv_heads: 4, num_ranks: 3 });
    }
}
