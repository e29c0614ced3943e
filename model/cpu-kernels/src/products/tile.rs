//! Arguments of a product kernel: a tile of rows, some panels, and the use of their sums.

use super::panels::PANEL;
use crate::rows::{GateFunction, gated};
use baton_cpu_simd::{LANES, Simd};

/// Bytes ahead at which weights that are read from memory are prefetched into the second-level cache, which waits for
/// more lines at a time than the first-level one.
pub(super) const FAR: usize = 32 << 10;

/// How the products are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// `C = A W^T + bias`
    Store,
    /// `C = C + (A W^T + bias)`
    Add,
    /// `C = gate(G) U`, where `G` is the first half of the rows of `A W^T + bias` and `U` the second. The weights are
    /// in [gated order](super::RowOrder::Gated).
    Gated(GateFunction),
}

/// Some panels for one tile of rows. Pointers are valid for the sizes beside them.
#[derive(Clone, Copy)]
pub(super) struct TileArgs {
    /// The index of the tile among those that are multiplied one after the other.
    pub(super) idx: usize,
    /// Packed as in [`left`](super::left).
    pub(super) a: *const u8,
    pub(super) rows: usize,
    /// Rows without padding.
    pub(super) real_rows: usize,
    /// Packed as in [`panels`](super::panels).
    pub(super) w: *const u8,
    pub(super) panel_bytes: usize,
    pub(super) k: usize,
    pub(super) panels: usize,
    /// Whether no other tile of the thread reads the panels, which come from memory then.
    pub(super) is_only: bool,
    /// Memory to prefetch into the second-level cache while the tile is computed. In the order of slabs kernels know it themselves.
    pub(super) ahead: (*const u8, usize),
    pub(super) bias: *const f32,
    pub(super) out: *mut f32,
    /// Columns of C.
    pub(super) out_stride: usize,
    /// Columns from the first of the panels to the end of C.
    pub(super) num_cols: usize,
    pub(super) output: Output,
    /// Whether C is larger than the second-level cache, so that it is written past the caches.
    pub(super) streams: bool,
}

/// The numbers of K that a kernel of vectors multiplies.
pub(super) struct Part {
    pub(super) first: usize,
    pub(super) end: usize,
    /// `[rows][32]`, where the sums of a part that is not the last one wait for the next.
    pub(super) sums: *mut f32,
}

impl Part {
    /// The address of the sums of half a row.
    #[inline(always)]
    pub(super) fn sums_of(&self, row: usize, half: usize) -> *mut f32 {
        self.sums.wrapping_add(row * PANEL + half * LANES)
    }
}

impl TileArgs {
    /// Applies the output to the sums of half a panel and writes them to the columns that exist. For a row and a
    /// panel the first half is finished first.
    ///
    /// # Safety
    /// Row and panel are inside the matrix.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(&self, row: usize, panel: usize, half: usize, mut sums: S::V) {
        let is_gated = matches!(self.output, Output::Gated(_));
        let col = if is_gated { panel * LANES } else { panel * PANEL + half * LANES };
        if col >= self.num_cols {
            return;
        }
        let num = self.num_cols - col;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let out = self.out.add(row * self.out_stride + col);
            if !self.bias.is_null() {
                // The second half's biases come after as many gate biases as C has columns.
                let bias = self.bias.add(if is_gated { col + half * self.out_stride } else { col });
                sums = S::add(sums, load_up_to::<S>(bias, num));
            }
            match self.output {
                Output::Add => sums = S::add(load_up_to::<S>(out, num), sums),
                // The gates are stored in C until the second half is finished.
                Output::Gated(gate) if half == 1 => {
                    sums = gated::<S>(gate, load_up_to::<S>(out, num), sums);
                }
                Output::Store | Output::Gated(_) => {}
            }
            if num >= LANES { S::store(out, sums) } else { S::store_part(out, sums, num) }
        }
    }

    /// Whether [`finish_whole`](Self::finish_whole) may be used: there is no bias, and all columns exist.
    #[inline(always)]
    fn is_whole(&self) -> bool {
        let cols = if matches!(self.output, Output::Gated(_)) { LANES } else { PANEL };
        self.bias.is_null() && self.num_cols >= cols
    }

    /// [`finish`](Self::finish) of both halves of a row of one panel.
    ///
    /// # Safety
    /// The row is inside the matrix.
    #[inline(always)]
    pub(super) unsafe fn finish_row<S: Simd>(&self, row: usize, sums: [S::V; 2]) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if self.is_whole() {
                self.finish_whole::<S>(row, sums);
            } else {
                self.finish::<S>(row, 0, 0, sums[0]);
                self.finish::<S>(row, 0, 1, sums[1]);
            }
        }
    }

    /// [`finish_row`](Self::finish_row) of a whole panel.
    ///
    /// # Safety
    /// The row is inside the matrix.
    #[inline(always)]
    unsafe fn finish_whole<S: Simd>(&self, row: usize, sums: [S::V; 2]) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let out = self.out.add(row * self.out_stride);
            match self.output {
                Output::Store => {
                    self.write::<S>(out, sums[0]);
                    self.write::<S>(out.add(LANES), sums[1]);
                }
                Output::Add => {
                    let [first, second] = [S::load(out), S::load(out.add(LANES))];
                    self.write::<S>(out, S::add(first, sums[0]));
                    self.write::<S>(out.add(LANES), S::add(second, sums[1]));
                }
                Output::Gated(gate) => self.write::<S>(out, gated::<S>(gate, sums[0], sums[1])),
            }
        }
    }

    #[inline(always)]
    unsafe fn write<S: Simd>(&self, out: *mut f32, sums: S::V) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if self.streams && (out as usize).is_multiple_of(64) {
                S::store_past_caches(out, sums);
            } else {
                S::store(out, sums);
            }
        }
    }
}

/// # Safety
/// As for [`Simd`], for `num` numbers.
#[inline(always)]
unsafe fn load_up_to<S: Simd>(p: *const f32, num: usize) -> S::V {
    // SAFETY: guaranteed by the caller.
    unsafe { if num >= LANES { S::load(p) } else { S::load_part(p, num) } }
}
