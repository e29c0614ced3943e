//! The mapping over a grid of sides, compared with an undivided cache: each destination rank must hold what a cut of
//! the undivided cache would give it.

use std::ops::Range;

use baton_kv_cache::{
    KvDtype, KvLayout, KvMapping, KvShard, VectorCodec,
    mapping::{BlockOffset, Run, RunKind},
};
use proptest::prelude::*;

/// The content of memory that was not written.
const UNTOUCHED: u8 = 0xa5;

/// One side of a worker pair: the undivided layout, and the number of ranks that divide it.
#[derive(Clone, Copy, Debug)]
struct Side {
    whole: KvLayout,
    num_ranks: usize,
}

impl Side {
    fn shards(self) -> impl Iterator<Item = KvShard> {
        (0..self.num_ranks).map(move |rank| KvShard::new(&self.whole, self.num_ranks, rank).unwrap())
    }
}

/// The blocks of one sequence.
#[derive(PartialEq)]
struct Cache {
    layout: KvLayout,
    bytes: Vec<u8>,
}

/// The position of one vector.
#[derive(Clone, Copy)]
struct At {
    layer: usize,
    half: usize,
    head: usize,
    token: usize,
}

impl Cache {
    fn new(layout: KvLayout, num_tokens: usize, byte: u8) -> Cache {
        Cache { layout, bytes: vec![byte; layout.num_blocks_for(num_tokens) * layout.block_bytes()] }
    }

    fn piece(&self, block_idx: usize, layer: usize) -> Range<usize> {
        let start = block_idx * self.layout.block_bytes() + self.layout.layer_offset(layer);
        start..start + self.layout.layer_bytes()
    }

    /// Bytes of a vector's elements and of its scale.
    fn vector(&self, At { layer, half, head, token }: At) -> [Range<usize>; 2] {
        let layout = &self.layout;
        let (block_idx, slot) = (token / layout.block_size, token % layout.block_size);
        let head = self.piece(block_idx, layer).start + half * layout.half_bytes() + layout.head_offset(head);
        let (elements, scale) = (head + layout.token_offset(slot), head + layout.scale_offset(slot));
        let elements_bytes = layout.head_dim * layout.dtype.size_bytes();
        [elements..elements + elements_bytes, scale..scale + layout.dtype.scale_bytes()]
    }

    fn store(&mut self, at: At, vector: &[f32]) {
        let [elements, scale] = self.vector(at);
        let (front, back) = self.bytes.split_at_mut(scale.start);
        self.layout.dtype.store_vector(vector, &mut front[elements], &mut back[..scale.len()]);
    }

    fn load(&self, at: At, vector: &mut [f32]) {
        let [elements, scale] = self.vector(at);
        self.layout.dtype.load_vector(&self.bytes[elements], &self.bytes[scale], vector);
    }

    /// `tokens` as `shard` holds them, cut from this undivided cache.
    fn cut(&self, shard: &KvShard, num_tokens: usize, tokens: Range<usize>) -> Cache {
        let mut part = Cache::new(*shard.layout(), num_tokens, UNTOUCHED);
        let mut vector = vec![0.0; self.layout.head_dim];
        each_vector(shard.layout(), tokens, |at| {
            let at_whole = At { head: shard.heads().start + at.head, ..at };
            if self.layout.dtype == part.layout.dtype {
                for (from, to) in self.vector(at_whole).into_iter().zip(part.vector(at)) {
                    part.bytes[to].copy_from_slice(&self.bytes[from]);
                }
            } else {
                self.load(at_whole, &mut vector);
                part.store(at, &vector);
            }
        });
        part
    }
}

fn each_vector(layout: &KvLayout, tokens: Range<usize>, mut f: impl FnMut(At)) {
    for layer in 0..layout.num_layers {
        for half in 0..2 {
            for head in 0..layout.num_kv_heads {
                for token in tokens.clone() {
                    f(At { layer, half, head, token });
                }
            }
        }
    }
}

/// An undivided cache filled with numbers of several magnitudes.
fn undivided(layout: KvLayout, num_tokens: usize) -> Cache {
    let mut cache = Cache::new(layout, num_tokens, UNTOUCHED);
    let mut state = 1u32;
    let mut vector = vec![0.0; layout.head_dim];
    each_vector(&layout, 0..num_tokens, |at| {
        for x in &mut vector {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *x = (state >> 8) as f32 / (1 << 22) as f32 - 2.0;
        }
        vector[0] *= 8.0;
        cache.store(at, &vector);
    });
    cache
}

/// Bytes of the destination's piece that a run writes: elements (or everything), and scales.
fn written(destination: &KvLayout, run: &Run) -> [Range<usize>; 2] {
    let to = run.destination.offset;
    match run.kind {
        RunKind::Bytes(len) => [to..to + len, 0..0],
        RunKind::Vectors { num_tokens, destination_scales, .. } => {
            let elements = num_tokens * destination.head_dim * destination.dtype.size_bytes();
            let scales = num_tokens * destination.dtype.scale_bytes();
            [to..to + elements, destination_scales..destination_scales + scales]
        }
    }
}

/// Moves `tokens` from every rank of `from` to every rank of `to`, and checks the result.
fn check(whole: &Cache, from: Side, to: Side, tokens: Range<usize>) {
    let num_tokens = tokens.end;
    let sources: Vec<Cache> =
        from.shards().map(|shard| whole.cut(&shard, num_tokens, 0..num_tokens)).collect();
    let mut vector = Vec::new();
    for receiver in to.shards() {
        let mut arrived = Cache::new(*receiver.layout(), num_tokens, UNTOUCHED);
        let mut num_writes = Cache::new(*receiver.layout(), num_tokens, 0);
        for (sender, source) in from.shards().zip(&sources) {
            let mapping = KvMapping::new(&sender, &receiver).unwrap();
            let mut before: Option<Run> = None;
            for run in mapping.runs(tokens.clone()) {
                check_order(before.replace(run), run);
                for layer in 0..from.whole.num_layers {
                    let piece = arrived.piece(run.destination.block_idx, layer);
                    for range in written(receiver.layout(), &run) {
                        num_writes.bytes[piece.clone()][range].iter_mut().for_each(|n| *n += 1);
                    }
                    let from = &source.bytes[source.piece(run.source.block_idx, layer)];
                    mapping.apply(&run, from, &mut arrived.bytes[piece], &mut vector);
                }
            }
        }
        let expected = whole.cut(&receiver, num_tokens, tokens.clone());
        assert!(
            arrived == expected,
            "{from:?} to {to:?}, {tokens:?}: {:?} does not hold its part",
            receiver.heads()
        );
        let mut once = Cache::new(*receiver.layout(), num_tokens, 0);
        each_vector(receiver.layout(), tokens.clone(), |at| {
            once.vector(at).into_iter().for_each(|range| once.bytes[range].fill(1));
        });
        assert!(num_writes == once, "{from:?} to {to:?}, {tokens:?}: not every byte was written once");
    }
}

/// Source addresses ascend, and no two consecutive runs could be one.
fn check_order(before: Option<Run>, run: Run) {
    let Some(before) = before else { return };
    assert!((before.source.block_idx, before.source.offset) < (run.source.block_idx, run.source.offset));
    let RunKind::Bytes(len) = before.kind else { return };
    let goes_on = |before: BlockOffset, after: BlockOffset| {
        before.block_idx == after.block_idx && before.offset + len == after.offset
    };
    assert!(
        !(goes_on(before.source, run.source) && goes_on(before.destination, run.destination)),
        "{before:?} could continue in {run:?}"
    );
}

fn layout(num_kv_heads: usize, block_size: usize, dtype: KvDtype) -> KvLayout {
    KvLayout { block_size, num_layers: 2, num_kv_heads, head_dim: 3, dtype }
}

/// Checks every pair of these sides, for one number of heads.
fn check_grid(num_kv_heads: usize) {
    const DEGREES: [usize; 4] = [1, 2, 4, 8];
    const BLOCK_SIZES: [usize; 4] = [8, 16, 24, 32];
    const PROMPTS: [usize; 4] = [1, 8, 23, 48];
    for from_dtype in KvDtype::ALL {
        for from_size in BLOCK_SIZES {
            for num_tokens in PROMPTS {
                let whole = undivided(layout(num_kv_heads, from_size, from_dtype), num_tokens);
                for to_dtype in KvDtype::ALL {
                    for to_size in BLOCK_SIZES {
                        for (from_ranks, to_ranks) in
                            DEGREES.into_iter().flat_map(|from| DEGREES.map(|to| (from, to)))
                        {
                            let from = Side { whole: whole.layout, num_ranks: from_ranks };
                            let to = layout(num_kv_heads, to_size, to_dtype);
                            check(&whole, from, Side { whole: to, num_ranks: to_ranks }, 0..num_tokens);
                        }
                    }
                }
            }
        }
    }
}

// One test per number of heads, so that they run in parallel.

#[test]
fn ranks_get_what_the_undivided_cache_holds_with_1_head() {
    check_grid(1);
}

#[test]
fn ranks_get_what_the_undivided_cache_holds_with_2_heads() {
    check_grid(2);
}

#[test]
fn ranks_get_what_the_undivided_cache_holds_with_4_heads() {
    check_grid(4);
}

#[test]
fn ranks_get_what_the_undivided_cache_holds_with_8_heads() {
    check_grid(8);
}

/// A degree that divides `num_kv_heads`, or a multiple of it.
fn degree(num_kv_heads: usize) -> impl Strategy<Value = usize> {
    let divisors = (1..=num_kv_heads).filter(|n| num_kv_heads.is_multiple_of(*n)).collect::<Vec<_>>();
    prop_oneof![proptest::sample::select(divisors), (1..4usize).prop_map(move |n| n * num_kv_heads)]
}

fn two_sides() -> impl Strategy<Value = (Side, Side)> {
    (1..=6usize, 1..4usize, 1..6usize).prop_flat_map(|(num_kv_heads, num_layers, head_dim)| {
        let dtype = || proptest::sample::select(KvDtype::ALL.to_vec());
        let side = || {
            (1..=20usize, dtype(), degree(num_kv_heads)).prop_map(move |(block_size, dtype, num_ranks)| {
                Side { whole: KvLayout { block_size, num_layers, num_kv_heads, head_dim, dtype }, num_ranks }
            })
        };
        (side(), side())
    })
}

/// Sizes as a peer may send them.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![0..9usize, any::<usize>(), Just(usize::MAX), (0..64u32).prop_map(|bit| 1 << bit)]
}

fn any_shard() -> impl Strategy<Value = Option<KvShard>> {
    let dtype = proptest::sample::select(KvDtype::ALL.to_vec());
    ([size(), size(), size(), size()], size(), size(), dtype).prop_map(|(sizes, num_ranks, rank, dtype)| {
        let [block_size, num_layers, num_kv_heads, head_dim] = sizes;
        KvShard::new(&KvLayout { block_size, num_layers, num_kv_heads, head_dim, dtype }, num_ranks, rank)
            .ok()
    })
}

proptest! {
    /// Any sizes, and prompts whose first blocks the destination already has.
    #[test]
    fn any_sides_get_what_the_undivided_cache_holds(
        (from, to) in two_sides(),
        num_cached_blocks in 0..3usize,
        num_more in 1..50usize,
    ) {
        let first = num_cached_blocks * to.whole.block_size;
        let whole = undivided(from.whole, first + num_more);
        check(&whole, from, to, first..first + num_more);
    }

    #[test]
    fn no_sizes_make_the_mapping_panic(from in any_shard(), to in any_shard(), first in size(), end in size()) {
        if let (Some(from), Some(to)) = (from, to) {
            prop_assert!(from.heads().end <= from.num_kv_heads());
            for (from, to) in [(from, from), (from, to)] {
                if let Ok(mapping) = KvMapping::new(&from, &to) {
                    mapping.runs(mapping.fill_up(first..end)).take(100).for_each(drop);
                }
            }
        }
    }
}
