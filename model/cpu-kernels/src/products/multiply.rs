//! Runs a product: divides it into tiles of rows and groups of panels that threads take.

use super::left::{LeftKind, Tiles, pack_left};
use super::panels::{PANEL, PanelFormat, PanelsRef, RowOrder};
use super::tile::{Output, TileArgs};
use super::{floats, levels, pairs};
use crate::cpu::Cpu;
use crate::shared::SharedMut;
use crate::simd::{Isa, LANES};

/// Bytes of weights that stay in a core's second-level cache while all rows pass: a quarter of the usual 1 MiB,
/// because the next group and the rows need room, too.
const GROUP_BYTES: usize = 256 << 10;
/// Bytes of weights that a thread takes at a time, group by group.
const ITEM_BYTES: usize = 4 << 20;
/// Number of multiplications below which waking the helpers costs more than it gains.
const MIN_SHARED_WORK: usize = 128 * 1024;

/// Multiplies `num_rows` rows of `a` with the weights.
///
/// # Panics
/// When sizes do not match.
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
    if num_rows == 0 || n == 0 {
        return;
    }
    let num_threads = cpu.pool.num_threads();
    let shared = num_threads > 1 && num_rows * n * k >= MIN_SHARED_WORK;
    let isa = cpu.isa;
    let (kind, max_rows) = match weights.format {
        PanelFormat::Floats(_) => (LeftKind::Floats, floats::tile_rows(isa)),
        PanelFormat::Bf16Pairs => (LeftKind::Pairs, pairs::TILE_ROWS),
        PanelFormat::Integers(format) => (LeftKind::Levels(format), levels::tile_rows(isa, num_rows)),
    };
    let tiles = Tiles::new(num_rows, max_rows);
    // One row of floats is read in place.
    let in_place = num_rows == 1 && matches!(kind, LeftKind::Floats);
    if !in_place {
        pack_left(cpu, kind, &tiles, a, k, shared);
    }
    let Cpu { packed, pool, .. } = cpu;
    let left: *const u8 = if in_place { a.as_ptr().cast() } else { packed.as_ptr().cast() };
    let left = SharedMut(left.cast_mut());
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

    let out = SharedMut::new(out);
    let tiles = &tiles;
    let item = |_: usize, item_idx: usize| {
        let (panel_item, row_item) = (item_idx / num_row_items, item_idx % num_row_items);
        let item_end = num_panels.min((panel_item + 1) * item_panels);
        let tile_range = row_item * tiles_per_item..tiles.len().min((row_item + 1) * tiles_per_item);
        for first_panel in (panel_item * item_panels..item_end).step_by(group) {
            let panels = group.min(item_end - first_panel);
            let next = &weights.data[(first_panel + panels) * panel_bytes..item_end * panel_bytes];
            let next = &next[..next.len().min(group * panel_bytes)];
            for tile_idx in tile_range.clone() {
                let first_row = tiles.first_row(tile_idx);
                let tile = TileArgs {
                    // SAFETY: all tiles are packed.
                    a: unsafe { left.ptr().add(first_row * row_bytes) },
                    rows: tiles.rows_of(tile_idx),
                    real_rows: tiles.real_rows_of(tile_idx),
                    w: weights.data[first_panel * panel_bytes..][..panels * panel_bytes].as_ptr(),
                    panel_bytes,
                    k,
                    panels,
                    ahead: ahead(next, tile_idx - tile_range.start, tile_range.len()),
                    bias: bias.map_or(std::ptr::null(), |bias| bias[first_panel * panel_cols..].as_ptr()),
                    // SAFETY: rows and columns were checked above.
                    out: unsafe { out.ptr().add(first_row * num_cols + first_panel * panel_cols) },
                    out_stride: num_cols,
                    num_cols: num_cols - first_panel * panel_cols,
                    output,
                };
                // SAFETY: the sizes match; each item has its own elements of `out`.
                unsafe { run_tile(isa, weights.format, &tile) };
            }
        }
    };
    let num_items = num_panel_items * num_row_items;
    if shared { pool.for_each(num_items, item) } else { (0..num_items).for_each(|idx| item(0, idx)) }
}

/// The part of the next group's panels that a tile prefetches. The first tile prefetches none: it waits for its own
/// panels.
fn ahead(next: &[u8], tile_idx: usize, num_tiles: usize) -> &[u8] {
    if tile_idx == 0 {
        return &[];
    }
    let share = next.len().div_ceil(num_tiles - 1);
    &next[next.len().min((tile_idx - 1) * share)..next.len().min(tile_idx * share)]
}

unsafe fn run_tile(isa: Isa, format: PanelFormat, tile: &TileArgs) {
    // SAFETY: guaranteed by the caller; weights are packed in pairs only if the CPU multiplies them.
    unsafe {
        match format {
            PanelFormat::Floats(dtype) => floats::tile_kernel(isa, tile, dtype),
            PanelFormat::Bf16Pairs => pairs::tile_kernel(tile),
            PanelFormat::Integers(format) => levels::tile_kernel(isa, tile, format),
        }
    }
}

#[cfg(test)]
mod tests;
