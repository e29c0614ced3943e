//! Attention in tile registers.
//!
//! Sixteen queries, a set, are the columns of tiles, and lanes of vectors: `scores = K Q^T` and `sums = V^T weights`. So
//! keys are multiplied as they are stored, weights are where the next product needs them, and the softmax of sixteen
//! queries needs no sums of lanes. Two sets are computed at a time:
//!
//! ```text
//! for each span              its keys and values are copied to tiles of bf16; a single set reads keys of bf16 in place
//!   for each two sets
//!     for each 128 positions   K Q^T, weights and V^T weights, which stay in the first-level cache
//! ```
//! Every number of queries is computed so: no other instruction adds in the order of tiles.
#![cfg_attr(not(any(test, target_arch = "x86_64")), allow(dead_code))] // only x86-64 has tiles

mod item;
mod pack;
mod span;
mod states;

use crate::method::{ItemArgs, Method};
use crate::shape::SPAN;
use baton_cpu_simd::tiles::TileUse;
use baton_cpu_simd::{Isa, LANES};
use item::{Item, STEP, WORDS};
use span::Span;

/// The method of tiles.
#[derive(Clone, Copy)]
pub(super) struct InTiles<'a> {
    isa: Isa,
    item: Item<'a>,
}

impl<'a> Method<'a> for InTiles<'a> {
    const QUERIES: usize = 512;

    fn states_len(num_queries: usize, head_dim: usize) -> usize {
        item::states_len(num_queries, head_dim)
    }

    fn memory_len(num_queries: usize, head_dim: usize) -> usize {
        item::memory_len(num_queries, head_dim)
    }

    fn new(isa: Isa, args: ItemArgs<'a>) -> InTiles<'a> {
        InTiles { isa, item: Item::new(args) }
    }

    fn own_states(self) -> [*mut f32; 2] {
        self.item.states
    }

    unsafe fn prepare(self) {
        // SAFETY: guaranteed by the caller.
        unsafe { pack::queries(self.isa, &self.item.args, self.item.steps, self.item.q) }
    }

    unsafe fn clear(self, states: *mut f32) {
        for set in 0..self.item.num_sets() {
            // SAFETY: guaranteed by the caller.
            unsafe { states::clear(self.item.state(states, set), self.item.tiles) };
        }
    }

    unsafe fn pass(self, states: *mut f32, span_idx: usize, read_ahead_to: usize) {
        let item = &self.item;
        let queries = &item.args.queries;
        let start = span_idx * SPAN;
        let first = start.max(queries.seen(0).start / STEP * STEP);
        let positions = first..queries.end().min(start + SPAN);
        let read_ahead_to = read_ahead_to.max(positions.end);
        let span = Span { item, states, first: start, end: positions.end, read_ahead_to };
        // SAFETY: guaranteed by the caller; the memory has room for a span.
        unsafe {
            if positions.is_empty() {
                self.clear(states);
                return;
            }
            let from = first - start;
            let keys = item.keys.wrapping_add(from / LANES * item.steps * WORDS);
            let values = item.values.wrapping_add(from / STEP * item.tiles * WORDS);
            if !item.keys_in_place {
                pack::keys(self.isa, queries, positions.clone(), read_ahead_to, item.steps, keys);
            }
            pack::values(self.isa, queries, positions.clone(), read_ahead_to, item.tiles, values);
            if queries.kv.layout().dtype.scale_bytes() > 0 {
                let to = [0, SPAN].map(|half| item.scales.wrapping_add(half + from));
                queries.kv.scales(first, positions.len(), positions.len().next_multiple_of(STEP), to);
            }
            span::attend(self.isa, &mut TileUse::new(self.isa), &span);
        }
    }

    unsafe fn fold(self, states: *mut f32, later: *mut f32) {
        for set in 0..self.item.num_sets() {
            // SAFETY: guaranteed by the caller.
            unsafe {
                states::fold(
                    self.isa,
                    self.item.state(states, set),
                    self.item.state(later, set),
                    self.item.tiles,
                )
            };
        }
    }

    unsafe fn finish(self, states: *mut f32) {
        for set in 0..self.item.num_sets() {
            // SAFETY: guaranteed by the caller.
            unsafe { states::finish(self.isa, self.item.state(states, set), &self.item.args, set * LANES) };
        }
    }
}
