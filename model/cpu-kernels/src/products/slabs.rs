//! The order in which tiles multiply: some tiles of rows stay in the second-level cache while panels pass.
//!
//! ```text
//! for some tiles of rows                      1 MiB of rows with a slab's columns
//!   for some panels
//!     for each slab of K
//!       for each panel, for each tile         a panel's slab is read from memory once, then from the cache
//! ```
//! With one slab, rows are read once for all panels of an item. With several, the sums of some panels wait in memory
//! for the next slab.

use std::ops::Range;

use super::panels::PANEL;
use crate::tiles::ROWS;

/// Rows of the largest tile of rows: two tile registers.
pub(super) const TILE_ROWS: usize = 2 * ROWS;
/// Numbers of the sums of a tile of rows and a panel.
pub(super) const SUMS: usize = TILE_ROWS * PANEL;
/// Tiles of rows that stay in the cache.
pub(super) const BLOCK_TILES: usize = 8;
/// Panels whose sums wait for the next slab.
const GROUP_PANELS: usize = 8;

/// What a kernel computes of a panel at a time.
pub(super) struct Slab {
    /// The columns: whole steps of the kernel, or up to the last one.
    pub(super) first: usize,
    pub(super) end: usize,
    /// `[rows][32]` of each tile of rows, `sums_stride` numbers apart.
    pub(super) sums: *mut f32,
    pub(super) sums_stride: usize,
    /// The kernel's memory.
    pub(super) scratch: *mut f32,
}

/// Numbers of a thread's memory for sums, with `num_slabs`.
pub(super) fn num_sums(num_slabs: usize) -> usize {
    SUMS * if num_slabs == 1 { 1 } else { BLOCK_TILES * GROUP_PANELS }
}

/// Multiplies tiles of rows with panels of `k` columns, `slab` columns at a time. `run` multiplies some tiles with a
/// slab of a panel.
///
/// `scratch` has [`num_sums`] numbers and those of the kernel.
pub(super) fn for_each(
    (k, slab): (usize, usize),
    tiles: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
    mut run: impl FnMut(Range<usize>, usize, &Slab),
) {
    let num_slabs = k.div_ceil(slab);
    let (group, sums_stride) = if num_slabs == 1 { (panels.len(), 0) } else { (GROUP_PANELS, SUMS) };
    for first_tile in tiles.clone().step_by(BLOCK_TILES) {
        let block = first_tile..tiles.end.min(first_tile + BLOCK_TILES);
        for first_panel in panels.clone().step_by(group.max(1)) {
            for first in (0..k).step_by(slab) {
                for panel in first_panel..panels.end.min(first_panel + group) {
                    let slab = Slab {
                        first,
                        end: k.min(first + slab),
                        sums: scratch.wrapping_add((panel - first_panel) * BLOCK_TILES * sums_stride),
                        sums_stride,
                        scratch: scratch.wrapping_add(num_sums(num_slabs)),
                    };
                    run(block.clone(), panel, &slab);
                }
            }
        }
    }
}

/// The part of the next slab that tile `idx` of `num` prefetches. A single tile prefetches none: it reads slab after
/// slab.
pub(super) fn share(next: &[u8], idx: usize, num: usize) -> &[u8] {
    if num == 1 {
        return &[];
    }
    let share = next.len().div_ceil(num);
    &next[next.len().min(idx * share)..next.len().min((idx + 1) * share)]
}
