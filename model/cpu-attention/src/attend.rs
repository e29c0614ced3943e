//! Attention of a batch, divided into items that threads take.

use baton_cpu_threads::SharedMut;
use baton_kv_cache::BlockStorage;
use baton_model_spec::BatchSequence;

use super::division::{Division, Item};
use super::method::{ItemArgs, Method, Queries};
use super::pass::Vectors;
use super::shape::AttentionShape;
use super::widen::has_pairs_of;
use crate::kv::HeadKv;
use crate::tiles::InTiles;
use baton_cpu_kernels::Cpu;

/// Number of multiplications below which waking the helpers costs more than it gains.
const MIN_SHARED_WORK: usize = 64 * 1024;

/// Computes attention of `queries` (rows `query_stride` apart, heads one after the other) over the KV of `layer_idx`
/// and writes `[rows][num_heads * head_dim]` to `out`. The rows of `sequences[i]` start at `first_rows[i]`.
///
/// # Safety
/// No other code writes the layer's KV of these sequences during the call. With `bf16_pairs` of the shape, AVX-512 and NEON
/// run their instruction for pairs: the CPU [has it](baton_cpu_kernels::has_pairs).
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
    let batch = Batch { shape, storage, layer_idx, sequences, first_rows, queries, query_stride };
    if cpu.isa().has_tiles() && batch.in_pairs() {
        batch.attend::<InTiles<'_>>(cpu, out);
    } else {
        batch.attend::<Vectors<'_>>(cpu, out);
    }
}

/// The arguments of [`attend`].
#[derive(Clone, Copy)]
struct Batch<'a> {
    shape: &'a AttentionShape,
    storage: &'a BlockStorage,
    layer_idx: usize,
    sequences: &'a [BatchSequence<'a>],
    first_rows: &'a [usize],
    queries: &'a [f32],
    query_stride: usize,
}

impl<'a> Batch<'a> {
    fn in_pairs(&self) -> bool {
        self.shape.bf16_pairs && has_pairs_of(self.storage.layout().dtype)
    }

    fn attend<M: Method<'a>>(&self, cpu: &mut Cpu, out: &mut [f32]) {
        let Batch { shape, sequences, .. } = *self;
        let width = shape.num_heads * shape.head_dim;
        let (isa, pool, scratch, partials) = cpu.parts();
        // A decode step over a short context is not worth waking helpers.
        let pairs = |s: &BatchSequence<'_>| s.tokens.len() * (s.start_idx + s.tokens.len());
        let work: usize = sequences.iter().map(pairs).sum();
        let num_threads = if work * width >= MIN_SHARED_WORK { pool.num_threads() } else { 1 };
        let division = Division::new(shape, sequences, num_threads, M::QUERIES);

        let max_queries = division.tile_rows * shape.group();
        let states_len = M::states_len(max_queries, shape.head_dim);
        let scratch = scratch.reserve(num_threads, M::memory_len(max_queries, shape.head_dim));
        // States of parts, which are folded after all parts are done.
        let num_partials = if division.by_spans { division.num_parts() } else { 0 };
        let partials = SharedMut::new(partials.grown(num_partials * states_len));
        let out = SharedMut::new(out);
        let method = |thread_idx: usize, item: &Item| {
            M::new(isa, self.item(item, max_queries, out.ptr(), scratch.of(thread_idx)))
        };
        let compute = |thread_idx: usize, part_idx: usize| {
            let (item, spans) = division.part(part_idx);
            let method = method(thread_idx, &item);
            // SAFETY: each part has its own states and results, and the caller of `attend` guarantees that the KV is not
            // written and that the CPU multiplies pairs. `Cpu::on` has checked the instruction set.
            unsafe {
                method.prepare();
                if division.by_spans {
                    method.pass(partials.ptr().add(part_idx * states_len), spans.start, 0);
                    return;
                }
                let [states, totals] = method.own_states();
                let end = sequences[item.sequence_idx].start_idx + item.rows.end;
                method.clear(totals);
                for span_idx in spans {
                    method.pass(states, span_idx, end);
                    method.fold(totals, states);
                }
                method.finish(totals);
            }
        };
        let fold = |thread_idx: usize, item_idx: usize| {
            let item = division.item(item_idx);
            let method = method(thread_idx, &item);
            let [_, totals] = method.own_states();
            // SAFETY: as above; all parts are done.
            unsafe {
                method.clear(totals);
                // Invariant 8: spans are folded from first to last, as above.
                for idx in item.first_part..item.first_part + item.spans.len() {
                    method.fold(totals, partials.ptr().add(idx * states_len));
                }
                method.finish(totals);
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

    /// The arguments of an item; `memory` is the thread's.
    fn item(&self, item: &Item, max_queries: usize, out: *mut f32, memory: *mut f32) -> ItemArgs<'a> {
        let Batch { shape, storage, layer_idx, sequences, query_stride, .. } = *self;
        let (group, width) = (shape.group(), shape.num_heads * shape.head_dim);
        let sequence = &sequences[item.sequence_idx];
        let first_row = self.first_rows[item.sequence_idx] + item.rows.start;
        let first_number = item.kv_head * group * shape.head_dim;
        let queries = Queries {
            kv: HeadKv::new(storage, layer_idx, sequence.blocks, shape.first_kv_head + item.kv_head),
            position: sequence.start_idx + item.rows.start,
            num_rows: item.rows.len(),
            group,
            head_dim: shape.head_dim,
            window: shape.window.unwrap_or(usize::MAX),
            soft_cap: shape.soft_cap,
            bf16_pairs: self.in_pairs(),
        };
        ItemArgs::new(
            (queries, max_queries),
            shape.scale,
            (self.queries.as_ptr().wrapping_add(first_row * query_stride + first_number), query_stride),
            (out.wrapping_add(first_row * width + first_number), width),
            memory,
        )
    }
}

#[cfg(test)]
mod tests;
