//! The memory layout of packed weights, and packing.
//!
//! ```text
//! panels of 32 outputs, one after the other; zeroes where N is no multiple
//! f32, f16     [K][32]
//! bf16         [K][32]       output i beside output i + 16
//! bf16 pairs   [K / 2][32][2]; zeroes up to a multiple of 32 of K
//! integers     [32] f32 scales of rows, then group by group of K
//!              [32] f16 scales, [32] f16 zeros if there are, levels [K / 4][32][4]
//!              or nibbles [K / 8][32][4]: of eight numbers the first four low, the others high
//! ```
//! The scales of an integer row are split into one f32 per row and one f16 per group. The f16 are exact if the file's
//! scales are f16.

use half::f16;

use baton_cpu_simd::{Bf16, F16, F32, LANES, Stored};
use baton_model_spec::{FloatDtype as Dtype, IntegerFormat, IntegerRow, IntegerWidth};

/// Outputs of a panel.
pub const PANEL: usize = 2 * LANES;
/// Bytes of a line of levels or nibbles of a panel.
pub(super) const LINE_BYTES: usize = 4 * PANEL;
/// Bytes of the row scales at the start of a panel of integers.
pub(super) const ROW_SCALE_BYTES: usize = 4 * PANEL;
/// Bytes of the scales, or of the zero points, of a group.
pub(super) const GROUP_SCALE_BYTES: usize = 2 * PANEL;

/// The format of panels; it selects the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PanelFormat {
    /// Floats, widened in registers and multiplied in f32.
    Floats(Dtype),
    /// Pairs of bf16, multiplied with activations rounded to bf16.
    Bf16Pairs,
    /// Integers, multiplied with activations quantised to eight bits group by group.
    Integers(IntegerFormat),
}

/// Columns of bf16 pairs are filled up to a multiple of this: the numbers of a row of a tile register.
pub(super) const PAIR_STEP: usize = 32;

impl PanelFormat {
    /// Bytes of a panel of `cols` columns.
    #[inline]
    pub fn panel_bytes(self, cols: usize) -> usize {
        match self {
            PanelFormat::Floats(dtype) => PANEL * cols * dtype.size_bytes(),
            PanelFormat::Bf16Pairs => PANEL * cols.next_multiple_of(PAIR_STEP) * 2,
            PanelFormat::Integers(format) => {
                ROW_SCALE_BYTES
                    + cols.div_ceil(format.group) * group_head_bytes(format)
                    + cols.div_ceil(per_line(format.width)) * LINE_BYTES
            }
        }
    }

    /// Bytes of a matrix.
    #[inline]
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(PANEL) * self.panel_bytes(cols)
    }
}

/// The order of a matrix's rows in panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowOrder {
    /// In the order of the matrix.
    Plain,
    /// Each panel has sixteen rows of the first half (gates) and the sixteen rows of the second half that they gate.
    Gated,
}

impl RowOrder {
    /// The row that is output `output` of panel `panel_idx`; `None` for padding.
    pub fn row(self, rows: usize, panel_idx: usize, output: usize) -> Option<usize> {
        match self {
            RowOrder::Plain => Some(panel_idx * PANEL + output).filter(|&row| row < rows),
            RowOrder::Gated => {
                let (size, at) = (rows / 2, panel_idx * LANES + output % LANES);
                (at < size).then_some(at + output / LANES * size)
            }
        }
    }
}

/// Numbers along K in a line.
pub(super) fn per_line(width: IntegerWidth) -> usize {
    32 / width.bits()
}

pub(super) fn group_head_bytes(format: IntegerFormat) -> usize {
    GROUP_SCALE_BYTES * if format.has_zeros { 2 } else { 1 }
}

/// A packed weight matrix `[rows][cols]`; one output per row.
#[derive(Clone, Copy, Debug)]
pub struct PanelsRef<'a> {
    pub(super) data: &'a [u8],
    pub(super) format: PanelFormat,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) order: RowOrder,
}

impl<'a> PanelsRef<'a> {
    /// The panels of a matrix of this shape.
    ///
    /// # Panics
    /// When `data` does not have the size of that shape.
    #[inline]
    pub fn new(data: &'a [u8], format: PanelFormat, rows: usize, cols: usize) -> PanelsRef<'a> {
        assert_eq!(data.len(), format.matrix_bytes(rows, cols), "panels of {rows} x {cols}");
        PanelsRef { data, format, rows, cols, order: RowOrder::Plain }
    }

    /// The same panels with another row order.
    #[inline]
    pub fn in_order(self, order: RowOrder) -> PanelsRef<'a> {
        PanelsRef { order, ..self }
    }

    /// Dequantises row `row_idx`, multiplies it by `scale` and writes it to `out`.
    pub fn read_row(&self, row_idx: usize, scale: f32, out: &mut [f32]) {
        assert!(row_idx < self.rows && out.len() == self.cols && self.order == RowOrder::Plain);
        let panel_bytes = self.format.panel_bytes(self.cols);
        let panel = &self.data[row_idx / PANEL * panel_bytes..][..panel_bytes];
        let output = row_idx % PANEL;
        match self.format {
            PanelFormat::Floats(Dtype::F32) => read_floats::<F32>(panel, output, scale, out),
            PanelFormat::Floats(Dtype::F16) => read_floats::<F16>(panel, output, scale, out),
            PanelFormat::Floats(Dtype::Bf16) => {
                read_floats::<Bf16>(panel, bf16_place(output), scale, out);
            }
            PanelFormat::Bf16Pairs => {
                for (k, out) in out.iter_mut().enumerate() {
                    let at = (k / 2 * PANEL + output) * 2 + k % 2;
                    // SAFETY: the element is inside the panel.
                    *out = unsafe { Bf16::load_one(panel[at * 2..][..2].as_ptr()) } * scale;
                }
            }
            PanelFormat::Integers(format) => read_integers(panel, format, output, scale, out),
        }
    }
}

fn read_floats<W: Stored>(panel: &[u8], at: usize, scale: f32, out: &mut [f32]) {
    for (out, line) in out.iter_mut().zip(panel.chunks_exact(PANEL * W::SIZE)) {
        // SAFETY: `at` is the index of an element of the line.
        *out = unsafe { W::load_one(line[at * W::SIZE..][..W::SIZE].as_ptr()) } * scale;
    }
}

fn read_integers(panel: &[u8], format: IntegerFormat, output: usize, scale: f32, out: &mut [f32]) {
    let (row_scales, mut rest) = panel.split_at(ROW_SCALE_BYTES);
    // SAFETY: there are as many scales as outputs.
    let row_scale = unsafe { F32::load_one(row_scales[output * 4..][..4].as_ptr()) } * scale;
    let per_line = per_line(format.width);
    for out in out.chunks_mut(format.group) {
        // SAFETY: as above.
        let f16_at = |at: usize| unsafe { F16::load_one(rest[at * 2..][..2].as_ptr()) };
        let group_scale = f16_at(output);
        let middle = f32::from(format.width.middle());
        let zero = if format.has_zeros { f16_at(PANEL + output) } else { middle };
        let lines = &rest[group_head_bytes(format)..];
        for (k, out) in out.iter_mut().enumerate() {
            let byte = lines[k / per_line * LINE_BYTES + output * 4 + k % 4];
            let level = match format.width {
                IntegerWidth::Eight => byte,
                IntegerWidth::Four => byte >> (k % per_line / 4 * 4) & 15,
            };
            *out = row_scale * (group_scale * (f32::from(level) - zero));
        }
        rest = &lines[out.len().div_ceil(per_line) * LINE_BYTES..];
    }
}

/// The place of an output in a line of bf16: output `i` is beside output `i + 16`, so that one shift and one mask
/// widen a line.
fn bf16_place(output: usize) -> usize {
    output % LANES * 2 + output / LANES
}

/// Packs [`PANEL`] rows of equal length, stored as `format` says, into the panel `to`.
///
/// # Panics
/// When the format is one of integers, or rows are missing.
pub fn pack_floats<R: AsRef<[u8]>>(rows: &[R], format: PanelFormat, to: &mut [u8]) {
    match format {
        PanelFormat::Floats(Dtype::F32) => pack_elements::<4, 1, R>(rows, |output| output, to),
        PanelFormat::Floats(Dtype::F16) => pack_elements::<2, 1, R>(rows, |output| output, to),
        PanelFormat::Floats(Dtype::Bf16) => pack_elements::<2, 1, R>(rows, bf16_place, to),
        PanelFormat::Bf16Pairs => pack_elements::<2, 2, R>(rows, |output| output, to),
        PanelFormat::Integers(_) => unreachable!("integers are packed from integers"),
    }
}

/// Packs elements of `SIZE` bytes; `RUN` elements of a row are adjacent.
fn pack_elements<const SIZE: usize, const RUN: usize, R: AsRef<[u8]>>(
    rows: &[R],
    place: fn(usize) -> usize,
    to: &mut [u8],
) {
    /// Lines written at a time: they stay in the cache while all rows pass.
    const LINES: usize = 64;
    assert_eq!(rows.len(), PANEL, "rows of a panel");
    let (elements, _) = to.as_chunks_mut::<SIZE>();
    let (runs, _) = elements.as_chunks_mut::<RUN>();
    for (block_idx, runs) in runs.chunks_mut(LINES * PANEL).enumerate() {
        for (output, row) in rows.iter().enumerate() {
            let to = runs.iter_mut().skip(place(output)).step_by(PANEL);
            let (row, _) = row.as_ref().as_chunks::<SIZE>();
            // The last run of a row may be short, and runs without numbers may follow.
            let row = row.get(block_idx * LINES * RUN..).unwrap_or_default().chunks(RUN);
            to.zip(row.chain(std::iter::repeat(&[][..]))).for_each(|(to, from)| {
                *to = [[0; SIZE]; RUN];
                to[..from.len()].copy_from_slice(from);
            });
        }
    }
}

/// Packs [`PANEL`] rows of `cols` numbers into the panel `to`.
pub fn pack_integers(rows: &[IntegerRow], format: IntegerFormat, cols: usize, to: &mut [u8]) {
    to.fill(0);
    let (row_scales, mut rest) = to.split_at_mut(ROW_SCALE_BYTES);
    let scales: Vec<f32> = rows.iter().map(|row| row_scale(&row.scales)).collect();
    for (to, scale) in row_scales.chunks_exact_mut(4).zip(&scales) {
        to.copy_from_slice(&scale.to_le_bytes());
    }
    let per_line = per_line(format.width);
    for (group_idx, first) in (0..cols).step_by(format.group).enumerate() {
        let len = format.group.min(cols - first);
        let (head, lines) = rest.split_at_mut(group_head_bytes(format));
        let (lines, after) = lines.split_at_mut(len.div_ceil(per_line) * LINE_BYTES);
        for (output, (row, row_scale)) in rows.iter().zip(&scales).enumerate() {
            let mut put = |at: usize, value: f32| {
                head[at * 2..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
            };
            put(output, row.scales[group_idx] / row_scale);
            if format.has_zeros {
                put(PANEL + output, row.zeros[group_idx]);
            }
            for (k, &level) in row.levels[first..first + len].iter().enumerate() {
                let byte = &mut lines[k / per_line * LINE_BYTES + output * 4 + k % 4];
                *byte |= match format.width {
                    IntegerWidth::Eight => level,
                    IntegerWidth::Four => level << (k % per_line / 4 * 4),
                };
            }
        }
        rest = after;
    }
}

/// The f32 part of a row's scales: the scale itself if there is only one; otherwise a power of two that puts the
/// largest group scale between 1 and 2, so that scales that were f16 stay exact.
fn row_scale(scales: &[f32]) -> f32 {
    let largest = scales.iter().fold(0.0f32, |max, scale| max.max(scale.abs()));
    if largest == 0.0 {
        1.0
    } else if scales.iter().all(|&scale| scale == scales[0]) {
        scales[0]
    } else {
        f32::from_bits(largest.to_bits() & 0x7f80_0000).max(f32::MIN_POSITIVE)
    }
}
