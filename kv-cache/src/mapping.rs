//! From one side's blocks to another's: which bytes of a source rank belong where in a destination rank, when the two
//! differ in tensor-parallel degree, block size or element type.
//!
//! A [`Run`] is as long as possible. Equal sides exchange a piece in one run. Ranks that share only some heads
//! exchange one run for K and one for V. With different block sizes, a head's tokens are cut at the block ends of
//! either side:
//!
//! ```text
//!                    block 0         block 1         block 2
//! source, 4 tokens | 0  1  2  3    | 4  5  6  7    | 8  9  .  .    |      one head's K
//!                    `---1----'      `2-'  `3-'      `4-'
//!                    .---1----.  .2-.    .3-.  .4-.
//! destination, 6   | 0  1  2  3  4  5  | 6  7  8  9  .  .  |
//!                    block 0             block 1
//! ```
//!
//! Scales follow the elements of their head, so where a head is cut they are runs of their own. With different types,
//! a run is the vectors of consecutive tokens, which are dequantised and quantised again.
//!
//! Runs come in ascending order of their source address within each source block. So the source is read as one
//! stream, in the order of a checksum or a gather list. The destination offsets are in any order.
//!
//! Offsets are relative to a piece, one layer of one block, and so the same in every layer. The module does not know
//! memory or block tables: blocks are counted in the sequence.

use std::ops::Range;

use crate::{KvLayout, KvShard, ShardError, VectorCodec};

/// Numbers that are dequantised at a time: 8 KiB.
const VECTOR_FLOATS: usize = 2048;

/// What moves from one rank to another, for any sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvMapping {
    source: Heads,
    destination: Heads,
    num_heads: usize,
}

/// The heads that move, as one of the two ranks has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heads {
    layout: KvLayout,
    /// The first of the heads that move, counted in the rank.
    first: usize,
}

/// A range to move that is contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its start in the source.
    pub source: BlockOffset,
    /// Its start in the destination.
    pub destination: BlockOffset,
    /// Its size, and how it moves.
    pub kind: RunKind,
}

/// The start of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOffset {
    /// Index of the block in the sequence.
    pub block_idx: usize,
    /// Offset in the piece, in bytes.
    pub offset: usize,
}

/// The size of a run, and how it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// So many bytes, unchanged.
    Bytes(usize),
    /// One head's vectors of consecutive tokens, converted from one type to another.
    Vectors {
        /// Number of tokens.
        num_tokens: usize,
        /// Offset in the source's piece of the first scale, for types with scales.
        source_scales: usize,
        /// Offset in the destination's piece of the first scale, for types with scales.
        destination_scales: usize,
    },
}

/// The content of a run.
#[derive(Clone, Copy)]
enum Part {
    /// K and V of all heads.
    Piece,
    /// K, or V, of the heads that move.
    Heads,
    /// One head's elements of some tokens.
    Elements,
    /// Their scales.
    Scales,
    /// Both, to be converted.
    Vectors,
}

impl Heads {
    /// Bytes of the elements and of the scales of some tokens of a run.
    fn vectors(&self, tokens: Range<usize>, elements: usize, scales: usize) -> (Range<usize>, Range<usize>) {
        let KvLayout { head_dim, dtype, .. } = self.layout;
        let nth = |first: usize, len: usize| first + tokens.start * len..first + tokens.end * len;
        (nth(elements, head_dim * dtype.size_bytes()), nth(scales, dtype.scale_bytes()))
    }

    fn are_all(&self, num_heads: usize) -> bool {
        num_heads == self.layout.num_kv_heads
    }
}

impl KvMapping {
    /// What `source` sends to `destination`: the heads that both hold. Of ranks with replicas of a head only one
    /// sends it: the destinations are assigned to them in turn.
    ///
    /// # Errors
    /// When the two hold KV of models that differ in layers, heads, or their size.
    pub fn new(source: &KvShard, destination: &KvShard) -> Result<KvMapping, ShardError> {
        let (from, to) = (source.layout(), destination.layout());
        let same = [
            ("layers", from.num_layers, to.num_layers),
            ("kv heads", source.num_kv_heads(), destination.num_kv_heads()),
            ("head dim", from.head_dim, to.head_dim),
        ];
        if let Some((what, from, to)) = same.into_iter().find(|(_, from, to)| from != to) {
            return Err(ShardError::OtherModel { what, from, to });
        }
        let (sent, taken) = (source.heads(), destination.heads());
        let first = sent.start.max(taken.start);
        let is_sender = destination.replica_idx() % source.num_replicas() == source.replica_idx();
        let num_heads = if is_sender { sent.end.min(taken.end).saturating_sub(first) } else { 0 };
        let heads =
            |layout: &KvLayout, own: Range<usize>| Heads { layout: *layout, first: first - own.start };
        Ok(KvMapping { source: heads(from, sent), destination: heads(to, taken), num_heads })
    }

    /// Heads that move between the two ranks; 0 when nothing moves.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Whether the two have the same pieces, so that each is one run.
    pub fn is_identity(&self) -> bool {
        self.keeps_heads() && self.source.are_all(self.num_heads) && self.destination.are_all(self.num_heads)
    }

    /// The runs that move `tokens` of a sequence, in any layer. Does not allocate.
    pub fn runs(&self, tokens: Range<usize>) -> impl Iterator<Item = Run> + use<> {
        let mapping = *self;
        let tokens = if self.num_heads > 0 { tokens } else { 0..0 };
        spans(tokens, self.source.layout.block_size).flat_map(move |tokens| mapping.runs_of_block(tokens))
    }

    /// `tokens`, extended to the end of their last block where whole heads move faster than parts. The bytes
    /// after a prompt are moved in vain, and overwritten before they are read.
    pub fn fill_up(&self, tokens: Range<usize>) -> Range<usize> {
        let filled = tokens.end.checked_next_multiple_of(self.source.layout.block_size);
        tokens.start..filled.filter(|_| self.keeps_heads()).unwrap_or(tokens.end)
    }

    /// Moves a run from the source's piece to the destination's. `vectors` is scratch memory, kept between calls.
    pub fn apply(&self, run: &Run, source: &[u8], destination: &mut [u8], vectors: &mut Vec<f32>) {
        let (from, to) = (run.source.offset, run.destination.offset);
        match run.kind {
            RunKind::Bytes(len) => destination[to..][..len].copy_from_slice(&source[from..][..len]),
            RunKind::Vectors { num_tokens, source_scales, destination_scales } => {
                // As many at a time as fit in the L1 cache.
                let most = (VECTOR_FLOATS / self.source.layout.head_dim).max(1);
                for first in (0..num_tokens).step_by(most) {
                    let tokens = first..num_tokens.min(first + most);
                    let head_dim = self.source.layout.head_dim;
                    vectors.resize(tokens.len() * head_dim, 0.0);
                    let (elements, scales) = self.source.vectors(tokens.clone(), from, source_scales);
                    let dtype = self.source.layout.dtype;
                    dtype.load_vectors(&source[elements], &source[scales], head_dim, vectors);
                    let (elements, scales) = self.destination.vectors(tokens, to, destination_scales);
                    // Scales follow the elements of their head.
                    let (front, back) = destination.split_at_mut(scales.start);
                    let (elements, scales) = (&mut front[elements], &mut back[..scales.len()]);
                    self.destination.layout.dtype.store_vectors(vectors, head_dim, elements, scales);
                }
            }
        }
    }

    /// The runs of `tokens`, which are in one source block.
    fn runs_of_block(self, tokens: Range<usize>) -> impl Iterator<Item = Run> {
        let (from, to) = (self.source.layout, self.destination.layout);
        let is_whole = self.keeps_heads() && tokens.len() == from.block_size;
        // The number of runs, or series of runs: of halves, of heads, of parts of a head.
        let (num_halves, num_heads, parts): (_, _, &'static [Part]) = if is_whole && self.is_identity() {
            (1, 1, &[Part::Piece])
        } else if is_whole {
            (2, 1, &[Part::Heads])
        } else if from.dtype != to.dtype {
            (2, self.num_heads, &[Part::Vectors])
        } else if from.dtype.scale_bytes() > 0 {
            (2, self.num_heads, &[Part::Elements, Part::Scales])
        } else {
            (2, self.num_heads, &[Part::Elements])
        };
        let heads = (0..num_halves).flat_map(move |half| (0..num_heads).map(move |head| (half, head)));
        let parts = heads.flat_map(move |(half, head)| parts.iter().map(move |&part| (half, head, part)));
        parts.flat_map(move |(half, head, part)| {
            spans(tokens.clone(), to.block_size).map(move |tokens| self.run(half, head, part, tokens))
        })
    }

    /// The run of `tokens`, which are in one block of either side.
    fn run(&self, half: usize, head: usize, part: Part, tokens: Range<usize>) -> Run {
        let places = |offset_of: fn(&KvLayout, usize) -> usize| {
            [&self.source, &self.destination].map(|Heads { layout, first }| {
                let (block_idx, slot) = (tokens.start / layout.block_size, tokens.start % layout.block_size);
                let head = half * layout.half_bytes() + layout.head_offset(first + head);
                BlockOffset { block_idx, offset: head + offset_of(layout, slot) }
            })
        };
        let (elements, scales) = (places(KvLayout::token_offset), places(KvLayout::scale_offset));
        let KvLayout { head_dim, dtype, .. } = self.source.layout;
        let ([source, destination], kind) = match part {
            Part::Piece => (elements, RunKind::Bytes(self.source.layout.layer_bytes())),
            Part::Heads => (elements, RunKind::Bytes(self.num_heads * self.source.layout.head_bytes())),
            Part::Elements => (elements, RunKind::Bytes(tokens.len() * head_dim * dtype.size_bytes())),
            Part::Scales => (scales, RunKind::Bytes(tokens.len() * dtype.scale_bytes())),
            Part::Vectors => {
                let [source_scales, destination_scales] = scales.map(|place| place.offset);
                let num_tokens = tokens.len();
                (elements, RunKind::Vectors { num_tokens, source_scales, destination_scales })
            }
        };
        Run { source, destination, kind }
    }

    /// Whether a head of a whole block has the same bytes on both sides.
    fn keeps_heads(&self) -> bool {
        let (from, to) = (&self.source.layout, &self.destination.layout);
        (from.dtype, from.block_size) == (to.dtype, to.block_size)
    }
}

/// Cuts `tokens` at the ends of blocks.
fn spans(tokens: Range<usize>, block_size: usize) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = tokens;
    let blocks = start / block_size..end.div_ceil(block_size);
    blocks
        .map(move |block_idx| {
            let first = block_idx * block_size;
            start.max(first)..end.min(first.saturating_add(block_size))
        })
        .filter(|tokens| !tokens.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvDtype;

    const WHOLE: KvLayout =
        KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 4, head_dim: 10, dtype: KvDtype::F16 };

    fn shard(whole: KvLayout, num_ranks: usize, rank: usize) -> KvShard {
        KvShard::new(&whole, num_ranks, rank).unwrap()
    }

    /// `block+offset > block+offset: bytes` for each run.
    fn check(source: KvShard, destination: KvShard, tokens: Range<usize>, expected: &str) {
        let text = |Run { source, destination, kind }: Run| {
            let kind = match kind {
                RunKind::Bytes(len) => len.to_string(),
                RunKind::Vectors { num_tokens, source_scales, destination_scales } => {
                    format!("{num_tokens} tokens, scales {source_scales} > {destination_scales}")
                }
            };
            let [from, to] =
                [source, destination].map(|place| format!("{}+{}", place.block_idx, place.offset));
            format!("{from} > {to}: {kind}")
        };
        let runs: Vec<String> =
            KvMapping::new(&source, &destination).unwrap().runs(tokens).map(text).collect();
        assert_eq!(runs, expected.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>());
    }

    #[test]
    fn equal_sides_exchange_a_piece_in_one_run() {
        for dtype in KvDtype::ALL {
            let shard = shard(KvLayout { dtype, ..WHOLE }, 2, 1);
            let mapping = KvMapping::new(&shard, &shard).unwrap();
            assert!(mapping.is_identity());
            assert_eq!(mapping.fill_up(4..10), 4..12);
            let bytes = shard.layout().layer_bytes();
            check(shard, shard, 4..12, &format!("1+0 > 1+0: {bytes}\n2+0 > 2+0: {bytes}"));
        }
    }

    #[test]
    fn different_degrees_cut_a_piece_into_keys_and_values() {
        // Two heads of 80 bytes each. The destination's are the source's last two.
        check(
            shard(WHOLE, 1, 0),
            shard(WHOLE, 2, 1),
            0..4,
            "0+160 > 0+0: 160
             0+480 > 0+160: 160",
        );
        check(shard(WHOLE, 2, 0), shard(WHOLE, 2, 1), 0..4, "");
        // The same number of heads on each side, for any number of ranks.
        let few = KvLayout { num_kv_heads: 2, ..WHOLE };
        check(shard(few, 2, 1), shard(few, 4, 3), 0..4, "0+0 > 0+0: 160");
    }

    #[test]
    fn block_sizes_cut_heads_where_a_block_of_either_ends() {
        // The picture in the module's documentation: one head, 20 bytes per token.
        let one = KvLayout { num_kv_heads: 1, ..WHOLE };
        check(
            shard(one, 1, 0),
            shard(KvLayout { block_size: 6, ..one }, 1, 0),
            0..10,
            "0+0 > 0+0: 80
             0+80 > 0+120: 80
             1+0 > 0+80: 40
             1+40 > 1+0: 40
             1+80 > 0+200: 40
             1+120 > 1+120: 40
             2+0 > 1+40: 40
             2+80 > 1+160: 40",
        );
    }

    #[test]
    fn scales_of_a_part_of_a_head_are_runs_of_their_own() {
        // 40 bytes of elements, 8 of scales.
        let one = KvLayout { num_kv_heads: 1, dtype: KvDtype::Int8, ..WHOLE };
        check(
            shard(one, 1, 0),
            shard(one, 1, 0),
            1..3,
            "0+10 > 0+10: 20
             0+42 > 0+42: 4
             0+58 > 0+58: 20
             0+90 > 0+90: 4",
        );
    }

    #[test]
    fn other_types_are_moved_as_vectors() {
        let one = KvLayout { num_kv_heads: 1, ..WHOLE };
        check(
            shard(one, 1, 0),
            shard(KvLayout { dtype: KvDtype::Fp8, ..one }, 1, 0),
            5..8,
            "1+20 > 1+10: 3 tokens, scales 80 > 42
             1+100 > 1+58: 3 tokens, scales 160 > 90",
        );
    }

    #[test]
    fn replicas_take_turns_in_sending() {
        for num_kv_heads in [1, 2, 4] {
            let whole = KvLayout { num_kv_heads, ..WHOLE };
            for (num_from, num_to) in
                [1, 2, 4, 8, 16].into_iter().flat_map(|from| [1, 2, 4, 8, 16].map(|to| (from, to)))
            {
                let num_sent = |from, to| {
                    KvMapping::new(&shard(whole, num_from, from), &shard(whole, num_to, to))
                        .unwrap()
                        .num_heads()
                };
                for to in 0..num_to {
                    let num_taken: usize = (0..num_from).map(|from| num_sent(from, to)).sum();
                    assert_eq!(num_taken, shard(whole, num_to, to).heads().len());
                }
                // The destinations' heads, divided evenly among the sources.
                let num_taken = num_kv_heads.max(num_to);
                for from in 0..num_from {
                    let num_sent: usize = (0..num_to).map(|to| num_sent(from, to)).sum();
                    assert!(
                        num_sent <= num_taken.div_ceil(num_from).max(1),
                        "{num_from} to {num_to}: {num_sent}"
                    );
                }
            }
        }
    }

    #[test]
    fn kv_of_other_models_is_refused_with_a_reason() {
        for (other, message) in [
            (KvLayout { num_layers: 3, ..WHOLE }, "layers 2 against 3"),
            (KvLayout { num_kv_heads: 2, ..WHOLE }, "kv heads 4 against 2"),
            (KvLayout { head_dim: 8, ..WHOLE }, "head dim 10 against 8"),
        ] {
            let error = KvMapping::new(&shard(WHOLE, 1, 0), &shard(other, 1, 0)).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
}
