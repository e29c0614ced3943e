//! Causal attention over paged KV.
//!
//! An item of work is one kv head of a few consecutive rows of one sequence: the query heads of its
//! group times the rows form a small matrix Q, and KV passes by in tiles at fixed absolute positions.
//!
//! ```text
//! positions   0        64       128      192
//! tiles       |--------|--------|--------|---
//! row p, window w          [p-w+1 ....... p]      what the row sees; the rest of a tile weighs zero
//! ```
//! Softmax goes tile by tile with a running maximum. Tiles, the order inside them and the zeroes are
//! functions of positions alone, so a row's result does not depend on its neighbours or on chunks.

use baton_kv_cache::{BlockStorage, KvDtype};

use super::dots::{dot_tile, widen};
use super::kv::HeadKv;
use super::rows::soft_capped;
use super::simd::{Bf16, E4m3, F16, F32, I8, LANES, Simd, Stored, kernel};
use super::{Cpu, SharedMut};
use crate::BatchSequence;

/// Positions in a tile of KV; a multiple of the lanes.
const TILE: usize = 64;
/// Query vectors in an item, about.
const QUERIES: usize = 48;
/// Query vectors up to which KV is read from its blocks instead of being widened first.
const DIRECT_QUERIES: usize = 6;

/// What a layer's attention looks like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionShape {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    pub(crate) soft_cap: Option<f32>,
    /// Positions that a row sees, its own included.
    pub(crate) window: Option<usize>,
}

/// Attends with `queries` (rows `query_stride` apart, heads one after the other) to the KV of
/// `layer_idx` and writes `[rows][num_heads * head_dim]` to `out`. The rows of `sequences[i]` begin at
/// `first_rows[i]`.
///
/// # Safety
/// Nobody writes the layer's KV of these sequences meanwhile.
///
/// # Panics
/// When sizes do not fit together.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn attend(
    cpu: &mut Cpu,
    shape: &AttentionShape,
    storage: &BlockStorage,
    layer_idx: usize,
    sequences: &[BatchSequence<'_>],
    first_rows: &[usize],
    queries: &[f32],
    query_stride: usize,
    out: &mut [f32],
) {
    let group = shape.num_heads / shape.num_kv_heads;
    let width = shape.num_heads * shape.head_dim;
    assert!(group * shape.num_kv_heads == shape.num_heads && width <= query_stride);
    assert_eq!(sequences.len(), first_rows.len());
    for (sequence, first_row) in sequences.iter().zip(first_rows) {
        let end = first_row + sequence.tokens.len();
        assert!(end * query_stride <= queries.len() && end * width <= out.len());
        let context = sequence.start_idx + sequence.tokens.len();
        assert!(sequence.blocks.len() * storage.layout().block_size >= context, "too few blocks");
    }
    let tile_rows = (QUERIES / group).max(1);
    let dim = shape.head_dim.next_multiple_of(LANES);
    // Per thread: Q and the sums [queries][dim] each, scores [queries][TILE], KV [TILE][dim],
    // maxima and weights of the queries, scales of a tile's K and of its V.
    let max_queries = tile_rows * group;
    let scratch_len = max_queries * (2 * dim + TILE + 2) + TILE * (dim + 2);
    let num_threads = cpu.pool.num_threads();
    let scratch = cpu.scratch.reserve(num_threads, scratch_len);
    let isa = cpu.isa;
    let out = SharedMut::new(out);

    // Items of a sequence: row tiles x kv heads.
    let num_tiles =
        |sequence: &BatchSequence<'_>| sequence.tokens.len().div_ceil(tile_rows) * shape.num_kv_heads;
    let num_items: usize = sequences.iter().map(num_tiles).sum();
    let item = |thread_idx: usize, mut item_idx: usize| {
        let mut with_rows = sequences.iter().zip(first_rows);
        let (sequence, first_row) = loop {
            let (sequence, first_row) = with_rows.next().expect("items are counted from the same sequences");
            let tiles = num_tiles(sequence);
            if item_idx < tiles {
                break (sequence, first_row);
            }
            item_idx -= tiles;
        };
        let (tile, kv_head) = (item_idx / shape.num_kv_heads, item_idx % shape.num_kv_heads);
        let first = tile * tile_rows;
        let first_row = first_row + first;
        let args = ItemArgs {
            shape,
            kv: HeadKv::both(storage, layer_idx, sequence.blocks, kv_head),
            position: sequence.start_idx + first,
            num_rows: tile_rows.min(sequence.tokens.len() - first),
            // SAFETY: rows were checked above.
            queries: unsafe {
                queries.as_ptr().add(first_row * query_stride + kv_head * group * shape.head_dim)
            },
            query_stride,
            // SAFETY: as above; an item's heads of its rows are its own.
            out: unsafe { out.ptr().add(first_row * width + kv_head * group * shape.head_dim) },
            out_stride: width,
            scratch: scratch.of(thread_idx),
        };
        // SAFETY: pointers are valid as said beside each; the KV is stable by the caller's word.
        unsafe { item_kernel(isa, &args) }
    };
    // A decode step over a short context is not worth waking anybody.
    let pairs = |s: &BatchSequence<'_>| s.tokens.len() * (s.start_idx + s.tokens.len());
    let work: usize = sequences.iter().map(pairs).sum();
    if num_threads > 1 && work * width >= 64 * 1024 {
        cpu.pool.for_each(num_items, item);
    } else {
        (0..num_items).for_each(|idx| item(0, idx));
    }
}

struct ItemArgs<'a> {
    shape: &'a AttentionShape,
    /// Keys and values.
    kv: [HeadKv<'a>; 2],
    /// Of the first row.
    position: usize,
    num_rows: usize,
    /// The group's first head of the first row.
    queries: *const f32,
    query_stride: usize,
    out: *mut f32,
    out_stride: usize,
    scratch: *mut f32,
}

kernel! {
    /// # Safety
    /// Pointers are valid for the rows; the scratch has the size that `attend` reserves.
    fn item_kernel / item (args: &ItemArgs<'_>)
}

#[inline(always)]
unsafe fn item<S: Simd>(args: &ItemArgs<'_>) {
    let shape = args.shape;
    let group = shape.num_heads / shape.num_kv_heads;
    let head_dim = shape.head_dim;
    let dim = head_dim.next_multiple_of(LANES);
    let num_queries = args.num_rows * group;
    // SAFETY: the parts add up to what `attend` reserves.
    unsafe {
        let q = args.scratch;
        let sums = q.add(num_queries * dim);
        let scores = sums.add(num_queries * dim);
        let kv = scores.add(num_queries * TILE);
        let maxima = kv.add(TILE * dim);
        let weights = maxima.add(num_queries);
        let scales = weights.add(num_queries);

        // Q, scaled and padded with zeroes; query `row * group + head`.
        for query in 0..num_queries {
            let from = args.queries.add(query / group * args.query_stride + query % group * head_dim);
            let to = q.add(query * dim);
            for i in 0..head_dim {
                *to.add(i) = *from.add(i) * shape.scale;
            }
            for i in head_dim..dim {
                *to.add(i) = 0.0;
            }
            for i in 0..dim {
                *sums.add(query * dim + i) = 0.0;
            }
            *maxima.add(query) = f32::NEG_INFINITY;
            *weights.add(query) = 0.0;
        }

        let end = args.position + args.num_rows;
        let window = shape.window.unwrap_or(usize::MAX);
        let mut first = (args.position + 1).saturating_sub(window) / TILE * TILE;
        // Widening pays when several tiles of queries use it.
        let direct = dim == head_dim && num_queries <= DIRECT_QUERIES;
        let dtype = if direct { args.kv[0].layout().dtype } else { KvDtype::F32 };
        let has_scales = args.kv[0].layout().dtype.scale_bytes() > 0;
        while first < end {
            let len = TILE.min(end - first);
            if has_scales {
                args.kv[0].scales(first, len, scales);
                args.kv[1].scales(first, len, scales.add(TILE));
            }
            if !direct {
                gather::<S>(&args.kv[0], first, len, kv, dim);
            }
            let mut done = 0;
            while done < len {
                let (k, run) = if direct {
                    args.kv[0].run(first + done, len - done)
                } else {
                    (kv.cast_const().cast(), len)
                };
                let scores = scores.add(done);
                match dtype {
                    KvDtype::F32 => score::<S, F32>(q, num_queries, k, run, dim, scores),
                    KvDtype::F16 => score::<S, F16>(q, num_queries, k, run, dim, scores),
                    KvDtype::Bf16 => score::<S, Bf16>(q, num_queries, k, run, dim, scores),
                    KvDtype::Fp8 => score::<S, E4m3>(q, num_queries, k, run, dim, scores),
                    KvDtype::Int8 => score::<S, I8>(q, num_queries, k, run, dim, scores),
                }
                done += run;
            }
            for query in 0..num_queries {
                let row = query / group;
                let from = (args.position + row + 1).saturating_sub(window).saturating_sub(first);
                let to = (args.position + row + 1).saturating_sub(first).min(len);
                weigh::<S>(
                    scores.add(query * TILE),
                    from,
                    to,
                    if has_scales { scales.cast_const() } else { std::ptr::null() },
                    shape.soft_cap,
                    &mut *maxima.add(query),
                    &mut *weights.add(query),
                    std::slice::from_raw_parts_mut(sums.add(query * dim), dim),
                );
            }
            if !direct {
                gather::<S>(&args.kv[1], first, len, kv, dim);
            }
            let mut done = 0;
            while done < len {
                let (v, run) = if direct {
                    args.kv[1].run(first + done, len - done)
                } else {
                    (kv.cast_const().cast(), len)
                };
                let scores = scores.add(done);
                match dtype {
                    KvDtype::F32 => accumulate::<S, F32>(scores, num_queries, v, run, dim, sums),
                    KvDtype::F16 => accumulate::<S, F16>(scores, num_queries, v, run, dim, sums),
                    KvDtype::Bf16 => accumulate::<S, Bf16>(scores, num_queries, v, run, dim, sums),
                    KvDtype::Fp8 => accumulate::<S, E4m3>(scores, num_queries, v, run, dim, sums),
                    KvDtype::Int8 => accumulate::<S, I8>(scores, num_queries, v, run, dim, sums),
                }
                done += run;
            }
            first += TILE;
        }

        for query in 0..num_queries {
            let to = args.out.add(query / group * args.out_stride + query % group * head_dim);
            let inverse = 1.0 / *weights.add(query);
            for i in 0..head_dim {
                *to.add(i) = *sums.add(query * dim + i) * inverse;
            }
        }
    }
}

/// Widens `len` positions from `first` to `[len][dim]`, padded with zeroes; scales are left for the scores.
#[inline(always)]
unsafe fn gather<S: Simd>(kv: &HeadKv<'_>, first: usize, len: usize, to: *mut f32, dim: usize) {
    let head_dim = kv.layout().head_dim;
    // Positions at a time: those that follow each other, where there is no padding between them.
    let mut done = 0;
    while done < len {
        // SAFETY: `to` has room for `len` positions.
        unsafe {
            let (from, run) = kv.run(first + done, len - done);
            let run = if dim == head_dim { run } else { 1 };
            let to = to.add(done * dim);
            match kv.layout().dtype {
                KvDtype::F32 => widen::<S, F32>(from, to, run * head_dim),
                KvDtype::F16 => widen::<S, F16>(from, to, run * head_dim),
                KvDtype::Bf16 => widen::<S, Bf16>(from, to, run * head_dim),
                KvDtype::Fp8 => widen::<S, E4m3>(from, to, run * head_dim),
                KvDtype::Int8 => widen::<S, I8>(from, to, run * head_dim),
            }
            std::slice::from_raw_parts_mut(to.add(run * head_dim), run * (dim - head_dim)).fill(0.0);
            done += run;
        }
    }
}

/// `scores[query][t] = q[query] . k[t]`
#[inline(always)]
unsafe fn score<S: Simd, W: Stored>(
    q: *const f32,
    num_queries: usize,
    k: *const u8,
    len: usize,
    dim: usize,
    scores: *mut f32,
) {
    let max_cols = match S::TILE_ROWS {
        6 => 4,
        3 => 2,
        _ => 1,
    };
    let mut query = 0;
    while query < num_queries {
        let left = num_queries - query;
        let rows = match S::TILE_ROWS {
            6 if left >= 6 => 6,
            6 if left >= 4 => 4,
            3 if left >= 3 => 3,
            6 | 3 if left >= 2 => 2,
            _ => 1,
        };
        let mut t = 0;
        // SAFETY: queries and positions stay below their numbers.
        unsafe {
            while t < len {
                let q = q.add(query * dim);
                let k = k.add(t * dim * W::SIZE);
                let out = scores.add(query * TILE + t);
                let cols = max_cols.min(len - t);
                match (rows, cols) {
                    (6, 4) if S::TILE_ROWS == 6 => score_tile::<S, W, 6, 4>(q, k, dim, out),
                    (4, 4) if S::TILE_ROWS == 6 => score_tile::<S, W, 4, 4>(q, k, dim, out),
                    (2, 4) if S::TILE_ROWS == 6 => score_tile::<S, W, 2, 4>(q, k, dim, out),
                    (1, 4) if S::TILE_ROWS == 6 => score_tile::<S, W, 1, 4>(q, k, dim, out),
                    (3, 2) if S::TILE_ROWS == 3 => score_tile::<S, W, 3, 2>(q, k, dim, out),
                    (2, 2) if S::TILE_ROWS == 3 => score_tile::<S, W, 2, 2>(q, k, dim, out),
                    (1, 2) if S::TILE_ROWS == 3 => score_tile::<S, W, 1, 2>(q, k, dim, out),
                    _ => {
                        for r in 0..rows {
                            for c in 0..cols {
                                let k = k.add(c * dim * W::SIZE);
                                score_tile::<S, W, 1, 1>(q.add(r * dim), k, dim, out.add(r * TILE + c));
                            }
                        }
                    }
                }
                t += cols;
            }
        }
        query += rows;
    }
}

#[inline(always)]
unsafe fn score_tile<S: Simd, W: Stored, const R: usize, const C: usize>(
    q: *const f32,
    k: *const u8,
    dim: usize,
    out: *mut f32,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        let dots = dot_tile::<S, W, R, C>(q, dim, k, dim, dim);
        for (r, dots) in dots.iter().enumerate() {
            for (c, &dot) in dots.iter().enumerate() {
                *out.add(r * TILE + c) = dot;
            }
        }
    }
}

/// Turns a query's scores of one tile into weights relative to the running maximum, and rescales what
/// was summed before. Only positions `from..to` of the tile are seen; the others weigh zero. `scales`, where KV
/// has them, are those of the tile's K and then of its V: scores and weights take them over, so that the products
/// are of codes.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn weigh<S: Simd>(
    scores: *mut f32,
    from: usize,
    to: usize,
    scales: *const f32,
    soft_cap: Option<f32>,
    maximum: &mut f32,
    weight: &mut f32,
    sums: &mut [f32],
) {
    // SAFETY: a row of scores holds TILE elements, a multiple of the lanes.
    unsafe {
        if from >= to {
            std::slice::from_raw_parts_mut(scores, TILE).fill(0.0);
            return;
        }
        if !scales.is_null() {
            let mut i = 0;
            while i < TILE {
                S::store(scores.add(i), S::mul(S::load(scores.add(i)), S::load(scales.add(i))));
                i += LANES;
            }
        }
        if let Some(cap) = soft_cap {
            let mut i = 0;
            while i < TILE {
                S::store(scores.add(i), soft_capped::<S>(S::load(scores.add(i)), cap));
                i += LANES;
            }
        }
        std::slice::from_raw_parts_mut(scores, from).fill(f32::NEG_INFINITY);
        std::slice::from_raw_parts_mut(scores.add(to), TILE - to).fill(f32::NEG_INFINITY);
        let mut top = S::splat(*maximum);
        let mut i = 0;
        while i < TILE {
            top = S::max(top, S::load(scores.add(i)));
            i += LANES;
        }
        let top = S::max_lane(top);
        let offset = S::splat(-top);
        let mut total = S::splat(0.0);
        let mut i = 0;
        while i < TILE {
            let e = S::exp(S::add(S::load(scores.add(i)), offset));
            let scaled = if scales.is_null() { e } else { S::mul(e, S::load(scales.add(TILE + i))) };
            S::store(scores.add(i), scaled);
            total = S::add(total, e);
            i += LANES;
        }
        let total = S::sum(total);
        if top > *maximum {
            // The first tile a row sees rescales zeroes: e^-inf is zero.
            let mut lanes = [0.0; LANES];
            S::store(lanes.as_mut_ptr(), S::exp(S::splat(*maximum - top)));
            let rescale = S::splat(lanes[0]);
            let mut i = 0;
            while i < sums.len() {
                let at = sums.as_mut_ptr().add(i);
                S::store(at, S::mul(S::load(at), rescale));
                i += LANES;
            }
            *weight = *weight * lanes[0] + total;
            *maximum = top;
        } else {
            *weight += total;
        }
    }
}

/// `sums[query] += sum over t of weights[query][t] * v[t]`, t ascending.
#[inline(always)]
unsafe fn accumulate<S: Simd, W: Stored>(
    weights: *const f32,
    num_queries: usize,
    v: *const u8,
    len: usize,
    dim: usize,
    sums: *mut f32,
) {
    let max_side = match S::TILE_ROWS {
        6 => 4,
        3 => 2,
        _ => 1,
    };
    // SAFETY: queries, positions and columns stay below their numbers; `dim` is a multiple of the lanes.
    unsafe {
        let mut query = 0;
        while query < num_queries {
            let rows = max_side.min(num_queries - query);
            let mut d = 0;
            while d < dim {
                let vectors = max_side.min((dim - d) / LANES);
                let (weights, v) = (weights.add(query * TILE), v.add(d * W::SIZE));
                let sums = sums.add(query * dim + d);
                match (rows, vectors) {
                    (4, 4) if max_side == 4 => add_tile::<S, W, 4, 4>(weights, v, len, dim, sums),
                    (2, 2) if max_side == 2 => add_tile::<S, W, 2, 2>(weights, v, len, dim, sums),
                    _ => {
                        for r in 0..rows {
                            let (weights, sums) = (weights.add(r * TILE), sums.add(r * dim));
                            if max_side == 4 && vectors == 4 {
                                add_tile::<S, W, 1, 4>(weights, v, len, dim, sums);
                            } else {
                                for i in 0..vectors {
                                    let (v, sums) = (v.add(i * LANES * W::SIZE), sums.add(i * LANES));
                                    add_tile::<S, W, 1, 1>(weights, v, len, dim, sums);
                                }
                            }
                        }
                    }
                }
                d += vectors * LANES;
            }
            query += rows;
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn add_tile<S: Simd, W: Stored, const R: usize, const C: usize>(
    weights: *const f32,
    v: *const u8,
    len: usize,
    dim: usize,
    sums: *mut f32,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut acc = [[S::splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                acc[r][c] = S::load(sums.add(r * dim + c * LANES));
            }
        }
        let mut vs = [S::splat(0.0); C];
        for t in 0..len {
            for c in 0..C {
                vs[c] = W::load::<S>(v.add((t * dim + c * LANES) * W::SIZE));
            }
            for r in 0..R {
                let weight = S::splat(*weights.add(r * TILE + t));
                for c in 0..C {
                    acc[r][c] = S::fma(weight, vs[c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                S::store(sums.add(r * dim + c * LANES), acc[r][c]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::{BlockId, KvLayout};

    use super::*;
    use crate::cpu::kv::store_rows;
    use crate::cpu::kv::testing::read_vector;
    use crate::cpu::simd::Isa;
    use crate::cpu::testing::noise;

    struct Case {
        shape: AttentionShape,
        block_size: usize,
        dtype: KvDtype,
        len: usize,
    }

    /// KV of one sequence in blocks that lie in no order.
    fn fill(case: &Case) -> (BlockStorage, Vec<BlockId>, Vec<f32>, Vec<f32>) {
        let shape = &case.shape;
        let layout = KvLayout {
            block_size: case.block_size,
            num_layers: 2,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            dtype: case.dtype,
        };
        let num_blocks = layout.num_blocks_for(case.len);
        let storage = BlockStorage::new(layout, num_blocks + 3).unwrap();
        let blocks: Vec<BlockId> = (0..num_blocks).rev().map(|idx| BlockId(idx as u32 + 2)).collect();
        let width = shape.num_kv_heads * shape.head_dim;
        let [keys, values] = [1, 2].map(|seed| noise(seed, case.len * width));
        for (position, (key, value)) in keys.chunks(width).zip(values.chunks(width)).enumerate() {
            // SAFETY: the test is the only user.
            unsafe { store_rows(&storage, 1, &blocks, position, key, value) };
        }
        let [k, v] = [0, 1].map(|half| {
            (0..case.len * shape.num_kv_heads)
                .flat_map(|idx| {
                    let (position, kv_head) = (idx / shape.num_kv_heads, idx % shape.num_kv_heads);
                    let kv = HeadKv::both(&storage, 1, &blocks, kv_head)[half];
                    // SAFETY: nobody writes.
                    unsafe { read_vector(&kv, position) }
                })
                .collect()
        });
        (storage, blocks, k, v)
    }

    /// The formula, in f64.
    fn reference(shape: &AttentionShape, q: &[f32], k: &[f32], v: &[f32], position: usize) -> Vec<f64> {
        let dim = shape.head_dim;
        let group = shape.num_heads / shape.num_kv_heads;
        let from = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let mut out = vec![0.0; shape.num_heads * dim];
        for head in 0..shape.num_heads {
            let at = |t: usize| (t * shape.num_kv_heads + head / group) * dim;
            let scores: Vec<f64> = (from..=position)
                .map(|t| {
                    let dot: f64 =
                        (0..dim).map(|i| f64::from(q[head * dim + i]) * f64::from(k[at(t) + i])).sum();
                    let score = dot * f64::from(shape.scale);
                    shape.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                })
                .collect();
            let max = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for (t, score) in (from..=position).zip(&scores) {
                for i in 0..dim {
                    out[head * dim + i] += (score - max).exp() / total * f64::from(v[at(t) + i]);
                }
            }
        }
        out
    }

    /// Tolerance 5e-6 absolute for values of magnitude one.
    fn check(isa: Isa, case: &Case) {
        let shape = &case.shape;
        let (storage, blocks, k, v) = fill(case);
        let width = shape.num_heads * shape.head_dim;
        let stride = width + 5;
        let queries: Vec<f32> = noise(3, case.len * stride).iter().map(|x| x * 4.0).collect();
        let run = |threads: usize, chunks: &[(usize, usize)]| {
            let mut cpu = Cpu::new(isa, threads).unwrap();
            let mut out = vec![f32::NAN; case.len * width];
            for &(start, num_rows) in chunks {
                let sequence = BatchSequence {
                    tokens: &vec![0; num_rows],
                    start_idx: start,
                    blocks: &blocks,
                    num_logits: 0,
                };
                // SAFETY: nobody writes.
                unsafe {
                    attend(
                        &mut cpu,
                        shape,
                        &storage,
                        1,
                        &[sequence],
                        &[0],
                        &queries[start * stride..],
                        stride,
                        &mut out[start * width..],
                    );
                }
            }
            out
        };
        let whole = run(2, &[(0, case.len)]);
        for position in [0, 1, case.len / 2, case.len - 1] {
            let expected = reference(shape, &queries[position * stride..], &k, &v, position);
            for (i, expected) in expected.iter().enumerate() {
                let got = f64::from(whole[position * width + i]);
                assert!(
                    (got - expected).abs() < 5e-6,
                    "{isa:?} {shape:?} {position}/{i}: {got} not {expected}"
                );
            }
        }
        let singles: Vec<_> = (0..case.len).map(|start| (start, 1)).collect();
        assert_eq!(run(1, &singles), whole, "{isa:?} {shape:?} row by row");
        let sevens: Vec<_> = (0..case.len).step_by(7).map(|s| (s, 7.min(case.len - s))).collect();
        assert_eq!(run(3, &sevens), whole, "{isa:?} {shape:?} in sevens");
    }

    #[test]
    fn attention_matches_the_formula_and_does_not_depend_on_chunks() {
        let base = AttentionShape {
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 16,
            scale: 0.25,
            soft_cap: None,
            window: None,
        };
        for isa in Isa::available() {
            for dtype in KvDtype::ALL {
                check(isa, &Case { shape: base, block_size: 16, dtype, len: 150 });
            }
            let shapes = [
                AttentionShape { head_dim: 24, num_heads: 3, num_kv_heads: 1, ..base },
                AttentionShape { head_dim: 64, num_heads: 10, ..base },
                AttentionShape { window: Some(1), ..base },
                AttentionShape { window: Some(70), ..base },
                AttentionShape { soft_cap: Some(5.0), head_dim: 80, ..base },
            ];
            for shape in shapes {
                check(isa, &Case { shape, block_size: 5, dtype: KvDtype::F32, len: 135 });
            }
        }
    }
}
