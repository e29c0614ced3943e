//! Runs a product: divides it into tiles of rows and groups of panels that threads take.

use super::left::{LeftKind, Tiles, pack_left};
use super::panels::{PANEL, PanelFormat, PanelsRef, RowOrder};
use super::slabs::{Block, Order};
use super::tile::{Output, TileArgs};
use super::unpacked::Unpacked;
use super::{floats, level_tiles, levels, pair_tiles, pairs, slabs, widened};
use crate::cpu::Cpu;
use baton_cpu_simd::tiles::TileUse;
use baton_cpu_simd::{Isa, LANES};
use baton_cpu_threads::SharedMut;
use baton_model_spec::{FloatDtype as Dtype, IntegerFormat};

/// Bytes of weights that stay in a core's second-level cache while all rows pass: a quarter of the usual 1 MiB,
/// because the next group and the rows need room, too.
const GROUP_BYTES: usize = 256 << 10;
/// Bytes of weights that a thread takes at a time, group by group.
const ITEM_BYTES: usize = 4 << 20;
/// Outputs that are larger than this are not kept in the second-level cache by the time they are read.
const CACHE_BYTES: usize = 1 << 20;
/// Number of multiplications below which waking the helpers costs more than it gains.
const MIN_SHARED_WORK: usize = 128 * 1024;

/// Multiplies `num_rows` rows of `a` with the weights.
///
/// # Panics
/// When sizes do not match, or the weights are pairs of bf16 and there is [no kernel](super::has_pairs) for them.
pub fn multiply(
    cpu: &mut Cpu,
    num_rows: usize,
    a: &[f32],
    weights: PanelsRef<'_>,
    bias: Option<&[f32]>,
    out: &mut [f32],
    output: Output,
) {
    let (n, k) = (weights.rows, weights.cols);
    let is_gated = matches!(output, Output::Gated(_));
    assert_eq!(
        is_gated,
        weights.order == RowOrder::Gated,
        "the output and the weights disagree on the row order"
    );
    // Columns of C, and those of a panel.
    let (num_cols, panel_cols) = if is_gated { (n / 2, LANES) } else { (n, PANEL) };
    assert!(a.len() >= num_rows * k && out.len() >= num_rows * num_cols);
    assert!(bias.is_none_or(|bias| bias.len() == n));
    let isa = cpu.isa;
    assert!(
        weights.format != PanelFormat::Bf16Pairs || pairs::has_pairs(isa),
        "{} has no kernel that multiplies pairs of bf16",
        isa.name()
    );
    if num_rows == 0 || n == 0 {
        return;
    }
    let num_threads = cpu.pool.num_threads();
    let shared = num_threads > 1 && num_rows * n * k >= MIN_SHARED_WORK;
    let kernel = Kernel::of(isa, weights.format, num_rows);
    let kind = kernel.left();
    let tiles = Tiles::new(num_rows, kernel.tile_rows(isa, num_rows));
    // One row of floats is read in place.
    let in_place = num_rows == 1 && matches!(kind, LeftKind::Floats);
    if !in_place {
        pack_left(cpu, kind, &tiles, a, k, shared);
    }
    let Cpu { packed, pool, scratch, .. } = cpu;
    let left: *const u8 = if in_place { a.as_ptr().cast() } else { packed.as_ptr().cast() };
    let left = SharedMut::from_ptr(left.cast_mut());
    let row_bytes = kind.row_bytes(k);

    let num_panels = n.div_ceil(PANEL);
    let panel_bytes = weights.format.panel_bytes(k);
    // As many panels as stay in the cache, and a few such groups per item, so that the next group is prefetched while
    // one is computed. Fewer if threads would be idle.
    let fair = if shared { num_panels.div_ceil(4 * num_threads) } else { num_panels };
    let group = (GROUP_BYTES / panel_bytes.max(1)).min(fair).max(1);
    let group = if tiles.len() == 1 { group.next_multiple_of(floats::MAX_PANELS) } else { group };
    let item_panels = (ITEM_BYTES / panel_bytes.max(1)).min(fair).max(group);
    let num_panel_items = num_panels.div_ceil(item_panels);
    // If there are few panels, rows are divided as well.
    let wanted = if shared { (4 * num_threads).div_ceil(num_panel_items) } else { 1 };
    let tiles_per_item = tiles.len().div_ceil(wanted.min(tiles.len()));
    let num_row_items = tiles.len().div_ceil(tiles_per_item);

    let order = kernel.order(isa, tiles.len());
    // In the order of slabs, sums take the thread's memory.
    let unpacked = if order.is_none() { kernel.unpacked(isa, k, tiles_per_item) } else { None };
    // Unpacked panels take twice the room.
    let group = if unpacked.is_some() { group.div_ceil(2) } else { group };

    let streams = order.is_some() && num_rows * num_cols * 4 > CACHE_BYTES;
    let scratch_len =
        unpacked.map_or(kernel.scratch_len(isa, tiles.len(), k), |unpacked| group * unpacked.panel_bytes / 4);
    let scratch = scratch.reserve(if shared { num_threads } else { 1 }, scratch_len);
    let out = SharedMut::new(out);
    let tiles = &tiles;
    let item = |thread_idx: usize, item_idx: usize| {
        let (panel_item, row_item) = (item_idx / num_row_items, item_idx % num_row_items);
        let item_end = num_panels.min((panel_item + 1) * item_panels);
        let tile_range = row_item * tiles_per_item..tiles.len().min((row_item + 1) * tiles_per_item);
        let is_only = tile_range.len() == 1;
        let args = |tile_idx: usize, first_panel: usize, panels: usize, ahead: &[u8]| {
            let first_row = tiles.first_row(tile_idx);
            TileArgs {
                idx: 0,
                // SAFETY: all tiles are packed.
                a: unsafe { left.ptr().add(first_row * row_bytes) },
                rows: tiles.rows_of(tile_idx),
                real_rows: tiles.real_rows_of(tile_idx),
                w: weights.data[first_panel * panel_bytes..][..panels * panel_bytes].as_ptr(),
                panel_bytes,
                k,
                panels,
                is_only,
                ahead: (ahead.as_ptr(), ahead.len()),
                bias: bias.map_or(std::ptr::null(), |bias| bias[first_panel * panel_cols..].as_ptr()),
                // SAFETY: rows and columns were checked above.
                out: unsafe { out.ptr().add(first_row * num_cols + first_panel * panel_cols) },
                out_stride: num_cols,
                num_cols: num_cols - first_panel * panel_cols,
                output,
                streams,
            }
        };
        let shapes = &mut TileUse::new(isa);
        if let Some(order) = order {
            slabs::for_each(
                (k, order),
                tile_range,
                panel_item * item_panels..item_end,
                scratch.of(thread_idx),
                |tile_idx, panel| args(tile_idx, panel, 1, &[]),
                |panel, column| {
                    weights.data.as_ptr().wrapping_add(panel * panel_bytes + column * panel_bytes / k)
                },
                // SAFETY: `Cpu::on` has checked the instruction set. Sizes and format were checked; each item has its
                // own elements of `out`.
                |block| unsafe { kernel.run(isa, shapes, block) },
            );
            return;
        }
        for first_panel in (panel_item * item_panels..item_end).step_by(group) {
            let panels = group.min(item_end - first_panel);
            let next = &weights.data[(first_panel + panels) * panel_bytes..item_end * panel_bytes];
            let next = &next[..next.len().min(group * panel_bytes)];
            let to = scratch.of(thread_idx).cast::<u8>();
            if let Some(unpacked) = unpacked {
                let stored = &weights.data[first_panel * panel_bytes..][..panels * panel_bytes];
                // SAFETY: as above, and the thread's memory has room for a group.
                unsafe { unpacked.write(isa, stored, to) };
            }
            for tile_idx in tile_range.clone() {
                let ahead = ahead(next, tile_idx - tile_range.start, tile_range.len());
                let stored = args(tile_idx, first_panel, panels, ahead);
                let (kernel, tile) = match unpacked {
                    Some(Unpacked { format, panel_bytes, .. }) => {
                        (Kernel::Levels(format), TileArgs { w: to, panel_bytes, ..stored })
                    }
                    None => (kernel, stored),
                };
                // SAFETY: as above.
                unsafe { kernel.run(isa, shapes, &Block::whole(&tile)) };
            }
        }
    };
    let num_items = num_panel_items * num_row_items;
    if shared { pool.for_each(num_items, item) } else { (0..num_items).for_each(|idx| item(0, idx)) }
}

/// The part of the next group's panels that a tile prefetches.
fn ahead(next: &[u8], tile_idx: usize, num_tiles: usize) -> &[u8] {
    let share = next.len().div_ceil(num_tiles);
    &next[next.len().min(tile_idx * share)..next.len().min((tile_idx + 1) * share)]
}

/// The kernel of a product.
#[derive(Clone, Copy)]
enum Kernel {
    Floats(Dtype),
    Pairs,
    PairTiles,
    Widened(IntegerFormat),
    WidenedTiles(IntegerFormat),
    Levels(IntegerFormat),
    LevelTiles(IntegerFormat),
}

impl Kernel {
    /// The kernel for these weights and so many rows.
    fn of(isa: Isa, format: PanelFormat, num_rows: usize) -> Kernel {
        match format {
            PanelFormat::Floats(dtype) => Kernel::Floats(dtype),
            // Invariant 8: no other kernel adds in the order of tiles, so all rows are multiplied in tiles.
            PanelFormat::Bf16Pairs if isa.has_tiles() => Kernel::PairTiles,
            PanelFormat::Bf16Pairs => Kernel::Pairs,
            PanelFormat::Integers(format) if isa.has_tiles() && !level_tiles::multiplies(format) => {
                if num_rows <= widened::MAX_ROWS {
                    Kernel::Widened(format)
                } else {
                    Kernel::WidenedTiles(format)
                }
            }
            // Both kernels of integers have the same results.
            PanelFormat::Integers(format) if isa.has_tiles() && num_rows >= level_tiles::MIN_ROWS => {
                Kernel::LevelTiles(format)
            }
            PanelFormat::Integers(format) => Kernel::Levels(format),
        }
    }

    /// The packed format of activations.
    fn left(self) -> LeftKind {
        match self {
            Kernel::Floats(_) => LeftKind::Floats,
            Kernel::Widened(_) => LeftKind::RoundedFloats,
            Kernel::Pairs => LeftKind::Pairs,
            Kernel::PairTiles | Kernel::WidenedTiles(_) => LeftKind::PairTiles,
            Kernel::Levels(format) => LeftKind::Levels(format),
            Kernel::LevelTiles(format) => LeftKind::LevelTiles(format),
        }
    }

    /// The panels that so many tiles of rows multiply, if they are unpacked first.
    fn unpacked(self, isa: Isa, k: usize, num_tiles: usize) -> Option<Unpacked> {
        match self {
            Kernel::Levels(format) => Unpacked::if_faster(isa, format, k, num_tiles),
            _ => None,
        }
    }

    /// Rows of the largest tile for `num_rows` rows.
    fn tile_rows(self, isa: Isa, num_rows: usize) -> usize {
        match self {
            Kernel::Floats(_) => floats::tile_rows(isa),
            Kernel::Pairs => pairs::TILE_ROWS,
            Kernel::Widened(_) => widened::MAX_ROWS,
            Kernel::PairTiles | Kernel::WidenedTiles(_) | Kernel::LevelTiles(_) => slabs::TILE_ROWS,
            Kernel::Levels(_) => levels::tile_rows(isa, num_rows),
        }
    }

    /// The order of slabs for `num_tiles` tiles of rows, if the kernel multiplies in it.
    fn order(self, isa: Isa, num_tiles: usize) -> Option<Order> {
        match self {
            Kernel::Floats(_) => floats::order(isa, num_tiles),
            Kernel::PairTiles | Kernel::WidenedTiles(_) => Some(Order::of_bf16(num_tiles)),
            Kernel::LevelTiles(format) => Some(Order::of_blocks(level_tiles::block(format))),
            Kernel::Levels(format) => levels::order(isa, format, num_tiles),
            Kernel::Pairs | Kernel::Widened(_) => None,
        }
    }

    /// Numbers of a thread's memory for `num_tiles` tiles of rows of `k` columns.
    fn scratch_len(self, isa: Isa, num_tiles: usize, k: usize) -> usize {
        let sums = self.order(isa, num_tiles).map_or(0, |order| order.num_sums(num_tiles, k));
        match self {
            Kernel::PairTiles | Kernel::WidenedTiles(_) => sums + pair_tiles::SCRATCH,
            Kernel::LevelTiles(_) => sums + level_tiles::SCRATCH,
            Kernel::Floats(_) | Kernel::Pairs | Kernel::Widened(_) | Kernel::Levels(_) => sums,
        }
    }

    /// # Safety
    /// As for [`TileArgs`]; a block has memory of the size that [`scratch_len`](Self::scratch_len) says. Weights are packed
    /// in pairs only if the CPU multiplies them.
    unsafe fn run(self, isa: Isa, shapes: &mut TileUse, block: &Block<'_>) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                Kernel::Floats(dtype) => floats::kernel(isa, block, dtype),
                Kernel::Levels(format) => levels::kernel(isa, block, format),
                Kernel::Pairs => block.rows.iter().for_each(|tile| pairs::tile_kernel(tile)),
                Kernel::Widened(format) => {
                    block.rows.iter().for_each(|tile| widened::tile_kernel(isa, tile, format));
                }
                Kernel::PairTiles => pair_tiles::kernel(isa, shapes, block),
                Kernel::WidenedTiles(format) => pair_tiles::integers_kernel(isa, shapes, block, format),
                Kernel::LevelTiles(format) => level_tiles::kernel(isa, shapes, block, format),
            }
        }
    }
}
