//! An item of attention, and what a method of computing it consists of.

use std::ops::Range;

use crate::kv::HeadKv;
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
}

impl Queries<'_> {
    pub(super) fn len(&self) -> usize {
        self.num_rows * self.group
    }

    /// Numbers of a query, padded to whole vectors.
    pub(super) fn dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
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
}

/// The queries of an item, where they are and where the results go. Pointers are valid for all rows.
#[derive(Clone, Copy)]
pub(super) struct ItemArgs<'a> {
    pub(super) queries: Queries<'a>,
    /// The largest number of queries of an item, for which a thread's memory has room.
    pub(super) max_queries: usize,
    /// Scores are multiplied by this.
    pub(super) scale: f32,
    /// The first head of the group in the first row.
    from: *const f32,
    from_stride: usize,
    out: *mut f32,
    out_stride: usize,
    /// The thread's memory, as large as [`Method::memory_len`] says.
    memory: *mut f32,
}

impl<'a> ItemArgs<'a> {
    pub(super) fn new(
        (queries, max_queries): (Queries<'a>, usize),
        shape_scale: f32,
        (from, from_stride): (*const f32, usize),
        (out, out_stride): (*mut f32, usize),
        memory: *mut f32,
    ) -> ItemArgs<'a> {
        // Scores are in units of log2, except that a soft cap applies first, in the model's units.
        let unit = if queries.soft_cap.is_none() { std::f32::consts::LOG2_E } else { 1.0 };
        ItemArgs {
            queries,
            max_queries,
            scale: shape_scale * unit,
            from,
            from_stride,
            out,
            out_stride,
            memory,
        }
    }

    /// Takes parts of the memory, one after the other, of so many numbers each.
    pub(super) fn parts(&self) -> impl FnMut(usize) -> *mut f32 + use<> {
        let mut next = self.memory;
        move |len| {
            let part = next;
            next = next.wrapping_add(len);
            part
        }
    }

    /// The numbers of a query.
    #[inline(always)]
    pub(super) fn query(&self, query: usize) -> *const f32 {
        let Queries { group, head_dim, .. } = self.queries;
        self.from.wrapping_add(query / group * self.from_stride + query % group * head_dim)
    }

    /// The result of a query.
    #[inline(always)]
    pub(super) fn result(&self, query: usize) -> *mut f32 {
        let Queries { group, head_dim, .. } = self.queries;
        self.out.wrapping_add(query / group * self.out_stride + query % group * head_dim)
    }
}

/// A way to compute items. States of an item are those of all its queries.
///
/// # Safety (of all methods)
/// The arguments are valid, states have [`states_len`](Self::states_len) numbers, and no other code uses them or writes
/// the KV during the call.
#[allow(clippy::missing_safety_doc)] // said once, above
pub(super) trait Method<'a>: Copy {
    /// The approximate number of queries of an item: keys and values that have been widened are used by this many.
    const QUERIES: usize;

    /// Numbers of the states of up to `num_queries`.
    fn states_len(num_queries: usize, head_dim: usize) -> usize;

    /// Numbers of a thread's memory, with states of a span and of the item.
    fn memory_len(num_queries: usize, head_dim: usize) -> usize;

    fn new(isa: Isa, args: ItemArgs<'a>) -> Self;

    /// The thread's own states: of a span, and of the item.
    fn own_states(self) -> [*mut f32; 2];

    /// Prepares the queries.
    unsafe fn prepare(self);

    /// Sets the states of no positions.
    unsafe fn clear(self, states: *mut f32);

    /// Sets the states of a span's positions. Positions below `read_ahead_to` will be needed afterwards.
    unsafe fn pass(self, states: *mut f32, span_idx: usize, read_ahead_to: usize);

    /// Adds the positions of `later` states.
    unsafe fn fold(self, states: *mut f32, later: *mut f32);

    /// Writes the results.
    unsafe fn finish(self, states: *mut f32);
}
