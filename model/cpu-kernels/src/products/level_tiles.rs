//! Products of integers in tiles, with the same bits as [`levels`](super::levels).
//!
//! Tiles multiply signed bytes, so a panel's levels or nibbles are first widened to bytes, less the middle level if
//! there are no zero points. The first tile of rows widens each group of a panel as it comes to it, while the group
//! is in the first-level cache; other rows find it in the second-level cache. Sums of a group are exact. They are
//! stored, converted and added as [`levels`](super::levels) says, while the tiles compute the next groups.
#![cfg_attr(not(any(test, target_arch = "x86_64")), allow(dead_code))] // only x86-64 has tiles

use std::ops::Range;

use super::panels::{GROUP_SCALE_BYTES, LINE_BYTES, PANEL, ROW_SCALE_BYTES, per_line};
use super::slabs::{SUMS, Slab};
use super::tile::TileArgs;
use crate::tiles::{ROW_BYTES, ROWS, TILE_BYTES, TileUse, Tiles, tile_kernel};
use baton_cpu_simd::{LANES, Simd};
use baton_model_spec::{IntegerFormat, IntegerWidth};

/// From this number of rows on, tiles are faster than vectors.
pub(super) const MIN_ROWS: usize = 8;
/// Prefetch distance in bytes.
const PREFETCH: usize = 4096;

/// Numbers of K in a tile.
pub(super) fn step(format: IntegerFormat) -> usize {
    if format.group.is_multiple_of(ROW_BYTES) { ROW_BYTES } else { ROW_BYTES / 2 }
}

/// Numbers of K, with those that fill the last tile.
pub(super) fn padded(format: IntegerFormat, k: usize) -> usize {
    let last = k % format.group;
    k - last + last.next_multiple_of(step(format))
}

/// Numbers of K that are multiplied at a time: whole activation groups.
pub(super) fn slab(format: IntegerFormat) -> usize {
    4096 / format.activation_group() * format.activation_group()
}

/// Numbers of a thread's memory: the sums of an activation group and of a group, and a widened slab of a panel.
pub(super) fn scratch_len(format: IntegerFormat) -> usize {
    2 * SUMS + padded(format, slab(format)) * PANEL / 4
}

tile_kernel! {
    /// Multiplies tiles of rows with a slab of one panel.
    ///
    /// # Safety
    /// As for [`TileArgs`].
    pub(super) fn kernel / product (shapes: &mut TileUse, rows: &[TileArgs], slab: &Slab, format: IntegerFormat)
}

#[inline(always)]
unsafe fn product<S: Simd, T: Tiles>(
    tiles: &mut T,
    shapes: &mut TileUse,
    rows: &[TileArgs],
    slab: &Slab,
    format: IntegerFormat,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (format.width, format.has_zeros) {
            (IntegerWidth::Eight, false) => all_rows::<S, T, false, false>(tiles, shapes, rows, slab, format),
            (IntegerWidth::Eight, true) => all_rows::<S, T, false, true>(tiles, shapes, rows, slab, format),
            (IntegerWidth::Four, false) => all_rows::<S, T, true, false>(tiles, shapes, rows, slab, format),
            (IntegerWidth::Four, true) => all_rows::<S, T, true, true>(tiles, shapes, rows, slab, format),
        }
    }
}

#[inline(always)]
unsafe fn all_rows<S: Simd, T: Tiles, const NIBBLES: bool, const ZEROS: bool>(
    tiles: &mut T,
    shapes: &mut TileUse,
    rows: &[TileArgs],
    slab: &Slab,
    format: IntegerFormat,
) {
    for (idx, args) in rows.iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            shapes.set(tiles, args.rows, step(format));
            let plan = Plan::new(args, slab, format, (idx, rows.len()));
            if args.rows <= ROWS {
                groups::<S, T, NIBBLES, ZEROS, false>(tiles, &plan);
            } else {
                groups::<S, T, NIBBLES, ZEROS, true>(tiles, &plan);
            }
        }
    }
}

/// A tile of rows, a panel, and the addresses of their parts.
struct Plan<'a> {
    args: &'a TileArgs<'a>,
    format: IntegerFormat,
    step: usize,
    /// Groups of the slab, and of the matrix.
    groups: Range<usize>,
    num_groups: usize,
    /// Groups of an activation group.
    shared: usize,
    /// Bytes of a group in a packed panel: scales and lines.
    group_bytes: usize,
    /// The index of the tile of rows among those that meet the panel, and their number.
    tile: (usize, usize),
    /// `[activation groups][rows]`, then `[groups][rows]`
    scales: *const f32,
    sums_of_rows: *const f32,
    /// As four tiles: the sums of the product, of an activation group, and of a group.
    sums: *mut f32,
    shared_sums: *mut f32,
    group_sums: *mut i32,
    widened: *mut u8,
}

impl<'a> Plan<'a> {
    #[inline(always)]
    unsafe fn new(
        args: &'a TileArgs<'a>,
        slab: &Slab,
        format: IntegerFormat,
        tile: (usize, usize),
    ) -> Plan<'a> {
        let padded = padded(format, args.k);
        let shared = format.activation_group() / format.group;
        let num_groups = args.k.div_ceil(format.group);
        let head = GROUP_SCALE_BYTES * if format.has_zeros { 2 } else { 1 };
        // SAFETY: memory is divided as `scratch_len` and `left` say.
        unsafe {
            let scales = args.a.add(args.rows * padded).cast::<f32>();
            Plan {
                args,
                format,
                step: step(format),
                groups: slab.first / format.group..slab.end.div_ceil(format.group),
                num_groups,
                shared,
                group_bytes: head + format.group / per_line(format.width) * LINE_BYTES,
                tile,
                scales,
                sums_of_rows: scales.add(num_groups.div_ceil(shared) * args.rows),
                sums: slab.sums.add(tile.0 * slab.sums_stride),
                shared_sums: slab.scratch,
                group_sums: slab.scratch.add(SUMS).cast(),
                widened: slab.scratch.add(2 * SUMS).cast(),
            }
        }
    }
}

#[inline(always)]
unsafe fn groups<S: Simd, T: Tiles, const NIBBLES: bool, const ZEROS: bool, const TWO: bool>(
    tiles: &mut T,
    plan: &Plan<'_>,
) {
    let (args, groups) = (plan.args, &plan.groups);
    let ahead_lines = args.ahead.len().div_ceil(64 * (groups.end - groups.start));
    let mut ahead = args.ahead.as_ptr();
    // SAFETY: guaranteed by the caller; a prefetched address need not be valid.
    unsafe {
        if groups.start == 0 {
            std::slice::from_raw_parts_mut(plan.sums, SUMS).fill(0.0);
        }
        if groups.end == plan.num_groups {
            args.prefetch_output::<S>();
        }
        for group in groups.start..groups.end {
            for _ in 0..ahead_lines {
                S::prefetch_for_later(ahead);
                ahead = ahead.wrapping_add(64);
            }
            multiply_group::<S, T, NIBBLES, ZEROS, TWO>(tiles, plan, group);
            // While the tiles compute, the sums of the group before are added. They are read before the new ones are
            // stored, because a load waits for earlier stores with the same lower twelve bits of the address.
            if group > groups.start {
                add_group::<S, ZEROS, TWO>(plan, group - 1);
            }
            let to = plan.group_sums.cast::<u8>();
            tiles.store::<0>(to, ROW_BYTES);
            tiles.store::<1>(to.add(TILE_BYTES), ROW_BYTES);
            if TWO {
                tiles.store::<2>(to.add(2 * TILE_BYTES), ROW_BYTES);
                tiles.store::<3>(to.add(3 * TILE_BYTES), ROW_BYTES);
            }
        }
        add_group::<S, ZEROS, TWO>(plan, groups.end - 1);
        if groups.end == plan.num_groups {
            finish::<S>(args, plan.sums);
        }
    }
}

/// Multiplies a group of the panel with all rows.
#[inline(always)]
unsafe fn multiply_group<S: Simd, T: Tiles, const NIBBLES: bool, const ZEROS: bool, const TWO: bool>(
    tiles: &mut T,
    plan: &Plan<'_>,
    group: usize,
) {
    let (args, format, step) = (plan.args, plan.format, plan.step);
    let left = args.k - group * format.group;
    let len = if left < format.group { left } else { format.group };
    // SAFETY: the group is one of the matrix.
    unsafe {
        let mut w = plan.widened;
        // A single tile of rows widens each group to the same place, which stays in the first-level cache.
        if plan.tile.1 > 1 {
            w = w.add((group - plan.groups.start) * format.group * PANEL);
        }
        if plan.tile.0 == 0 {
            widen::<S, NIBBLES, ZEROS>(plan, group, len, w);
        }
        let mut a = args.a.add(group * format.group * args.rows);
        tiles.zero::<0>();
        tiles.zero::<1>();
        if TWO {
            tiles.zero::<2>();
            tiles.zero::<3>();
        }
        for _ in 0..len.div_ceil(step) {
            tiles.load::<4>(a, step);
            tiles.load::<6>(w, ROW_BYTES);
            dot::<T, ZEROS, 0, 4, 6>(tiles);
            tiles.load::<7>(w.add(step * LANES), ROW_BYTES);
            dot::<T, ZEROS, 1, 4, 7>(tiles);
            if TWO {
                tiles.load::<5>(a.add(ROWS * step), step);
                dot::<T, ZEROS, 2, 5, 6>(tiles);
                dot::<T, ZEROS, 3, 5, 7>(tiles);
            }
            w = w.add(step * PANEL);
            a = a.add(args.rows * step);
        }
    }
}

#[inline(always)]
unsafe fn dot<T: Tiles, const ZEROS: bool, const C: u8, const A: u8, const B: u8>(tiles: &mut T) {
    // SAFETY: guaranteed by the caller.
    unsafe { if ZEROS { tiles.dot_i8_u8::<C, A, B>() } else { tiles.dot_i8::<C, A, B>() } }
}

/// Widens a group to tiles: `[steps][2][step / 4][16][4]` bytes.
#[inline(always)]
unsafe fn widen<S: Simd, const NIBBLES: bool, const ZEROS: bool>(
    plan: &Plan<'_>,
    group: usize,
    len: usize,
    to: *mut u8,
) {
    let (args, format) = (plan.args, plan.format);
    let num_lines = plan.step / 4;
    // SAFETY: the group has these lines, and the memory has room for whole steps.
    unsafe {
        let packed = args.w.add(ROW_SCALE_BYTES + group * plan.group_bytes);
        let mut from = packed.add(GROUP_SCALE_BYTES * if format.has_zeros { 2 } else { 1 });
        let lines = len.div_ceil(4);
        let mut line = 0;
        while line < lines {
            S::prefetch(from.wrapping_add(PREFETCH));
            S::prefetch(from.wrapping_add(PREFETCH + 64));
            for half in 0..2 {
                let from = from.add(half * ROW_BYTES);
                let to = to.add(((line / num_lines * 2 + half) * num_lines + line % num_lines) * ROW_BYTES);
                // Whole lines by value, so that the compiler vectorises them.
                let bytes = from.cast::<[u8; ROW_BYTES]>().read();
                let to = to.cast::<[u8; ROW_BYTES]>();
                let mut low = bytes;
                if NIBBLES {
                    let middle = if ZEROS { 0 } else { IntegerWidth::Four.middle() };
                    let mut high = bytes;
                    for i in 0..ROW_BYTES {
                        low[i] = (bytes[i] & 15).wrapping_sub(middle);
                        high[i] = (bytes[i] >> 4).wrapping_sub(middle);
                    }
                    to.add(1).write(high);
                } else if !ZEROS {
                    for i in 0..ROW_BYTES {
                        low[i] = bytes[i] ^ IntegerWidth::Eight.middle();
                    }
                }
                to.write(low);
            }
            line += if NIBBLES { 2 } else { 1 };
            from = from.add(LINE_BYTES);
        }
    }
}

/// Adds the sums of a group to those of its activation group, and those to the sums of the product.
#[inline(always)]
unsafe fn add_group<S: Simd, const ZEROS: bool, const TWO: bool>(plan: &Plan<'_>, group: usize) {
    let is_first = group.is_multiple_of(plan.shared);
    let is_last = (group + 1).is_multiple_of(plan.shared) || group + 1 == plan.num_groups;
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (is_first, is_last) {
            (true, true) => add_quarters::<S, ZEROS, TWO, true, true>(plan, group),
            (true, false) => add_quarters::<S, ZEROS, TWO, true, false>(plan, group),
            (false, true) => add_quarters::<S, ZEROS, TWO, false, true>(plan, group),
            (false, false) => add_quarters::<S, ZEROS, TWO, false, false>(plan, group),
        }
    }
}

#[inline(always)]
unsafe fn add_quarters<
    S: Simd,
    const ZEROS: bool,
    const TWO: bool,
    const IS_FIRST: bool,
    const IS_LAST: bool,
>(
    plan: &Plan<'_>,
    group: usize,
) {
    let args = plan.args;
    // SAFETY: groups, rows and outputs are in range.
    unsafe {
        let head = args.w.add(ROW_SCALE_BYTES + group * plan.group_bytes).cast::<u16>();
        let scales = plan.scales.add(group / plan.shared * args.rows);
        let sums_of_rows = plan.sums_of_rows.add(group * args.rows);
        for quarter in 0..if TWO { 4 } else { 2 } {
            let (half, first_row) = (quarter % 2, quarter / 2 * ROWS);
            let end = if args.rows - first_row < ROWS { args.rows } else { first_row + ROWS };
            let weight_scale = S::load_f16(head.add(half * LANES));
            let zero = if ZEROS { S::load_f16(head.add(PANEL + half * LANES)) } else { S::splat(0.0) };
            let mut at = quarter * ROWS * LANES;
            for row in first_row..end {
                let mut sum = S::load_i32(plan.group_sums.add(at));
                if ZEROS {
                    sum = S::fma(zero, S::splat(-*sums_of_rows.add(row)), sum);
                }
                let shared = if IS_FIRST { S::splat(0.0) } else { S::load(plan.shared_sums.add(at)) };
                let shared = S::fma(sum, weight_scale, shared);
                if IS_LAST {
                    let total = plan.sums.add(at);
                    S::store(total, S::fma(shared, S::splat(*scales.add(row)), S::load(total)));
                } else {
                    S::store(plan.shared_sums.add(at), shared);
                }
                at += LANES;
            }
        }
    }
}

/// Writes the sums.
#[inline(always)]
unsafe fn finish<S: Simd>(args: &TileArgs, sums: *const f32) {
    // SAFETY: rows and outputs are in range.
    unsafe {
        let scales = args.w.cast::<f32>();
        for row in 0..args.real_rows {
            for half in 0..2 {
                let at = (row / ROWS * 2 + half) * ROWS * LANES + row % ROWS * LANES;
                let sum = S::mul(S::load(sums.add(at)), S::load(scales.add(half * LANES)));
                args.finish::<S>(row, 0, half, sum);
            }
        }
    }
}
