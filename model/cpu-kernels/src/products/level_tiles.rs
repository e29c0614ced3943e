//! Products of eight-bit integers in tiles, with the same bits as [`levels`](super::levels).
//!
//! A panel's lines of levels are rows of tiles as they are stored: sixteen lines are two tiles of weights, one for each
//! half. Sums of a group are exact. They are stored, and while tiles multiply the next groups, they are converted and
//! added as [`levels`](super::levels) says.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only x86-64 has tiles

use super::panels::{LINE_BYTES, PANEL, ROW_SCALE_BYTES, group_head_bytes, per_line};
use super::slabs::{Ahead, Block, SLAB, SUMS, store_sums, zero_sums};
use super::tile::TileArgs;
use baton_cpu_simd::tile_kernel;
use baton_cpu_simd::tiles::{ROW_BYTES, ROWS, TileUse, Tiles};
use baton_cpu_simd::{LANES, Simd};
use baton_model_spec::{IntegerFormat, IntegerWidth};

/// From this number of rows on, tiles are faster than vectors.
pub(super) const MIN_ROWS: usize = 8;

/// Whether such weights are multiplied in tiles of integers. Storing and adding the sums of small groups would take longer
/// than their products; those of large ones are not exact as floats; nibbles would have to be widened. All of them are
/// widened to bf16 and multiplied in tiles of that.
pub fn multiplies(format: IntegerFormat) -> bool {
    format.width == IntegerWidth::Eight && (96..=512).contains(&format.group)
}

/// Numbers of K in a tile.
pub(super) fn step(format: IntegerFormat) -> usize {
    if format.group.is_multiple_of(ROW_BYTES) { ROW_BYTES } else { ROW_BYTES / 2 }
}

/// Numbers of K, with those that fill the last tile.
pub(super) fn padded(format: IntegerFormat, k: usize) -> usize {
    let last = k % format.group;
    k - last + last.next_multiple_of(step(format))
}

/// Groups of a slab: whole activation groups.
fn slab_groups(format: IntegerFormat) -> usize {
    (SLAB / format.activation_group()).max(1) * format.activation_group() / format.group
}

/// Numbers of K that are multiplied before the next panel, about: 1 MiB of the rows of most tiles.
const BLOCK: usize = 4 * SLAB;

/// Numbers of K that are multiplied before the next panel: whole slabs.
pub(super) fn block(format: IntegerFormat) -> usize {
    let slab = slab_groups(format) * format.group;
    (BLOCK / slab).max(1) * slab
}

/// Numbers of the kernel's memory: the sums of a group, those of an activation group, and the lines of a step.
pub(super) const SCRATCH: usize = 2 * SUMS + ROWS * LINE_BYTES / 4;

tile_kernel! {
    /// Multiplies tiles of rows with a block of one panel.
    ///
    /// # Safety
    /// As for [`TileArgs`]; the memory has the size of the block.
    pub(super) fn kernel / product (shapes: &mut TileUse, block: &Block<'_>, format: IntegerFormat)
}

#[inline(always)]
unsafe fn product<S: Simd, T: Tiles>(
    tiles: &mut T,
    shapes: &mut TileUse,
    block: &Block<'_>,
    format: IntegerFormat,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if format.has_zeros {
            slabs::<S, T, true>(tiles, shapes, block, format);
        } else {
            slabs::<S, T, false>(tiles, shapes, block, format);
        }
    }
}

/// A tile of rows, a panel, and the addresses of their parts.
#[derive(Clone, Copy)]
struct Plan<'a> {
    args: &'a TileArgs,
    format: IntegerFormat,
    step: usize,
    num_groups: usize,
    /// Groups of an activation group.
    shared: usize,
    /// Bytes of a group in a packed panel: scales and lines, and of the scales alone.
    group_bytes: usize,
    head_bytes: usize,
    /// `[activation groups][rows]`, then `[groups][rows]`
    scales: *const f32,
    sums_of_rows: *const f32,
    /// The sums of a group, of the product, and of an activation group.
    sums: *const i32,
    totals: *mut f32,
    shared_sums: *mut f32,
}

impl<'a> Plan<'a> {
    #[inline(always)]
    unsafe fn new(args: &'a TileArgs, format: IntegerFormat, block: &Block<'_>) -> Plan<'a> {
        let padded = padded(format, args.k);
        let shared = format.activation_group() / format.group;
        let num_groups = args.k.div_ceil(format.group);
        let head_bytes = group_head_bytes(format);
        // SAFETY: memory is divided as `SCRATCH` and `left` say.
        unsafe {
            let scales = args.a.add(args.rows * padded).cast::<f32>();
            Plan {
                args,
                format,
                step: step(format),
                num_groups,
                shared,
                group_bytes: head_bytes + format.group / per_line(format.width) * LINE_BYTES,
                head_bytes,
                scales,
                sums_of_rows: scales.add(num_groups.div_ceil(shared) * args.rows),
                sums: block.scratch.cast(),
                totals: block.sums.add(args.idx * SUMS),
                shared_sums: block.scratch.add(SUMS),
            }
        }
    }
}

/// The sums of a group of a tile, `[rows][32]`, whose rows are yet to be added.
struct Pending<'a> {
    plan: Plan<'a>,
    group: usize,
    /// The next row.
    row: usize,
}

impl Pending<'_> {
    /// Adds the next rows' sums to those of their activation group, and those to the sums of the product. After the last
    /// group the output is written.
    #[inline(always)]
    unsafe fn add<S: Simd, const ZEROS: bool>(&mut self, num: usize) {
        let Plan { args, shared, num_groups, .. } = self.plan;
        let first = self.row;
        let end = if first + num < args.real_rows { first + num } else { args.real_rows };
        if first >= end {
            return;
        }
        self.row = end;
        let is_last = self.group + 1 == num_groups;
        // One loop for each case, without branches.
        // SAFETY: rows are in range.
        unsafe {
            match (self.group.is_multiple_of(shared), (self.group + 1).is_multiple_of(shared), is_last) {
                (true, true, false) => self.rows::<S, ZEROS, true, true, false>(first, end),
                (true, false, false) => self.rows::<S, ZEROS, true, false, false>(first, end),
                (false, true, false) => self.rows::<S, ZEROS, false, true, false>(first, end),
                (false, false, false) => self.rows::<S, ZEROS, false, false, false>(first, end),
                (true, _, true) => self.rows::<S, ZEROS, true, true, true>(first, end),
                (false, _, true) => self.rows::<S, ZEROS, false, true, true>(first, end),
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Simd, const ZEROS: bool, const STARTS: bool, const ENDS: bool, const LAST: bool>(
        &self,
        first: usize,
        end: usize,
    ) {
        let Plan { args, shared, group_bytes, .. } = self.plan;
        // SAFETY: groups, rows and outputs are in range.
        unsafe {
            let head = args.w.add(ROW_SCALE_BYTES + self.group * group_bytes).cast::<u16>();
            let weights = [S::load_f16(head), S::load_f16(head.add(LANES))];
            let mut zeros = [S::splat(f32::from(IntegerWidth::Eight.middle())); 2];
            if ZEROS {
                zeros = [S::load_f16(head.add(PANEL)), S::load_f16(head.add(PANEL + LANES))];
            }
            let scales = self.plan.scales.add(self.group / shared * args.rows);
            let sums_of_rows = self.plan.sums_of_rows.add(self.group * args.rows);
            let Plan { sums: from, shared_sums, totals, .. } = self.plan;
            for row in first..end {
                let at = row * PANEL;
                let mut sums = [S::load_i32(from.add(at)), S::load_i32(from.add(at + LANES))];
                let of_row = S::splat(-*sums_of_rows.add(row));
                sums = [S::fma(zeros[0], of_row, sums[0]), S::fma(zeros[1], of_row, sums[1])];
                let mut before = [S::splat(0.0); 2];
                if !STARTS {
                    before = [S::load(shared_sums.add(at)), S::load(shared_sums.add(at + LANES))];
                }
                sums = [S::fma(sums[0], weights[0], before[0]), S::fma(sums[1], weights[1], before[1])];
                if !ENDS {
                    S::store(shared_sums.add(at), sums[0]);
                    S::store(shared_sums.add(at + LANES), sums[1]);
                    continue;
                }
                let scale = S::splat(*scales.add(row));
                before = [S::load(totals.add(at)), S::load(totals.add(at + LANES))];
                sums = [S::fma(sums[0], scale, before[0]), S::fma(sums[1], scale, before[1])];
                if !LAST {
                    S::store(totals.add(at), sums[0]);
                    S::store(totals.add(at + LANES), sums[1]);
                    continue;
                }
                let row_scales = args.w.cast::<f32>();
                sums =
                    [S::mul(sums[0], S::load(row_scales)), S::mul(sums[1], S::load(row_scales.add(LANES)))];
                args.finish_row::<S>(row, sums);
            }
        }
    }
}

#[inline(always)]
unsafe fn slabs<S: Simd, T: Tiles, const ZEROS: bool>(
    tiles: &mut T,
    shapes: &mut TileUse,
    block: &Block<'_>,
    format: IntegerFormat,
) {
    let rows = block.rows;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let plan = Plan::new(&rows[0], format, block);
        let mut pending = Pending { plan, group: 0, row: usize::MAX / 2 };
        let (mut first, last) = (block.first / format.group, block.end.div_ceil(format.group));
        while first < last {
            let slab = slab_groups(format);
            let end = if first + slab < last { first + slab } else { last };
            for args in rows {
                shapes.set(tiles, args.rows, plan.step);
                let plan = Plan::new(args, format, block);
                let range = (first, end);
                match (args.rows > ROWS, rows.len() > 1) {
                    (false, false) => {
                        groups::<S, T, ZEROS, false, false>(tiles, plan, range, block, &mut pending)
                    }
                    (false, true) => {
                        groups::<S, T, ZEROS, false, true>(tiles, plan, range, block, &mut pending)
                    }
                    (true, false) => {
                        groups::<S, T, ZEROS, true, false>(tiles, plan, range, block, &mut pending)
                    }
                    (true, true) => {
                        groups::<S, T, ZEROS, true, true>(tiles, plan, range, block, &mut pending)
                    }
                }
            }
            first = end;
        }
        pending.add::<S, ZEROS>(pending.plan.args.rows);
    }
}

/// The last lines of a panel, in memory of as many as a tile has rows: the panel may end where the memory does.
#[inline(always)]
unsafe fn last_lines(from: *const u8, num: usize, to: *mut u8) -> *const u8 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, num * LINE_BYTES);
        to.add(num * LINE_BYTES).write_bytes(0, (ROWS - num) * LINE_BYTES);
    }
    to
}

/// Multiplies a tile of rows with the groups of a slab, while the sums before are added.
#[inline(always)]
unsafe fn groups<'a, S: Simd, T: Tiles, const ZEROS: bool, const TWO: bool, const MANY: bool>(
    tiles: &mut T,
    plan: Plan<'a>,
    (first, end): (usize, usize),
    block: &Block<'_>,
    pending: &mut Pending<'a>,
) {
    let (args, format, step) = (plan.args, plan.format, plan.step);
    let all_steps = (end - first) * format.group / step;
    let mut next = block.next;
    if end * format.group < block.end {
        next = args.w.wrapping_add(ROW_SCALE_BYTES + end * plan.group_bytes);
    }
    let bytes = (end - first) * plan.group_bytes;
    let mut next = Ahead::new(next, bytes, (args.idx, block.rows.len()), all_steps);
    // The rows of the next block: each of its slabs takes a part.
    let slab_rows = args.a.wrapping_add((block.end - block.first + first * format.group) * args.rows);
    let bytes = if block.end < args.k { (end - first) * format.group * args.rows } else { 0 };
    let mut next_rows = Ahead::new(slab_rows, bytes, block.part, all_steps);
    let mut group = first;
    // SAFETY: groups and rows are in range; a prefetched address need not be valid.
    unsafe {
        if first == 0 {
            std::slice::from_raw_parts_mut(plan.totals, SUMS).fill(0.0);
        }
        while group < end {
            let left = args.k - group * format.group;
            let num_steps = if left < format.group { left.div_ceil(step) } else { format.group / step };
            let pending_rows = pending.plan.args.real_rows.div_ceil(num_steps);
            let lines_left = left.div_ceil(per_line(format.width));
            let lines = step / per_line(format.width);
            let mut w = args.w.add(ROW_SCALE_BYTES + group * plan.group_bytes + plan.head_bytes);
            let mut a = args.a.add(group * format.group * args.rows);
            zero_sums::<T, TWO>(tiles);
            for idx in 0..num_steps {
                if (idx + 1) * lines > lines_left {
                    w = last_lines(w, lines_left % lines, block.scratch.add(2 * SUMS).cast());
                }
                next.prefetch::<S>();
                if MANY {
                    next_rows.prefetch::<S>();
                    tiles.load_once::<4>(a, step);
                } else {
                    tiles.load::<4>(a, step);
                }
                tiles.load::<6>(w, LINE_BYTES);
                tiles.dot_i8_u8::<0, 4, 6>();
                next.prefetch::<S>();
                tiles.load::<7>(w.add(ROW_BYTES), LINE_BYTES);
                tiles.dot_i8_u8::<1, 4, 7>();
                next.prefetch::<S>();
                pending.add::<S, ZEROS>(pending_rows);
                if TWO {
                    if MANY {
                        tiles.load_once::<5>(a.add(ROWS * step), step);
                    } else {
                        tiles.load::<5>(a.add(ROWS * step), step);
                    }
                    tiles.dot_i8_u8::<2, 5, 6>();
                    tiles.dot_i8_u8::<3, 5, 7>();
                }
                next.prefetch::<S>();
                w = w.add(lines * LINE_BYTES);
                a = a.add(args.rows * step);
            }
            // All rows of the sums before are added by now.
            store_sums::<T, TWO>(tiles, block.scratch.cast());
            *pending = Pending { plan, group, row: 0 };
            group += 1;
        }
    }
}
