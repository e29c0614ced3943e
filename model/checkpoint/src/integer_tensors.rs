//! Matrices of small integers whose levels, scales and zero points are separate tensors of safetensors files.
//!
//! It knows where each number is stored. [`quantised`](crate::quantised) knows which tensors those are.

use std::ops::Range;

use baton_kv_cache::e4m3;
use baton_model_spec::{FloatDtype, IntegerFormat, IntegerRow, IntegerWidth};

use crate::file::Span;

/// Number `k` of row `r` is `scale(r, g) * (level(r, k) - zero(r, g))`, where `g` is the group of `k`.
#[derive(Clone, Debug)]
pub(crate) struct IntegerTensors {
    pub(crate) width: IntegerWidth,
    pub(crate) cols: usize,
    pub(crate) levels: Field,
    pub(crate) scales: Table,
    /// `None` if every zero point is the middle level.
    pub(crate) zeros: Option<Zeros>,
    pub(crate) groups: Groups,
    pub(crate) num_groups: usize,
}

/// Which numbers of a row share a scale.
#[derive(Clone, Debug)]
pub(crate) enum Groups {
    /// Groups of this many consecutive numbers.
    InOrder(usize),
    /// The group of each number, as a list of 32-bit indices: GPTQ with activation order sorts columns before
    /// grouping.
    Listed(Span),
}

#[derive(Clone, Debug)]
pub(crate) struct Zeros {
    pub(crate) levels: Field,
    /// Added to stored zero points.
    pub(crate) offset: i16,
}

/// Integers of four or eight bits, packed into words of 32 bits.
///
/// The integer at row `r` and column `c` is in word `(r >> row_shift) * row_stride + (c >> col_shift) * col_stride`,
/// in the slot of `r` or `c` among the integers of that word. One of the two shifts is 0.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub(crate) span: Span,
    pub(crate) bits: usize,
    pub(crate) word_bytes: usize,
    pub(crate) row_shift: u32,
    pub(crate) row_stride: usize,
    pub(crate) col_shift: u32,
    pub(crate) col_stride: usize,
    /// The position of each of a word's integers, counted from its low end.
    pub(crate) slots: [u8; 8],
    /// Whether integers are signed: then a level is the integer plus 128.
    pub(crate) is_signed: bool,
}

/// Consecutive integers, the first at the low end.
pub(crate) const SLOTS_IN_ORDER: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

impl Field {
    fn get(&self, row_idx: usize, col_idx: usize) -> u8 {
        let word =
            (row_idx >> self.row_shift) * self.row_stride + (col_idx >> self.col_shift) * self.col_stride;
        let below = |idx: usize, shift: u32| idx & ((1 << shift) - 1);
        let slot = below(row_idx, self.row_shift) + below(col_idx, self.col_shift);
        let bit = usize::from(self.slots[slot]) * self.bits;
        let byte = self.span[word * self.word_bytes + bit / 8];
        let level = byte >> (bit % 8) & (((1u16 << self.bits) - 1) as u8);
        if self.is_signed { level ^ 0x80 } else { level }
    }
}

/// Floats by row and group of columns.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) span: Span,
    pub(crate) dtype: FloatDtype,
    pub(crate) rows_per_row: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl Table {
    pub(crate) fn get(&self, row_idx: usize, col_idx: usize) -> f32 {
        let idx = row_idx / self.rows_per_row * self.row_stride + col_idx * self.col_stride;
        self.dtype.widen(&self.span[idx * self.dtype.size_bytes()..])
    }
}

impl IntegerTensors {
    /// Dequantises a row from column `first_col` on.
    pub(crate) fn read_row(&self, row_idx: usize, first_col: usize, to: &mut [f32]) {
        let level = |k: usize| f32::from(self.levels.get(row_idx, k));
        match &self.groups {
            Groups::InOrder(size) => {
                let (mut k, mut rest) = (first_col, to);
                while !rest.is_empty() {
                    let group = k / size;
                    let (scale, zero) = (self.scales.get(row_idx, group), self.zero(row_idx, group));
                    let (of_group, later) = rest.split_at_mut(rest.len().min((group + 1) * size - k));
                    for to in of_group {
                        *to = scale * (level(k) - zero);
                        k += 1;
                    }
                    rest = later;
                }
            }
            Groups::Listed(list) => {
                for (k, to) in (first_col..).zip(to) {
                    let group = listed_group(list, k);
                    *to = self.scales.get(row_idx, group) * (level(k) - self.zero(row_idx, group));
                }
            }
        }
    }

    /// Drops zero points that are all the middle level: symmetric methods write them, too.
    pub(crate) fn without_needless_zeros(mut self, rows: usize) -> IntegerTensors {
        let middle = f32::from(self.width.middle());
        let num_groups = self.num_groups;
        let are_middle =
            (0..rows).all(|row_idx| (0..num_groups).all(|group| self.zero(row_idx, group) == middle));
        if are_middle {
            self.zeros = None;
        }
        self
    }

    fn zero(&self, row_idx: usize, group: usize) -> f32 {
        match &self.zeros {
            None => f32::from(self.width.middle()),
            Some(zeros) => f32::from(i16::from(zeros.levels.get(row_idx, group)) + zeros.offset),
        }
    }

    /// The integer format. `None` if kernels do not support the group size, or the groups are listed: then rows are
    /// [read](Self::read_row) as numbers and quantised again if needed.
    pub(crate) fn format(&self) -> Option<IntegerFormat> {
        let group = match self.groups {
            Groups::InOrder(_) if self.scales_whole_rows() => IntegerFormat::GROUP_OF_ROW,
            Groups::InOrder(size) if size.is_multiple_of(32) => size,
            _ => return None,
        };
        Some(IntegerFormat { width: self.width, group, has_zeros: self.zeros.is_some() })
    }

    /// Whether each row has one scale: then columns may be cut anywhere.
    pub(crate) fn scales_whole_rows(&self) -> bool {
        matches!(self.groups, Groups::InOrder(size) if size >= self.cols)
    }

    /// The integers of a row in these columns, in groups of `group` numbers: the groups of the format, or equal parts
    /// of them.
    ///
    /// # Panics
    /// When [`format`](Self::format) is `None`.
    pub(crate) fn row(&self, row_idx: usize, cols: Range<usize>, group: usize) -> IntegerRow {
        assert!(self.format().is_some(), "the row has an integer format");
        let starts = cols.clone().step_by(group);
        let groups: Vec<usize> = match self.groups {
            Groups::InOrder(size) => starts.map(|k| k / size).collect(),
            Groups::Listed(_) => unreachable!("sorted groups have no format"),
        };
        IntegerRow {
            levels: cols.map(|k| self.levels.get(row_idx, k)).collect(),
            scales: groups.iter().map(|group| self.scales.get(row_idx, *group)).collect(),
            zeros: match self.zeros {
                None => vec![],
                Some(_) => groups.iter().map(|group| self.zero(row_idx, *group)).collect(),
            },
        }
    }
}

/// Entry `k` of a list of groups.
pub(crate) fn listed_group(list: &Span, k: usize) -> usize {
    let word: [u8; 4] = list[4 * k..][..4].try_into().expect("four bytes");
    u32::from_le_bytes(word) as usize
}

/// FP8 numbers (E4M3) with scales for rows, or for blocks of rows and columns.
#[derive(Clone, Debug)]
pub(crate) struct Fp8Tensors {
    pub(crate) levels: Span,
    pub(crate) cols: usize,
    pub(crate) scales: Table,
    /// Numbers of a row that share a scale.
    pub(crate) group: usize,
}

impl Fp8Tensors {
    /// Dequantises a row from column `first_col` on.
    pub(crate) fn read_row(&self, row_idx: usize, first_col: usize, to: &mut [f32]) {
        let row = &self.levels[row_idx * self.cols..][..self.cols][first_col..];
        for (k, (to, byte)) in (first_col..).zip(to.iter_mut().zip(row)) {
            *to = e4m3::to_f32(*byte) * self.scales.get(row_idx, k / self.group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_matches_known_values() {
        for (byte, value) in [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x07, 0.013671875),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0xb8, -1.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(e4m3::to_f32(byte), value, "{byte:#x}");
        }
        assert!(e4m3::to_f32(0x7f).is_nan());
    }
}
