//! An item in tiles: a thread's memory for its queries, and for the keys and values of a span.

use super::states;
use crate::method::ItemArgs;
use crate::shape::SPAN;
use baton_cpu_simd::LANES;
use baton_kv_cache::{KvDtype, KvLayout};

/// Numbers of bf16 along K of a tile, dimensions of keys or positions of values.
pub(super) const STEP: usize = 32;
/// Words of a tile: sixteen rows of two bf16.
pub(super) const WORDS: usize = LANES * LANES;
/// Positions whose scores and weights stay in the first-level cache.
pub(super) const BLOCK: usize = 4 * STEP;
const _: () = assert!(SPAN.is_multiple_of(BLOCK));

/// An item, and the parts of a thread's memory.
#[derive(Clone, Copy)]
pub(super) struct Item<'a> {
    pub(super) args: ItemArgs<'a>,
    /// Tiles of 32 dimensions of a query or key, and of sixteen dimensions of a value.
    pub(super) steps: usize,
    pub(super) tiles: usize,
    /// Tiles of keys are read where they are stored: blocks consist of whole ones, and one set reads each once.
    pub(super) keys_in_place: bool,
    /// `[sets][steps]` tiles of two dimensions of sixteen queries a row, scaled.
    pub(super) q: *mut f32,
    /// `[SPAN / 16][steps]` tiles of 32 dimensions of a position a row.
    pub(super) keys: *mut f32,
    /// `[SPAN / 32][tiles]` tiles of 32 positions of a dimension a row.
    pub(super) values: *mut f32,
    /// `[2 sets][BLOCK][16]`
    pub(super) scores: *mut f32,
    /// `[2 sets][BLOCK / 32]` tiles of two positions of sixteen queries a row.
    pub(super) weights: *mut f32,
    /// `[k|v][SPAN]`
    pub(super) scales: *mut f32,
    /// States of the current span, and of the item.
    pub(super) states: [*mut f32; 2],
}

/// Numbers of the states of so many queries.
pub(super) fn states_len(num_queries: usize, head_dim: usize) -> usize {
    num_queries.div_ceil(LANES) * states::len(head_dim.div_ceil(LANES))
}

/// Numbers of a thread's memory.
pub(super) fn memory_len(num_queries: usize, head_dim: usize) -> usize {
    let (steps, tiles) = (head_dim.div_ceil(STEP), head_dim.div_ceil(LANES));
    let of_span = SPAN / LANES * steps + SPAN / STEP * tiles + 2 * BLOCK / STEP;
    let of_queries = num_queries.div_ceil(LANES) * steps;
    let states = 2 * states_len(num_queries, head_dim);
    (of_queries + of_span) * WORDS + 2 * BLOCK * LANES + 2 * SPAN + states
}

impl<'a> Item<'a> {
    pub(super) fn new(args: ItemArgs<'a>) -> Item<'a> {
        let mut take = args.parts();
        let KvLayout { dtype, block_size, head_dim, .. } = *args.queries.kv.layout();
        let (steps, tiles) = (head_dim.div_ceil(STEP), head_dim.div_ceil(LANES));
        let states = states_len(args.max_queries, head_dim);
        Item {
            args,
            steps,
            tiles,
            keys_in_place: args.queries.len() <= LANES
                && dtype == KvDtype::Bf16
                && head_dim.is_multiple_of(STEP)
                && block_size.is_multiple_of(LANES),
            q: take(args.max_queries.div_ceil(LANES) * steps * WORDS),
            keys: take(SPAN / LANES * steps * WORDS),
            values: take(SPAN / STEP * tiles * WORDS),
            scores: take(2 * BLOCK * LANES),
            weights: take(2 * BLOCK / STEP * WORDS),
            scales: take(2 * SPAN),
            states: [take(states), take(states)],
        }
    }

    pub(super) fn num_sets(&self) -> usize {
        self.args.queries.len().div_ceil(LANES)
    }

    /// The state of a set among those at `states`.
    #[inline(always)]
    pub(super) fn state(&self, states: *mut f32, set: usize) -> *mut f32 {
        states.wrapping_add(set * states::len(self.tiles))
    }
}
