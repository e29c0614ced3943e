//! The order in which tiles multiply: a slab of a panel stays in the first-level cache while tiles of rows pass.
//!
//! ```text
//! for some tiles of rows
//!   for some panels
//!     for each block of K               the rows' part stays in the second-level cache
//!       for each panel
//!         for each slab of K            16 or 32 KiB of weights stay in the first-level cache
//!           for each tile               its products with the slab
//! ```
//! While a tile is multiplied, the sums of the one before are added and written by vectors, some rows a step:
//! tiles and vectors work side by side. What comes next is prefetched into the second-level cache: the next
//! slab, and, if K has several blocks, a part of the rows of the next.
//!
//! Vectors of few registers multiply many rows in the same order: a block of K is one slab, and sums are loaded and stored around it.
//! Other kernels of vectors take [all of K](Block::whole).

use std::ops::Range;

use super::panels::PANEL;
use super::tile::{Part, TileArgs};
use baton_cpu_simd::Simd;
use baton_cpu_simd::tiles::{ROW_BYTES, ROWS, Tiles};

/// Rows of the largest tile of rows: two tile registers.
pub(super) const TILE_ROWS: usize = 2 * ROWS;
/// Numbers of the sums of a tile of rows and a panel, `[rows][32]`.
pub(super) const SUMS: usize = TILE_ROWS * PANEL;
/// Bytes of a row of sums.
const SUM_BYTES: usize = PANEL * 4;
/// Numbers of K whose products are added before they are added to earlier ones. Two thirds of the first-level cache hold a
/// panel of as many bf16.
pub const SLAB: usize = 512;
/// The most tiles of rows that are multiplied with a panel, one after the other.
const MAX_TILES: usize = 32;

/// The sizes of the loops. What a core reads past its second-level cache, which is slow, depends on them: weights once for
/// `tiles` tiles of rows, and all of those rows once for `panels` panels if K has several blocks.
#[derive(Clone, Copy)]
pub(super) struct Order {
    /// Tiles of rows that are multiplied with a panel, one after the other, at most.
    tiles: usize,
    /// Numbers of K that are multiplied before the next panel: whole slabs.
    block: usize,
    /// Panels whose sums wait for the next block of K.
    panels: usize,
    /// Numbers of the sums of a tile of rows and a panel.
    sums: usize,
}

impl Order {
    /// Blocks of `block` numbers of K, of whose rows those of eight tiles stay in the second-level cache.
    pub(super) fn of_blocks(block: usize) -> Order {
        Order { tiles: 8, block, panels: 8, sums: SUMS }
    }

    /// The order for `num_tiles` tiles of bf16. If there are many, weights are read half as often, for more sums.
    pub(super) fn of_bf16(num_tiles: usize) -> Order {
        let few = Order::of_blocks(4 * SLAB);
        if num_tiles > few.tiles { Order { tiles: 16, block: SLAB, panels: 32, ..few } } else { few }
    }

    /// The order for tiles of at most `rows` rows that vectors multiply: a block of K is one slab.
    pub(super) fn of_vectors(block: usize, rows: usize) -> Order {
        Order { tiles: MAX_TILES, block, panels: 16, sums: rows * PANEL }
    }

    /// Numbers of a thread's memory for sums of `num_tiles` tiles and `k` columns.
    pub(super) fn num_sums(self, num_tiles: usize, k: usize) -> usize {
        num_tiles.min(self.tiles) * self.sums * self.panels_of(k)
    }

    fn panels_of(self, k: usize) -> usize {
        if k <= self.block { 1 } else { self.panels }
    }
}

/// A block of K of one panel, for some tiles of rows; or [all of it](Block::whole), of several panels.
pub(super) struct Block<'a> {
    pub(super) rows: &'a [TileArgs],
    /// The columns; the first is one of a slab.
    pub(super) first: usize,
    pub(super) end: usize,
    /// `[tiles]` sums that wait for the next block.
    pub(super) sums: *mut f32,
    /// Numbers of the sums of a tile.
    pub(super) tile_sums: usize,
    /// The kernel's memory.
    pub(super) scratch: *mut f32,
    /// The weights of the block that comes next, or null.
    pub(super) next: *const u8,
    /// The part of the next block's rows to prefetch: this one of so many.
    pub(super) part: (usize, usize),
}

impl<'a> Block<'a> {
    /// All of K, for one tile of rows and its panels.
    pub(super) fn whole(tile: &'a TileArgs) -> Block<'a> {
        Block {
            rows: std::slice::from_ref(tile),
            first: 0,
            end: tile.k,
            sums: std::ptr::null_mut(),
            tile_sums: 0,
            scratch: std::ptr::null_mut(),
            next: std::ptr::null(),
            part: (0, 1),
        }
    }

    /// The part of a tile that vectors multiply.
    pub(super) fn part_of(&self, tile: &TileArgs) -> Part {
        let sums = self.sums.wrapping_add(tile.idx * self.tile_sums);
        Part { first: self.first, end: self.end, sums }
    }

    /// The next block's weights, `num_bytes`, to prefetch in a step for each tile.
    pub(super) fn ahead(&self, num_bytes: usize) -> Ahead {
        Ahead::new(self.next, if self.next.is_null() { 0 } else { num_bytes }, (0, 1), self.rows.len())
    }
}

/// Multiplies tiles of rows with panels of `k` columns. `args` makes the arguments of a
/// tile and a panel; `next` gives the weights of a panel from a column on; `run` multiplies.
///
/// `scratch` has [`num_sums`](Order::num_sums) numbers and those of the kernel.
pub(super) fn for_each(
    (k, order): (usize, Order),
    tiles: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
    args: impl Fn(usize, usize) -> TileArgs,
    next: impl Fn(usize, usize) -> *const u8,
    mut run: impl FnMut(&Block<'_>),
) {
    let (block, group) = (order.block, order.panels_of(k));
    let kernel_scratch = scratch.wrapping_add(order.num_sums(tiles.len(), k));
    for first_tile in tiles.clone().step_by(order.tiles) {
        let num_tiles = (tiles.end - first_tile).min(order.tiles);
        // Of which the first ones are used.
        let mut rows = [args(first_tile, panels.start); MAX_TILES];
        for first_panel in panels.clone().step_by(group) {
            let end_panel = panels.end.min(first_panel + group);
            for first in (0..k).step_by(block) {
                for panel in first_panel..end_panel {
                    for (idx, row) in rows[..num_tiles].iter_mut().enumerate() {
                        *row = TileArgs { idx, ..args(first_tile + idx, panel) };
                    }
                    let next = match (panel + 1 < end_panel, first + block < k) {
                        (true, _) => next(panel + 1, first),
                        (false, true) => next(first_panel, first + block),
                        (false, false) => next(panel + 1, 0),
                    };
                    run(&Block {
                        rows: &rows[..num_tiles],
                        first,
                        end: k.min(first + block),
                        sums: scratch.wrapping_add((panel - first_panel) * num_tiles * order.sums),
                        tile_sums: order.sums,
                        scratch: kernel_scratch,
                        next,
                        part: (panel - first_panel, end_panel - first_panel),
                    });
                }
            }
        }
    }
}

/// Memory that a kernel prefetches into the second-level cache, evenly spread over its work: requests in bursts would
/// wait for each other, and loads for them.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    next: *const u8,
    /// Lines to prefetch in so many calls.
    lines: usize,
    calls: usize,
    /// The remainder that earlier calls left.
    rest: usize,
}

impl Ahead {
    /// Calls of [`prefetch`](Self::prefetch) in a step.
    pub(super) const CALLS: usize = 4;

    /// Part `idx` of `num` of `num_bytes`, in `num_steps` steps.
    #[inline(always)]
    pub(super) fn new(
        first: *const u8,
        num_bytes: usize,
        (idx, num): (usize, usize),
        num_steps: usize,
    ) -> Ahead {
        let lines = (num_bytes / 64).div_ceil(num);
        Ahead { next: first.wrapping_add(idx * lines * 64), lines, calls: num_steps * Ahead::CALLS, rest: 0 }
    }

    /// Prefetches the lines of a step.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    pub(super) unsafe fn prefetch_step<S: Simd>(&mut self) {
        for _ in 0..Ahead::CALLS {
            // SAFETY: guaranteed by the caller.
            unsafe { self.prefetch::<S>() };
        }
    }

    /// Prefetches the next lines.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    pub(super) unsafe fn prefetch<S: Simd>(&mut self) {
        self.rest += self.lines;
        while self.rest >= self.calls {
            self.rest -= self.calls;
            // SAFETY: a prefetched address need not be valid.
            unsafe { S::prefetch_for_later(self.next) };
            self.next = self.next.wrapping_add(64);
        }
    }
}

/// Sets the sums of a tile of rows to zero; `TWO` if it takes two registers.
///
/// # Safety
/// As for [`Tiles`].
#[inline(always)]
pub(super) unsafe fn zero_sums<T: Tiles, const TWO: bool>(tiles: &mut T) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        tiles.zero::<0>();
        tiles.zero::<1>();
        if TWO {
            tiles.zero::<2>();
            tiles.zero::<3>();
        }
    }
}

/// Stores the [sums](SUMS) of a tile of rows.
///
/// # Safety
/// As for [`Tiles`].
#[inline(always)]
pub(super) unsafe fn store_sums<T: Tiles, const TWO: bool>(tiles: &mut T, to: *mut u8) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        tiles.store::<0>(to, SUM_BYTES);
        tiles.store::<1>(to.add(ROW_BYTES), SUM_BYTES);
        if TWO {
            let to = to.add(ROWS * SUM_BYTES);
            tiles.store::<2>(to, SUM_BYTES);
            tiles.store::<3>(to.add(ROW_BYTES), SUM_BYTES);
        }
    }
}
