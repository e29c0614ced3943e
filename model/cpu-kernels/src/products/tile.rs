//! What a kernel of products is given: a tile of rows and some panels, and what becomes of their sums.

use super::panels::PANEL;
use crate::rows::{Gate, gated};
use crate::simd::{LANES, Simd};

/// What becomes of the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// `C = A W^T + bias`
    Store,
    /// `C = C + (A W^T + bias)`
    Add,
    /// `C = gate(G) U`, where `G` is the first half of the rows of `A W^T + bias` and `U` the second. The weights are in
    /// the [order](super::RowOrder::Gated) for it.
    Gated(Gate),
}

/// Some panels for one tile of rows. The pointers are valid for the sizes beside them.
pub(super) struct TileArgs<'a> {
    /// As [`left`](super::left) packs it.
    pub(super) a: *const u8,
    pub(super) rows: usize,
    /// Those that are not padding.
    pub(super) real_rows: usize,
    /// As [`panels`](super::panels) packs them.
    pub(super) w: *const u8,
    pub(super) panel_bytes: usize,
    pub(super) k: usize,
    pub(super) panels: usize,
    /// Memory that is wanted in the second cache when the tile is done.
    pub(super) ahead: &'a [u8],
    pub(super) bias: *const f32,
    pub(super) out: *mut f32,
    /// Columns of C.
    pub(super) out_stride: usize,
    /// From the first of the panels to the end of C.
    pub(super) num_cols: usize,
    pub(super) output: Output,
}

impl TileArgs<'_> {
    /// Makes of the sums of half a panel what is asked for, and writes it where the matrix has such columns. Of a row
    /// and a panel the first half comes first.
    ///
    /// # Safety
    /// Row and panel lie in the matrix.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(&self, row: usize, panel: usize, half: usize, mut sums: S::V) {
        let is_gated = matches!(self.output, Output::Gated(_));
        let col = if is_gated { panel * LANES } else { panel * PANEL + half * LANES };
        if col >= self.num_cols {
            return;
        }
        let num = self.num_cols - col;
        // SAFETY: passed on to the caller.
        unsafe {
            let out = self.out.add(row * self.out_stride + col);
            if !self.bias.is_null() {
                // As many gates as columns come before the biases of the other half.
                let bias = self.bias.add(if is_gated { col + half * self.out_stride } else { col });
                sums = S::add(sums, load_up_to::<S>(bias, num));
            }
            match self.output {
                Output::Add => sums = S::add(load_up_to::<S>(out, num), sums),
                // Where the result will be, the gates wait for the other half.
                Output::Gated(gate) if half == 1 => {
                    sums = gated::<S>(gate, load_up_to::<S>(out, num), sums);
                }
                Output::Store | Output::Gated(_) => {}
            }
            if num >= LANES { S::store(out, sums) } else { S::store_part(out, sums, num) }
        }
    }
}

/// # Safety
/// As [`Simd`], for `num` numbers.
#[inline(always)]
unsafe fn load_up_to<S: Simd>(p: *const f32, num: usize) -> S::V {
    // SAFETY: passed on to the caller.
    unsafe { if num >= LANES { S::load(p) } else { S::load_part(p, num) } }
}
