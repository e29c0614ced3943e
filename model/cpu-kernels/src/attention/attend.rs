//! Attention of a batch, divided into items that threads take.

use std::ops::Range;

use baton_cpu_threads::SharedMut;
use baton_kv_cache::BlockStorage;
use baton_model_spec::BatchSequence;

use super::direct;
use super::division::{Division, Item};
use super::pass::{Memory, Queries, pass};
use super::shape::AttentionShape;
use super::softmax::{State, finish, fold};
use super::widen::has_pairs_of;
use crate::cpu::Cpu;
use crate::kv::HeadKv;
use crate::products::bf16_bits;
use baton_cpu_simd::{Isa, LANES};

/// Number of multiplications below which waking the helpers costs more than it gains.
const MIN_SHARED_WORK: usize = 64 * 1024;

/// Computes attention of `queries` (rows `query_stride` apart, heads one after the other) over the KV of `layer_idx`
/// and writes `[rows][num_heads * head_dim]` to `out`. The rows of `sequences[i]` start at `first_rows[i]`.
///
/// # Safety
/// No other code writes the layer's KV of these sequences during the call.
///
/// # Panics
/// When sizes do not match.
#[allow(clippy::too_many_arguments)]
pub unsafe fn attend(
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
    let width = shape.num_heads * shape.head_dim;
    assert!(shape.group() * shape.num_kv_heads == shape.num_heads && width <= query_stride);
    assert_eq!(sequences.len(), first_rows.len());
    for (sequence, first_row) in sequences.iter().zip(first_rows) {
        let end = first_row + sequence.tokens.len();
        assert!(end * query_stride <= queries.len() && end * width <= out.len());
        let context = sequence.start_idx + sequence.tokens.len();
        assert!(sequence.blocks.len() * storage.layout().block_size >= context, "too few blocks");
    }
    let isa = cpu.isa;
    let bf16_pairs = shape.bf16_pairs && has_pairs_of(storage.layout().dtype);
    let Cpu { pool, scratch, partials, .. } = cpu;
    // A decode step over a short context is not worth waking helpers.
    let pairs = |s: &BatchSequence<'_>| s.tokens.len() * (s.start_idx + s.tokens.len());
    let work: usize = sequences.iter().map(pairs).sum();
    let num_threads = if work * width >= MIN_SHARED_WORK { pool.num_threads() } else { 1 };
    let division = Division::new(shape, sequences, num_threads);

    let group = shape.group();
    let max_queries = division.tile_rows * group;
    // Kernels for few queries may write more states than there are queries.
    let states_len =
        max_queries.max(direct::MAX_QUERIES) * State::len(shape.head_dim.next_multiple_of(LANES));
    let scratch = scratch.reserve(num_threads, Memory::len(max_queries, shape.head_dim));
    // States of parts, which are folded after all parts are done.
    let num_partials = if division.by_spans { division.num_parts() } else { 0 };
    let partials = SharedMut::new(partials.grown(num_partials * states_len));
    let out = SharedMut::new(out);
    let args = |thread_idx: usize, item: &Item| {
        let sequence = &sequences[item.sequence_idx];
        let first_row = first_rows[item.sequence_idx] + item.rows.start;
        let first_number = item.kv_head * group * shape.head_dim;
        ItemArgs {
            queries: Queries {
                kv: HeadKv::new(storage, layer_idx, sequence.blocks, shape.first_kv_head + item.kv_head),
                position: sequence.start_idx + item.rows.start,
                num_rows: item.rows.len(),
                group,
                head_dim: shape.head_dim,
                window: shape.window.unwrap_or(usize::MAX),
                soft_cap: shape.soft_cap,
                bf16_pairs,
                in_tiles: bf16_pairs && isa.has_tiles(),
            },
            scale: shape.scale,
            // SAFETY: rows were checked above.
            from: unsafe { queries.as_ptr().add(first_row * query_stride + first_number) },
            from_stride: query_stride,
            // SAFETY: as above; each item has its own heads of its rows.
            out: unsafe { out.ptr().add(first_row * width + first_number) },
            out_stride: width,
            memory: Memory::new(scratch.of(thread_idx), max_queries, shape.head_dim),
        }
    };
    let compute = |thread_idx: usize, part_idx: usize| {
        let (item, spans) = division.part(part_idx);
        let mut args = args(thread_idx, &item);
        // SAFETY: each pointer is valid as stated beside it, each part has its own states, and the caller guarantees
        // that the KV is not written.
        unsafe {
            if division.by_spans {
                args.memory.states = partials.ptr().add(part_idx * states_len);
                compute_span(isa, &args, spans.start);
            } else {
                compute_item(isa, &args, spans);
            }
        }
    };
    let fold = |thread_idx: usize, item_idx: usize| {
        let item = division.item(item_idx);
        // SAFETY: as above; all parts are done.
        unsafe {
            let first = partials.ptr().add(item.first_part * states_len);
            fold_spans(isa, &args(thread_idx, &item), first, states_len, item.spans.len());
        }
    };
    if num_threads > 1 {
        pool.for_each(division.num_parts(), compute);
    } else {
        (0..division.num_parts()).for_each(|idx| compute(0, idx));
    }
    if division.by_spans {
        pool.for_each(division.num_items(), fold);
    }
}

struct ItemArgs<'a> {
    queries: Queries<'a>,
    scale: f32,
    /// The first head of the group in the first row.
    from: *const f32,
    from_stride: usize,
    out: *mut f32,
    out_stride: usize,
    memory: Memory,
}

/// Computes a whole item.
///
/// # Safety
/// Pointers are valid for the rows; the memory is laid out as [`Memory`] says.
unsafe fn compute_item(isa: Isa, args: &ItemArgs<'_>, spans: Range<usize>) {
    let (queries, memory) = (&args.queries, &args.memory);
    // SAFETY: guaranteed by the caller.
    unsafe {
        prepare(args);
        clear(queries, memory.totals);
        for span_idx in spans {
            clear(queries, memory.states);
            pass(isa, queries, memory, span_idx, queries.end());
            fold_all(isa, queries, memory.totals, memory.states);
        }
        finish_all(isa, args);
    }
}

/// Computes one span of an item and leaves its states.
///
/// # Safety
/// As for [`compute_item`].
unsafe fn compute_span(isa: Isa, args: &ItemArgs<'_>, span_idx: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        prepare(args);
        clear(&args.queries, args.memory.states);
        pass(isa, &args.queries, &args.memory, span_idx, 0);
    }
}

/// Folds an item's states of `num_spans` spans, `stride` numbers apart, and writes the result.
///
/// # Safety
/// As for [`compute_item`]; the states are valid.
unsafe fn fold_spans(isa: Isa, args: &ItemArgs<'_>, first: *mut f32, stride: usize, num_spans: usize) {
    let (queries, memory) = (&args.queries, &args.memory);
    // SAFETY: guaranteed by the caller.
    unsafe {
        clear(queries, memory.totals);
        // Invariant 8: spans are folded from first to last, the order of `compute_item`.
        for idx in 0..num_spans {
            fold_all(isa, queries, memory.totals, first.add(idx * stride));
        }
        finish_all(isa, args);
    }
}

/// Scales the queries, rounds them to bf16 if pairs are multiplied, and pads them with zeros.
unsafe fn prepare(args: &ItemArgs<'_>) {
    let Queries { group, head_dim, soft_cap, bf16_pairs, .. } = args.queries;
    let num_words = args.queries.num_words();
    // Scores are in units of log2, except that a soft cap applies first, in the model's units.
    let scale = if soft_cap.is_none() { args.scale * std::f32::consts::LOG2_E } else { args.scale };
    for query in 0..args.queries.len() {
        // SAFETY: query indices are in range, and the words hold at least `head_dim` numbers.
        unsafe {
            let from = args.from.add(query / group * args.from_stride + query % group * head_dim);
            let from = std::slice::from_raw_parts(from, head_dim);
            let to = args.queries.words(args.memory.q, query);
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

unsafe fn clear(queries: &Queries<'_>, states: *mut f32) {
    for query in 0..queries.len() {
        // SAFETY: guaranteed by the caller.
        unsafe { queries.state(states, query).clear() };
    }
}

unsafe fn fold_all(isa: Isa, queries: &Queries<'_>, totals: *mut f32, states: *mut f32) {
    for query in 0..queries.len() {
        // SAFETY: guaranteed by the caller.
        unsafe { fold(isa, queries.state(totals, query), queries.state(states, query)) };
    }
}

unsafe fn finish_all(isa: Isa, args: &ItemArgs<'_>) {
    let Queries { group, head_dim, .. } = args.queries;
    for query in 0..args.queries.len() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let to = args.out.add(query / group * args.out_stride + query % group * head_dim);
            finish(isa, args.queries.state(args.memory.totals, query), to, head_dim);
        }
    }
}

#[cfg(test)]
mod tests;
