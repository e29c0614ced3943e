//! One pass over a span of KV: the queries of an item against one tile after another.

use std::ops::Range;

use baton_kv_cache::KvLayout;

use super::direct;
use super::product::{Rows, Start, multiply, multiply_pairs};
use super::shape::{SPAN, TILE};
use super::softmax::{Scaling, State, weigh};
use super::tiles;
use super::widen::{Positions, padded, pair_columns, pair_rows, widen_columns, widen_rows};
use crate::kv::HeadKv;
use baton_cpu_simd::tiles::TileUse;
use baton_cpu_simd::{Isa, LANES};

/// The queries of an item: all heads of a group in consecutive rows; the index is `row * group + head`.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    pub(super) kv: HeadKv<'a>,
    /// Position of the first row.
    pub(super) position: usize,
    pub(super) num_rows: usize,
    pub(super) group: usize,
    pub(super) head_dim: usize,
    /// The number of positions that a row sees, its own included.
    pub(super) window: usize,
    pub(super) soft_cap: Option<f32>,
    /// KV [is multiplied in pairs](super::widen::has_pairs_of); queries and weights are rounded to bf16.
    pub(super) bf16_pairs: bool,
    /// Pairs are multiplied in tile registers.
    pub(super) in_tiles: bool,
}

impl Queries<'_> {
    pub(super) fn len(&self) -> usize {
        self.num_rows * self.group
    }

    /// Numbers of a query, padded to whole vectors.
    pub(super) fn dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Words of 32 bits of a query.
    pub(super) fn num_words(&self) -> usize {
        match (self.bf16_pairs, self.in_tiles) {
            (false, _) => self.dim(),
            (true, false) => self.dim() / 2,
            // Whole lines of tile registers.
            (true, true) => (self.dim() / 2).next_multiple_of(tiles::LINES),
        }
    }

    /// The positions that a query sees.
    pub(super) fn seen(&self, query: usize) -> Range<usize> {
        let end = self.position + query / self.group + 1;
        end.saturating_sub(self.window)..end
    }

    /// The end of the positions that any query sees.
    pub(super) fn end(&self) -> usize {
        self.position + self.num_rows
    }

    /// The queries that see any of these positions, of which there is at least one.
    fn that_see(&self, positions: Range<usize>) -> Range<usize> {
        let num_before = positions.start.saturating_sub(self.position);
        let num_not_past =
            (positions.end + self.window.min(usize::MAX / 2)).saturating_sub(self.position + 1);
        num_before.min(self.num_rows) * self.group..num_not_past.min(self.num_rows) * self.group
    }

    /// The state of a query in the array at `first`.
    pub(super) fn state(&self, first: *mut f32, query: usize) -> State {
        State::at(first.wrapping_add(query * State::len(self.dim())), self.dim())
    }

    /// The words of a query in the array at `first`.
    pub(super) fn words(&self, first: *mut f32, query: usize) -> *mut f32 {
        first.wrapping_add(query * self.num_words())
    }
}

/// A thread's memory for one item.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    /// `[queries][words]`, scaled.
    pub(super) q: *mut f32,
    /// States of the current span, one after the other.
    pub(super) states: *mut f32,
    /// States of all earlier spans.
    pub(super) totals: *mut f32,
    /// `[queries][TILE]`; weights in bf16 take the first half of each row.
    scores: *mut f32,
    /// K by columns, `[head_dim][TILE]`, then V by rows, `[TILE][dim]`; half as many for pairs.
    widened: *mut f32,
    /// `[k|v][TILE]`
    scales: *mut f32,
}

impl Memory {
    /// The size for `num_queries`, in numbers.
    pub(super) fn len(num_queries: usize, head_dim: usize) -> usize {
        let (num_queries, dim, widened) = Memory::sizes(num_queries, head_dim);
        num_queries * (dim + 2 * State::len(dim) + TILE) + widened + 2 * TILE
    }

    /// Divides memory of that size.
    pub(super) fn new(first: *mut f32, num_queries: usize, head_dim: usize) -> Memory {
        let (num_queries, dim, widened) = Memory::sizes(num_queries, head_dim);
        let mut next = first;
        let mut take = |len: usize| {
            let part = next;
            next = next.wrapping_add(len);
            part
        };
        Memory {
            q: take(num_queries * dim),
            states: take(num_queries * State::len(dim)),
            totals: take(num_queries * State::len(dim)),
            scores: take(num_queries * TILE),
            widened: take(widened),
            scales: take(2 * TILE),
        }
    }

    /// Sizes in numbers: of all queries, of one query, of a widened tile.
    fn sizes(num_queries: usize, head_dim: usize) -> (usize, usize, usize) {
        let dim = head_dim.next_multiple_of(LANES);
        (num_queries.max(direct::MAX_QUERIES), dim, TILE * padded(head_dim))
    }
}

/// The addresses of a tile's positions, of K and of V; the first `len` of each are used.
struct Places {
    rows: [[*const u8; TILE]; 2],
    len: usize,
}

impl Places {
    fn new() -> Places {
        Places { rows: [[std::ptr::null(); TILE]; 2], len: 0 }
    }

    /// K (0) or V (1).
    fn positions(&self, half: usize, layout: &KvLayout) -> Positions<'_> {
        let KvLayout { dtype, head_dim, .. } = *layout;
        Positions { rows: &self.rows[half][..self.len], dtype, n: head_dim }
    }

    /// Finds the positions of the tile at `first`, up to `end`.
    fn find(&mut self, kv: &HeadKv<'_>, first: usize, end: usize) {
        let len = end.min(first + TILE).saturating_sub(first);
        self.len = len;
        let row_bytes = kv.layout().head_dim * kv.layout().dtype.size_bytes();
        let mut done = 0;
        while done < len {
            let (at, run) = kv.run(first + done, len - done);
            for (at, rows) in at.into_iter().zip(&mut self.rows) {
                for (idx, row) in rows[done..done + run].iter_mut().enumerate() {
                    *row = at.wrapping_add(idx * row_bytes);
                }
            }
            done += run;
        }
    }
}

/// Advances the states of all queries by the positions of span `span_idx`. Positions below `read_ahead_to` will be
/// needed afterwards and are prefetched.
///
/// # Safety
/// The memory is laid out as [`Memory`] says, with queries and states filled in. No other code writes the KV during
/// the call.
pub(super) unsafe fn pass(
    isa: Isa,
    queries: &Queries<'_>,
    memory: &Memory,
    span_idx: usize,
    read_ahead_to: usize,
) {
    let mut first = (span_idx * SPAN).max(queries.seen(0).start / TILE * TILE);
    let end = ((span_idx + 1) * SPAN).min(queries.end());
    let (mut places, mut following) = (&mut Places::new(), &mut Places::new());
    places.find(&queries.kv, first, end);
    let shapes = &mut TileUse::new(isa);
    while first < end {
        following.find(&queries.kv, first + TILE, end.max(read_ahead_to));
        // SAFETY: guaranteed by the caller.
        unsafe { tile(isa, shapes, queries, memory, first, places, following) };
        std::mem::swap(&mut places, &mut following);
        first += TILE;
    }
}

/// One tile, from position `first` on.
unsafe fn tile(
    isa: Isa,
    shapes: &mut TileUse,
    queries: &Queries<'_>,
    memory: &Memory,
    first: usize,
    places: &Places,
    following: &Places,
) {
    let Queries { kv, head_dim, bf16_pairs, in_tiles, .. } = *queries;
    let (dim, len) = (queries.dim(), places.len);
    let layout = kv.layout();
    let dtype = layout.dtype;
    let [keys, values] = [0, 1].map(|half| places.positions(half, layout));
    // After the last tile the current one is prefetched, which costs nothing.
    let next = if following.len > 0 { following } else { places };
    let next = [0, 1].map(|half| next.positions(half, layout));
    let direct = !in_tiles && direct::is_possible(queries.len(), head_dim, dtype);
    // Kernels for few queries may process rows after the last query. Such a row must not be a query of this item that
    // sees other tiles only, so all queries are taken.
    let some = if direct { 0..queries.len() } else { queries.that_see(first..first + len) };
    let num = some.len();
    let mut scaling = Scaling { scales: std::ptr::null(), soft_cap: queries.soft_cap, to_bf16: bf16_pairs };

    // SAFETY: the memory has room for a tile and for all queries.
    unsafe {
        if dtype.scale_bytes() > 0 {
            kv.scales(first, len, [memory.scales, memory.scales.add(TILE)]);
            scaling.scales = memory.scales;
        }
        let num_words = queries.num_words();
        let q = Rows { first: queries.words(memory.q, some.start).cast_const(), stride: num_words };
        let scores = Rows { first: memory.scores, stride: TILE };
        let weights = Rows { first: memory.scores.cast_const(), stride: TILE };
        let sums = Rows { first: queries.state(memory.states, some.start).sums(), stride: State::len(dim) };
        let widened = memory.widened.cast_const();

        let columns = Rows { first: widened, stride: TILE };
        match (direct, bf16_pairs) {
            (true, false) => direct::score(isa, num, &keys, &next[0], q, scores),
            (true, true) => direct::score_pairs(isa, num, &keys, &next[0], q, scores),
            (false, false) => {
                widen_columns(isa, &keys, memory.widened, TILE);
                multiply(isa, num, head_dim, TILE / LANES, q, columns, scores, Start::Zero);
            }
            (false, true) => {
                pair_columns(isa, &keys, memory.widened, TILE);
                let num_pairs = head_dim.div_ceil(2);
                if in_tiles {
                    clear_lines(memory.widened, num_pairs, TILE);
                    tiles::multiply(
                        isa,
                        shapes,
                        num,
                        num_pairs,
                        len.div_ceil(LANES),
                        q,
                        columns,
                        scores,
                        Start::Zero,
                    );
                } else {
                    multiply_pairs(isa, num, num_pairs, TILE / LANES, q, columns, scores, Start::Zero);
                }
            }
        }
        for (idx, query) in some.enumerate() {
            let seen = queries.seen(query);
            let (from, to) = (seen.start.saturating_sub(first), seen.end.saturating_sub(first).min(len));
            let state = queries.state(memory.states, query);
            weigh(isa, memory.scores.add(idx * TILE), from, to, &scaling, state);
        }
        let lines = Rows { first: widened, stride: dim };
        match (direct, bf16_pairs) {
            (true, false) => direct::add(isa, num, &values, &next[1], weights, sums),
            (true, true) => direct::add_pairs(isa, num, &values, &next[1], weights, sums),
            (false, false) => {
                widen_rows(isa, &values, memory.widened, dim);
                multiply(isa, num, len, dim / LANES, weights, lines, sums, Start::Result);
            }
            (false, true) => {
                pair_rows(isa, &values, memory.widened, dim);
                let num_pairs = len.div_ceil(2);
                if in_tiles {
                    clear_lines(memory.widened, num_pairs, dim);
                    tiles::multiply(
                        isa,
                        shapes,
                        num,
                        num_pairs,
                        dim / LANES,
                        weights,
                        lines,
                        sums,
                        Start::Result,
                    );
                } else {
                    multiply_pairs(isa, num, num_pairs, dim / LANES, weights, lines, sums, Start::Result);
                }
            }
        }
    }
}

/// Fills the lines from `num_lines` on, up to a whole tile register, with zeros.
unsafe fn clear_lines(widened: *mut f32, num_lines: usize, stride: usize) {
    let missing = num_lines.next_multiple_of(tiles::LINES) - num_lines;
    // SAFETY: the memory has room for whole registers of lines.
    unsafe { std::slice::from_raw_parts_mut(widened.add(num_lines * stride), missing * stride).fill(0.0) };
}
