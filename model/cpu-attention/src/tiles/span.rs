//! The positions of a span: scores, weights and sums of two sets of queries at a time.

use std::ops::Range;

use super::item::{BLOCK, Item, STEP, WORDS};
use super::pack::AHEAD;
use super::states;
use crate::shape::SPAN;
use baton_cpu_kernels::soft_capped;
use baton_cpu_simd::tile_kernel;
use baton_cpu_simd::tiles::{ROW_BYTES, ROWS, TILE_BYTES, TileUse, Tiles};
use baton_cpu_simd::{LANES, Words};

/// A larger score than the one that weights are relative to becomes that one if weights would exceed 2 to the power of this.
/// Otherwise sums need not be scaled, and bf16 is as precise for large weights.
const MAX_WEIGHT: f32 = 8.0;

/// A span of an item. Its values are in the item's memory, and so are its keys, unless they are read in place.
pub(super) struct Span<'a> {
    pub(super) item: &'a Item<'a>,
    pub(super) states: *mut f32,
    /// The first position of the span.
    pub(super) first: usize,
    /// The end of the positions that any query sees.
    pub(super) end: usize,
    /// Positions before this, which is at least the end, are prefetched.
    pub(super) read_ahead_to: usize,
}

tile_kernel! {
    /// Sets the states of all queries to those of a span.
    ///
    /// # Safety
    /// The memory is laid out as [`Item`] says, with queries and values filled in, and with keys unless they are read in place.
    pub(super) fn attend / all_sets (shapes: &mut TileUse, span: &Span<'_>)
}

#[inline(always)]
unsafe fn all_sets<S: Words, T: Tiles>(tiles: &mut T, shapes: &mut TileUse, span: &Span<'_>) {
    let num_sets = span.item.num_sets();
    // SAFETY: guaranteed by the caller.
    unsafe {
        shapes.set(tiles, 2 * ROWS, ROW_BYTES);
        for set in (0..num_sets).step_by(2) {
            if set + 1 < num_sets {
                sets::<S, T, 2>(tiles, span, set);
            } else {
                sets::<S, T, 1>(tiles, span, set);
            }
        }
    }
}

/// Computes the states of `N` sets, block after block.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn sets<S: Words, T: Tiles, const N: usize>(tiles: &mut T, span: &Span<'_>, set: usize) {
    let item = span.item;
    let seen = [Seen::new(span, set), Seen::new(span, set + N - 1)];
    let any = seen[0].any.start..seen[N - 1].any.end;
    let first = any.start / BLOCK * BLOCK;
    // SAFETY: sets, positions and dimensions are in range.
    unsafe {
        let mut tops = [S::splat(f32::NEG_INFINITY); N];
        let mut totals = [S::splat(0.0); N];
        for block in (first..any.end).step_by(BLOCK) {
            let steps = block.max(any.start) / STEP..any.end.min(block + BLOCK).div_ceil(STEP);
            if N == 1 && item.keys_in_place {
                scores_in_place::<S, T>(tiles, span, steps.clone());
            } else {
                scores::<T, N>(tiles, item, set, steps.clone());
            }
            for n in 0..N {
                let largest = largest::<S>(item, n, &seen[n], steps.clone());
                let state = item.state(span.states, set + n);
                tops[n] = raised::<S>(state, item.tiles, tops[n], largest, &mut totals[n], block > first);
                totals[n] = weights::<S>(item, n, &seen[n], steps.clone(), tops[n], totals[n]);
            }
            for tile in (0..item.tiles).step_by(2) {
                if tile + 1 < item.tiles {
                    sums::<T, N, true>(tiles, span, set, tile, steps.clone(), block > first);
                } else {
                    sums::<T, N, false>(tiles, span, set, tile, steps.clone(), block > first);
                }
            }
        }
        for n in 0..N {
            let state = item.state(span.states, set + n);
            if any.is_empty() {
                states::clear(state, item.tiles);
                continue;
            }
            S::store(state, tops[n]);
            S::store(state.add(LANES), totals[n]);
        }
    }
}

/// The positions that a set's queries see, as indices of the span.
struct Seen {
    /// Of each query.
    from: [i32; LANES],
    to: [i32; LANES],
    /// Those that any of them sees, and those that all see.
    any: Range<usize>,
    all: Range<usize>,
}

impl Seen {
    #[inline(always)]
    fn new(span: &Span<'_>, set: usize) -> Seen {
        let queries = &span.item.args.queries;
        let (first, last) = (set * LANES, (set * LANES + LANES).min(queries.len()) - 1);
        let (mut from, mut to) = ([0; LANES], [0; LANES]);
        let (mut seen, mut head) = (queries.seen(first), first % queries.group);
        for lane in 0..LANES {
            // All heads of a row see the same positions. After the last query it is repeated.
            if head == queries.group && first + lane <= last {
                (seen, head) = (queries.seen(first + lane), 0);
            }
            head += 1;
            let index = |position: usize| position.saturating_sub(span.first).min(SPAN) as i32;
            (from[lane], to[lane]) = (index(seen.start), index(seen.end));
        }
        let [first, last] = [0, LANES - 1].map(|lane| from[lane] as usize..to[lane] as usize);
        Seen { from, to, any: first.start..last.end, all: last.start..first.end }
    }

    /// Whether all queries see all positions of a step.
    #[inline(always)]
    fn all_see(&self, step: usize) -> bool {
        self.all.start <= step * STEP && (step + 1) * STEP <= self.all.end
    }

    /// Replaces the numbers of queries that do not see a position.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
    unsafe fn only<S: Words>(&self, position: usize, numbers: S::V, other: f32) -> S::V {
        let (mut lanes, position) = ([0f32; LANES], position as i32);
        // SAFETY: the array has room for sixteen.
        unsafe {
            S::store(lanes.as_mut_ptr(), numbers);
            for lane in 0..LANES {
                let is_seen = self.from[lane] <= position && position < self.to[lane];
                lanes[lane] = if is_seen { lanes[lane] } else { other };
            }
            S::load(lanes.as_ptr())
        }
    }
}

/// The scores of some steps of a block.
#[inline(always)]
unsafe fn scores<T: Tiles, const N: usize>(tiles: &mut T, item: &Item<'_>, set: usize, steps: Range<usize>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let next = item.steps * WORDS;
        let q = item.q.add(set * next).cast_const();
        let mut key = item.keys.add(2 * steps.start * next).cast_const();
        let mut to = item.scores.cast::<u8>();
        // Sixteen positions are stored while the next ones are multiplied.
        for step in steps.clone() {
            multiply::<T, N, false>(tiles, item.steps, q, key);
            if step > steps.start {
                store::<T, N, true>(tiles, to.sub(TILE_BYTES));
            }
            multiply::<T, N, true>(tiles, item.steps, q, key.add(next));
            store::<T, N, false>(tiles, to);
            key = key.add(2 * next);
            to = to.add(2 * TILE_BYTES);
        }
        store::<T, N, true>(tiles, to.sub(TILE_BYTES));
    }
}

/// As [`scores`], of the only set, with keys that are read in place.
#[inline(always)]
unsafe fn scores_in_place<S: Words, T: Tiles>(tiles: &mut T, span: &Span<'_>, steps: Range<usize>) {
    let item = span.item;
    let kv = &item.args.queries.kv;
    let row_bytes = 2 * item.args.queries.head_dim;
    let mut to = item.scores.cast::<u8>();
    let first = span.first + steps.start * STEP;
    let end = span.end.min(span.first + steps.end * STEP);
    // Scores after the end are those of whatever the block has there, or of earlier positions; no query sees them.
    for position in (first..end).step_by(LANES) {
        let ([mut key, _], _) = kv.run(position, LANES);
        let later = (position + AHEAD).min(span.read_ahead_to - 1);
        let ([mut ahead, _], _) = kv.run(later / LANES * LANES, LANES);
        let mut q = item.q.cast_const();
        // SAFETY: guaranteed by the caller; a block has all positions of a tile.
        unsafe {
            tiles.zero::<0>();
            for _ in 0..item.steps {
                tiles.load::<4>(key, row_bytes);
                tiles.load::<6>(q.cast(), ROW_BYTES);
                for row in 0..LANES {
                    S::prefetch_for_later(ahead.wrapping_add(row * row_bytes));
                }
                tiles.dot_bf16::<0, 4, 6>();
                q = q.add(WORDS);
                (key, ahead) = (key.add(ROW_BYTES), ahead.wrapping_add(ROW_BYTES));
            }
            tiles.store::<0>(to, ROW_BYTES);
            to = to.add(TILE_BYTES);
        }
    }
}

/// The scores of sixteen positions, in the tiles of even (0 and 1) or of odd ones (2 and 3).
#[inline(always)]
unsafe fn multiply<T: Tiles, const N: usize, const ODD: bool>(
    tiles: &mut T,
    steps: usize,
    mut q: *const f32,
    mut key: *const f32,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let next = steps * WORDS;
        if ODD {
            tiles.zero::<2>();
            tiles.zero::<3>();
        } else {
            tiles.zero::<0>();
            tiles.zero::<1>();
        }
        for _ in 0..steps {
            if ODD {
                tiles.load_once::<5>(key.cast(), ROW_BYTES);
            } else {
                tiles.load_once::<4>(key.cast(), ROW_BYTES);
            }
            tiles.load::<6>(q.cast(), ROW_BYTES);
            if ODD {
                tiles.dot_bf16::<2, 5, 6>();
            } else {
                tiles.dot_bf16::<0, 4, 6>();
            }
            if N == 2 {
                tiles.load::<7>(q.add(next).cast(), ROW_BYTES);
                if ODD {
                    tiles.dot_bf16::<3, 5, 7>();
                } else {
                    tiles.dot_bf16::<1, 4, 7>();
                }
            }
            q = q.add(WORDS);
            key = key.add(WORDS);
        }
    }
}

/// Stores the scores of sixteen positions.
#[inline(always)]
unsafe fn store<T: Tiles, const N: usize, const ODD: bool>(tiles: &mut T, to: *mut u8) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let second = to.add(BLOCK * ROW_BYTES);
        if ODD {
            tiles.store::<2>(to, ROW_BYTES);
        } else {
            tiles.store::<0>(to, ROW_BYTES);
        }
        if N == 2 {
            if ODD {
                tiles.store::<3>(second, ROW_BYTES);
            } else {
                tiles.store::<1>(second, ROW_BYTES);
            }
        }
    }
}

/// The largest scores of a set. Capped scores replace the stored ones.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn largest<S: Words>(item: &Item<'_>, n: usize, seen: &Seen, steps: Range<usize>) -> S::V {
    let queries = &item.args.queries;
    let has_scales = queries.kv.layout().dtype.scale_bytes() > 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut tops = [S::splat(f32::NEG_INFINITY); 4];
        let mut scores = item.scores.add(n * BLOCK * LANES);
        for step in steps {
            let scales = item.scales.add(step * STEP);
            let all_see = seen.all_see(step);
            // One loop for each frequent case, without branches.
            if all_see && queries.soft_cap.is_none() && !has_scales {
                for t in (0..STEP).step_by(4) {
                    for i in 0..4 {
                        tops[i] = S::max(tops[i], S::load(scores.add((t + i) * LANES)));
                    }
                }
            } else if all_see && queries.soft_cap.is_none() {
                for t in (0..STEP).step_by(4) {
                    for i in 0..4 {
                        let score = S::load(scores.add((t + i) * LANES));
                        tops[i] = S::max(tops[i], S::mul(score, S::splat(*scales.add(t + i))));
                    }
                }
            } else {
                for t in 0..STEP {
                    let mut score = S::load(scores.add(t * LANES));
                    if has_scales {
                        score = S::mul(score, S::splat(*scales.add(t)));
                    }
                    if let Some(cap) = queries.soft_cap {
                        score = S::mul(soft_capped::<S>(score, cap), S::splat(std::f32::consts::LOG2_E));
                        S::store(scores.add(t * LANES), score);
                    }
                    if !all_see {
                        score = seen.only::<S>(step * STEP + t, score, f32::NEG_INFINITY);
                    }
                    tops[0] = S::max(tops[0], score);
                }
            }
            scores = scores.add(STEP * LANES);
        }
        S::max(S::max(tops[0], tops[1]), S::max(tops[2], tops[3]))
    }
}

/// The score that a set's weights are relative to, after a block whose largest is given. Scales the sums so far if it
/// changes for any query.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn raised<S: Words>(
    state: *mut f32,
    tiles: usize,
    top: S::V,
    largest: S::V,
    total: &mut S::V,
    has_sums: bool,
) -> S::V {
    let [mut before, mut now] = [[0f32; LANES]; 2];
    let mut is_raised = false;
    // SAFETY: the state is valid.
    unsafe {
        S::store(before.as_mut_ptr(), top);
        S::store(now.as_mut_ptr(), largest);
        for lane in 0..LANES {
            let raises = now[lane] > before[lane] + MAX_WEIGHT;
            now[lane] = if raises { now[lane] } else { before[lane] };
            is_raised |= raises;
        }
        let raised = S::load(now.as_ptr());
        if is_raised && has_sums {
            let lowered = S::mul(S::max(raised, S::splat(f32::MIN)), S::splat(-1.0));
            let factor = S::exp2_short(S::add(top, lowered));
            *total = S::mul(*total, factor);
            for i in 0..tiles * LANES {
                let at = states::sums(state).add(i * LANES);
                S::store(at, S::mul(S::load(at), factor));
            }
        }
        raised
    }
}

/// Writes a set's weights as pairs of bf16, times the scales of the values, and adds them to the total.
#[inline(always)]
unsafe fn weights<S: Words>(
    item: &Item<'_>,
    n: usize,
    seen: &Seen,
    steps: Range<usize>,
    top: S::V,
    total: S::V,
) -> S::V {
    let queries = &item.args.queries;
    let has_scales = queries.kv.layout().dtype.scale_bytes() > 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut some = Step::<S> {
            seen,
            step: steps.start,
            scores: item.scores.add(n * BLOCK * LANES),
            scales: [ONES.as_ptr(); 2],
            // A query that sees no position so far has weights of zero.
            top: S::mul(S::max(top, S::splat(f32::MIN)), S::splat(-1.0)),
            totals: [total, S::splat(0.0)],
            to: item.weights.add(n * BLOCK / 2 * LANES),
        };
        for step in steps {
            some.step = step;
            if has_scales {
                let scales = item.scales.add(step * STEP).cast_const();
                // Capped scores have been scaled.
                some.scales =
                    [if queries.soft_cap.is_none() { scales } else { ONES.as_ptr() }, scales.add(SPAN)];
            }
            match (has_scales, seen.all_see(step)) {
                (false, true) => some.weights::<false, true>(),
                (false, false) => some.weights::<false, false>(),
                (true, true) => some.weights::<true, true>(),
                (true, false) => some.weights::<true, false>(),
            }
        }
        S::add(some.totals[0], some.totals[1])
    }
}

/// The scales of scores that have been scaled.
const ONES: [f32; STEP] = [1.0; STEP];

/// 32 positions of a set.
struct Step<'a, S: Words> {
    seen: &'a Seen,
    step: usize,
    scores: *const f32,
    /// Of keys, and of values.
    scales: [*const f32; 2],
    /// What is added to scores.
    top: S::V,
    totals: [S::V; 2],
    to: *mut f32,
}

impl<S: Words> Step<'_, S> {
    /// Writes the weights, and goes on to the next positions.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
    unsafe fn weights<const SCALES: bool, const ALL_SEE: bool>(&mut self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            for line in 0..STEP / 2 {
                let mut pair = [S::splat(0.0); 2];
                for i in 0..2 {
                    let t = 2 * line + i;
                    let score = S::load(self.scores.add(t * LANES));
                    let scale = if SCALES { S::splat(*self.scales[0].add(t)) } else { S::splat(1.0) };
                    pair[i] = S::exp2_short(S::fma(score, scale, self.top));
                    if !ALL_SEE {
                        pair[i] = self.seen.only::<S>(self.step * STEP + t, pair[i], 0.0);
                    }
                    self.totals[i] = S::add(self.totals[i], pair[i]);
                    if SCALES {
                        pair[i] = S::mul(pair[i], S::splat(*self.scales[1].add(t)));
                    }
                }
                S::store(self.to.add(line * LANES), S::round_to_pairs(pair[0], pair[1]));
            }
        }
        self.scores = self.scores.wrapping_add(STEP * LANES);
        self.to = self.to.wrapping_add(WORDS);
    }
}

/// Advances the sums of one or two tiles of dimensions by some steps of a block.
#[inline(always)]
unsafe fn sums<T: Tiles, const N: usize, const TWO: bool>(
    tiles: &mut T,
    span: &Span<'_>,
    set: usize,
    tile: usize,
    steps: Range<usize>,
    has_sums: bool,
) {
    let item = span.item;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let to = [0, N - 1]
            .map(|n| states::sums(item.state(span.states, set + n)).wrapping_add(tile * WORDS).cast::<u8>());
        if has_sums {
            tiles.load::<0>(to[0], ROW_BYTES);
            if TWO {
                tiles.load::<1>(to[0].add(TILE_BYTES), ROW_BYTES);
            }
            if N == 2 {
                tiles.load::<2>(to[1], ROW_BYTES);
                if TWO {
                    tiles.load::<3>(to[1].add(TILE_BYTES), ROW_BYTES);
                }
            }
        } else {
            tiles.zero::<0>();
            tiles.zero::<1>();
            tiles.zero::<2>();
            tiles.zero::<3>();
        }
        let mut weights = item.weights.cast_const();
        let mut value = item.values.add((steps.start * item.tiles + tile) * WORDS).cast_const();
        for _ in steps {
            tiles.load_once::<4>(value.cast(), ROW_BYTES);
            tiles.load::<6>(weights.cast(), ROW_BYTES);
            tiles.dot_bf16::<0, 4, 6>();
            if TWO {
                tiles.load_once::<5>(value.add(WORDS).cast(), ROW_BYTES);
                tiles.dot_bf16::<1, 5, 6>();
            }
            if N == 2 {
                tiles.load::<7>(weights.add(BLOCK / STEP * WORDS).cast(), ROW_BYTES);
                tiles.dot_bf16::<2, 4, 7>();
                if TWO {
                    tiles.dot_bf16::<3, 5, 7>();
                }
            }
            weights = weights.add(WORDS);
            value = value.add(item.tiles * WORDS);
        }
        tiles.store::<0>(to[0], ROW_BYTES);
        if TWO {
            tiles.store::<1>(to[0].add(TILE_BYTES), ROW_BYTES);
        }
        if N == 2 {
            tiles.store::<2>(to[1], ROW_BYTES);
            if TWO {
                tiles.store::<3>(to[1].add(TILE_BYTES), ROW_BYTES);
            }
        }
    }
}
