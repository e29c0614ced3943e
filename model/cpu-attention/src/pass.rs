//! One pass over a span of KV: the queries of an item against one tile after another.

use std::ops::Range;

use baton_kv_cache::KvLayout;

use super::direct;
use super::method::{ItemArgs, Method, Queries};
use super::product::{Rows, Start, multiply, multiply_pairs};
use super::shape::{SPAN, TILE};
use super::softmax::{Scaling, State, finish, fold, weigh};
use super::widen::{Positions, padded, pair_columns, pair_rows, widen_columns, widen_rows};
use crate::kv::HeadKv;
use baton_cpu_kernels::bf16_bits;
use baton_cpu_simd::{Isa, LANES};

/// The method of vectors: KV by tiles, or in place for few queries.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    isa: Isa,
    args: ItemArgs<'a>,
    /// `[queries][words]`, scaled.
    q: *mut f32,
    /// States of the current span, one after the other.
    states: *mut f32,
    /// States of all earlier spans.
    totals: *mut f32,
    /// `[queries][TILE]`; weights in bf16 take the first half of each row.
    scores: *mut f32,
    /// K by columns, `[head_dim][TILE]`, then V by rows, `[TILE][dim]`; half as many for pairs.
    widened: *mut f32,
    /// `[k|v][TILE]`
    scales: *mut f32,
}

/// Kernels for few queries may write more rows than there are queries.
fn padded_queries(num_queries: usize) -> usize {
    num_queries.max(direct::MAX_QUERIES)
}

impl<'a> Method<'a> for Vectors<'a> {
    const QUERIES: usize = 256;

    fn states_len(num_queries: usize, head_dim: usize) -> usize {
        padded_queries(num_queries) * State::len(head_dim.next_multiple_of(LANES))
    }

    fn memory_len(num_queries: usize, head_dim: usize) -> usize {
        let states = Vectors::states_len(num_queries, head_dim);
        let of_query = head_dim.next_multiple_of(LANES) + TILE;
        2 * states + padded_queries(num_queries) * of_query + TILE * padded(head_dim) + 2 * TILE
    }

    fn new(isa: Isa, args: ItemArgs<'a>) -> Vectors<'a> {
        let mut take = args.parts();
        let (max_queries, head_dim) = (args.max_queries, args.queries.head_dim);
        let states = Vectors::states_len(max_queries, head_dim);
        Vectors {
            isa,
            args,
            states: take(states),
            totals: take(states),
            q: take(padded_queries(max_queries) * args.queries.dim()),
            scores: take(padded_queries(max_queries) * TILE),
            widened: take(TILE * padded(head_dim)),
            scales: take(2 * TILE),
        }
    }

    fn own_states(self) -> [*mut f32; 2] {
        [self.states, self.totals]
    }

    /// Scales the queries, rounds them to bf16 if pairs are multiplied, and pads them with zeros.
    unsafe fn prepare(self) {
        let Queries { head_dim, bf16_pairs, .. } = self.args.queries;
        let (num_words, scale) = (self.num_words(), self.args.scale);
        for query in 0..self.args.queries.len() {
            // SAFETY: query indices are in range, and the words hold at least `head_dim` numbers.
            unsafe {
                let from = std::slice::from_raw_parts(self.args.query(query), head_dim);
                let to = self.words(query);
                std::slice::from_raw_parts_mut(to, num_words).fill(0.0);
                if bf16_pairs {
                    let to = std::slice::from_raw_parts_mut(to.cast::<u16>(), head_dim);
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16_bits(from * scale));
                } else {
                    let to = std::slice::from_raw_parts_mut(to, head_dim);
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = from * scale);
                }
            }
        }
    }

    unsafe fn clear(self, states: *mut f32) {
        for query in 0..self.args.queries.len() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.state(states, query).clear() };
        }
    }

    unsafe fn pass(self, states: *mut f32, span_idx: usize, read_ahead_to: usize) {
        let queries = &self.args.queries;
        let mut first = (span_idx * SPAN).max(queries.seen(0).start / TILE * TILE);
        let end = ((span_idx + 1) * SPAN).min(queries.end());
        let (mut places, mut following) = (&mut Places::new(), &mut Places::new());
        places.find(&queries.kv, first, end);
        // SAFETY: guaranteed by the caller.
        unsafe { self.clear(states) };
        while first < end {
            following.find(&queries.kv, first + TILE, end.max(read_ahead_to));
            // SAFETY: guaranteed by the caller.
            unsafe { self.tile(states, first, places, following) };
            std::mem::swap(&mut places, &mut following);
            first += TILE;
        }
    }

    unsafe fn fold(self, states: *mut f32, later: *mut f32) {
        for query in 0..self.args.queries.len() {
            // SAFETY: guaranteed by the caller.
            unsafe { fold(self.isa, self.state(states, query), self.state(later, query)) };
        }
    }

    unsafe fn finish(self, states: *mut f32) {
        for query in 0..self.args.queries.len() {
            let to = self.args.result(query);
            // SAFETY: guaranteed by the caller.
            unsafe { finish(self.isa, self.state(states, query), to, self.args.queries.head_dim) };
        }
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

impl Vectors<'_> {
    /// Words of 32 bits of a query.
    fn num_words(self) -> usize {
        if self.args.queries.bf16_pairs { self.args.queries.dim() / 2 } else { self.args.queries.dim() }
    }

    /// The words of a query.
    fn words(self, query: usize) -> *mut f32 {
        self.q.wrapping_add(query * self.num_words())
    }

    /// The state of a query in the array at `first`.
    fn state(self, first: *mut f32, query: usize) -> State {
        let dim = self.args.queries.dim();
        State::at(first.wrapping_add(query * State::len(dim)), dim)
    }

    /// The queries that see any of these positions, of which there is at least one.
    fn that_see(self, positions: Range<usize>) -> Range<usize> {
        let Queries { position, num_rows, group, window, .. } = self.args.queries;
        let num_before = positions.start.saturating_sub(position);
        let num_not_past = (positions.end + window.min(usize::MAX / 2)).saturating_sub(position + 1);
        num_before.min(num_rows) * group..num_not_past.min(num_rows) * group
    }

    /// Advances the states by one tile, from position `first` on.
    unsafe fn tile(self, states: *mut f32, first: usize, places: &Places, following: &Places) {
        let Vectors { isa, args: ItemArgs { queries, .. }, .. } = self;
        let Queries { kv, head_dim, bf16_pairs, .. } = queries;
        let (dim, len) = (queries.dim(), places.len);
        let layout = kv.layout();
        let dtype = layout.dtype;
        let [keys, values] = [0, 1].map(|half| places.positions(half, layout));
        // After the last tile the current one is prefetched, which costs nothing.
        let next = if following.len > 0 { following } else { places };
        let next = [0, 1].map(|half| next.positions(half, layout));
        let direct = direct::is_possible(queries.len(), head_dim, dtype);
        // Kernels for few queries may process rows after the last query. Such a row must not be a query of this item
        // that sees other tiles only, so all queries are taken.
        let some = if direct { 0..queries.len() } else { self.that_see(first..first + len) };
        let num = some.len();
        let mut scaling =
            Scaling { scales: std::ptr::null(), soft_cap: queries.soft_cap, to_bf16: bf16_pairs };

        // SAFETY: the memory has room for a tile and for all queries.
        unsafe {
            if dtype.scale_bytes() > 0 {
                kv.scales(first, len, TILE, [self.scales, self.scales.add(TILE)]);
                scaling.scales = self.scales;
            }
            let q = Rows { first: self.words(some.start).cast_const(), stride: self.num_words() };
            let scores = Rows { first: self.scores, stride: TILE };
            let weights = Rows { first: self.scores.cast_const(), stride: TILE };
            let sums = Rows { first: self.state(states, some.start).sums(), stride: State::len(dim) };
            let widened = self.widened.cast_const();

            let columns = Rows { first: widened, stride: TILE };
            match (direct, bf16_pairs) {
                (true, false) => direct::score(isa, num, &keys, &next[0], q, scores),
                (true, true) => direct::score_pairs(isa, num, &keys, &next[0], q, scores),
                (false, false) => {
                    widen_columns(isa, &keys, self.widened, TILE);
                    multiply(isa, num, head_dim, TILE / LANES, q, columns, scores, Start::Zero);
                }
                (false, true) => {
                    pair_columns(isa, &keys, self.widened, TILE);
                    let num_pairs = head_dim.div_ceil(2);
                    multiply_pairs(isa, num, num_pairs, TILE / LANES, q, columns, scores, Start::Zero);
                }
            }
            for (idx, query) in some.enumerate() {
                let seen = queries.seen(query);
                let (from, to) = (seen.start.saturating_sub(first), seen.end.saturating_sub(first).min(len));
                weigh(isa, self.scores.add(idx * TILE), from, to, &scaling, self.state(states, query));
            }
            let lines = Rows { first: widened, stride: dim };
            match (direct, bf16_pairs) {
                (true, false) => direct::add(isa, num, &values, &next[1], weights, sums),
                (true, true) => direct::add_pairs(isa, num, &values, &next[1], weights, sums),
                (false, false) => {
                    widen_rows(isa, &values, self.widened, dim);
                    multiply(isa, num, len, dim / LANES, weights, lines, sums, Start::Result);
                }
                (false, true) => {
                    pair_rows(isa, &values, self.widened, dim);
                    let num_pairs = len.div_ceil(2);
                    multiply_pairs(isa, num, num_pairs, dim / LANES, weights, lines, sums, Start::Result);
                }
            }
        }
    }
}
