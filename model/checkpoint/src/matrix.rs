//! A matrix in mapped files, as floats or as integers, row by row.
//!
//! It knows how numbers are stored, not what they are for, nor how kernels want them.

use std::ops::Range;

use baton_gguf::TensorType;
use baton_kv_cache::KvDtype;
use baton_model_spec::{FloatDtype, IntegerFormat, IntegerRow, MIN_GROUP};

use crate::blocks;
use crate::file::Span;
use crate::integer_tensors::{Fp8Tensors, IntegerTensors};

/// A matrix, or some rows and columns of a tensor.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Outputs of a product with it.
    pub rows: usize,
    /// Inputs of a product with it.
    pub cols: usize,
    stored: Stored,
    order: StoredOrder,
    /// Where it begins in what is stored.
    first_row: usize,
    first_col: usize,
    /// Columns of what is stored.
    stored_cols: usize,
}

/// How the numbers of a matrix are stored, row after row.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
    Floats(Span, FloatDtype),
    /// GGUF's blocks of integers.
    Blocks(Span, TensorType),
    /// Integers whose scales and zeros are tensors of their own.
    Integers(IntegerTensors),
    Fp8(Fp8Tensors),
}

/// How numbers in E4M3 share scales: in blocks of so many rows, counted from the first, and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Scales {
    /// 1 also where the first row is within a block.
    pub rows: usize,
    /// Columns; those of the matrix, or more, where a scale is that of rows.
    pub group: usize,
}

/// Where a file keeps the rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoredOrder {
    AsIs,
    /// Heads of so many rows, each with the rows of its first and its second half in turns.
    InterleavedHalves {
        head_dim: usize,
    },
}

impl StoredOrder {
    fn stored_idx(self, row_idx: usize) -> usize {
        match self {
            StoredOrder::AsIs => row_idx,
            StoredOrder::InterleavedHalves { head_dim } => {
                let (head, idx) = (row_idx / head_dim, row_idx % head_dim);
                let (half, idx) = (idx / (head_dim / 2), idx % (head_dim / 2));
                head * head_dim + 2 * idx + half
            }
        }
    }
}

impl Matrix {
    pub(crate) fn new(rows: usize, cols: usize, stored: Stored, order: StoredOrder) -> Matrix {
        if let StoredOrder::InterleavedHalves { head_dim } = order {
            assert!(head_dim.is_multiple_of(2) && rows.is_multiple_of(head_dim), "whole heads of two halves");
        }
        Matrix { rows, cols, stored, order, first_row: 0, first_col: 0, stored_cols: cols }
    }

    /// Some of its rows.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn rows_at(&self, range: Range<usize>) -> Matrix {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        Matrix { rows: range.len(), first_row: self.first_row + range.start, ..self.clone() }
    }

    /// Some of its columns. Where numbers are integers in groups, see [`splits`](Self::splits).
    ///
    /// # Panics
    /// When there are not so many.
    pub fn columns_at(&self, range: Range<usize>) -> Matrix {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        Matrix { cols: range.len(), first_col: self.first_col + range.start, ..self.clone() }
    }

    /// The column at which it begins or ends within a group of `format`: as integers of that format its numbers would
    /// be others than as a part of the whole.
    pub fn splits(&self, format: IntegerFormat) -> Option<usize> {
        let is_one_group = match &self.stored {
            Stored::Integers(tensors) => tensors.scales_whole_rows() && tensors.format() == Some(format),
            Stored::Floats(..) | Stored::Blocks(..) | Stored::Fp8(_) => false,
        };
        let end = self.first_col + self.cols;
        let is_inside = |col: &usize| *col != self.stored_cols && !col.is_multiple_of(format.group);
        [self.first_col, end].into_iter().find(is_inside).filter(|_| !is_one_group)
    }

    /// What rows are widened to: the type of the floats; single precision for what has scales.
    pub fn dtype(&self) -> FloatDtype {
        match self.stored {
            Stored::Floats(_, dtype) => dtype,
            Stored::Blocks(..) | Stored::Integers(_) | Stored::Fp8(_) => FloatDtype::F32,
        }
    }

    /// The type of KV when no other is asked for: that of the floats, or of the scales.
    pub fn kv_dtype(&self) -> KvDtype {
        match self.stored {
            Stored::Floats(_, dtype) => dtype.kv_dtype(),
            Stored::Blocks(..) => KvDtype::F16,
            Stored::Integers(ref tensors) => tensors.scales.dtype.kv_dtype(),
            Stored::Fp8(ref tensors) => tensors.scales.dtype.kv_dtype(),
        }
    }

    /// The bytes of row `row_idx` of a matrix of floats.
    pub fn row(&self, row_idx: usize) -> Option<&[u8]> {
        match &self.stored {
            Stored::Floats(span, dtype) => Some(self.row_bytes(span, *dtype, row_idx)),
            _ => None,
        }
    }

    fn stored_row(&self, row_idx: usize) -> usize {
        self.order.stored_idx(self.first_row + row_idx)
    }

    fn row_bytes<'a>(&self, span: &'a Span, dtype: FloatDtype, row_idx: usize) -> &'a [u8] {
        let first = self.stored_row(row_idx) * self.stored_cols + self.first_col;
        &span[first * dtype.size_bytes()..][..self.cols * dtype.size_bytes()]
    }

    /// The numbers of row `row_idx`, into a slice of as many.
    pub fn read_row(&self, row_idx: usize, to: &mut [f32]) {
        assert_eq!(to.len(), self.cols, "numbers of a row");
        match &self.stored {
            Stored::Floats(span, dtype) => {
                let bytes = self.row_bytes(span, *dtype, row_idx);
                to.iter_mut()
                    .zip(bytes.chunks_exact(dtype.size_bytes()))
                    .for_each(|(to, bytes)| *to = dtype.widen(bytes));
            }
            Stored::Blocks(span, tensor_type) => {
                let (bytes, skipped) = self.blocks(span, *tensor_type, row_idx);
                let num_stored = bytes.len() / tensor_type.block_bytes() * tensor_type.block_len();
                if num_stored == to.len() {
                    return blocks::read(*tensor_type, bytes, to);
                }
                let mut stored = vec![0.0; num_stored];
                blocks::read(*tensor_type, bytes, &mut stored);
                to.copy_from_slice(&stored[skipped..][..self.cols]);
            }
            Stored::Integers(tensors) => tensors.read_row(self.stored_row(row_idx), self.first_col, to),
            Stored::Fp8(tensors) => tensors.read_row(self.stored_row(row_idx), self.first_col, to),
        }
    }

    /// The whole blocks in which a row's columns lie, and how many numbers come before these.
    fn blocks<'a>(&self, span: &'a Span, tensor_type: TensorType, row_idx: usize) -> (&'a [u8], usize) {
        let (len, num_bytes) = (tensor_type.block_len(), tensor_type.block_bytes());
        let (first, end) = (self.first_col / len, (self.first_col + self.cols).div_ceil(len));
        let before = self.stored_row(row_idx) * (self.stored_cols / len) + first;
        (&span[before * num_bytes..][..(end - first) * num_bytes], self.first_col % len)
    }

    /// The numbers of row `row_idx`.
    pub fn row_values(&self, row_idx: usize) -> impl Iterator<Item = f32> {
        let mut values = vec![0.0; self.cols];
        self.read_row(row_idx, &mut values);
        values.into_iter()
    }

    /// All of it.
    pub fn to_f32(&self) -> Vec<f32> {
        (0..self.rows).flat_map(|row_idx| self.row_values(row_idx)).collect()
    }

    /// Whether a file holds its numbers as integers, be it in groups that no kernel takes.
    pub fn is_integers(&self) -> bool {
        matches!(self.stored, Stored::Blocks(..) | Stored::Integers(_))
    }

    /// Whether a file holds its numbers as floats of eight bits.
    pub fn is_fp8(&self) -> bool {
        matches!(self.stored, Stored::Fp8(_))
    }

    /// The integers that rows are, if rows are made of integers in groups that kernels take. Where its columns begin or end
    /// within a group, groups are smaller ones that have its scale, if there are such.
    pub fn integer_format(&self) -> Option<IntegerFormat> {
        let format = match &self.stored {
            Stored::Floats(..) | Stored::Fp8(_) => return None,
            Stored::Blocks(_, tensor_type) => blocks::integer_format(*tensor_type)?,
            Stored::Integers(tensors) if tensors.scales_whole_rows() => return tensors.format(),
            Stored::Integers(tensors) => tensors.format()?,
        };
        let end = self.first_col + self.cols;
        let end = if end == self.stored_cols { 0 } else { end };
        let smaller = gcd(gcd(format.group, self.first_col), end);
        let group = if smaller.is_multiple_of(MIN_GROUP) { smaller } else { format.group };
        Some(IntegerFormat { group, ..format })
    }

    /// The integers of row `row_idx` in `format`: those of the file, or rounded.
    pub fn integers_in(&self, format: IntegerFormat, row_idx: usize) -> IntegerRow {
        if self.integer_format() == Some(format) {
            return self.integer_row(row_idx);
        }
        let values: Vec<f32> = self.row_values(row_idx).collect();
        IntegerRow::quantise(&values, format)
    }

    /// Whether the integers of a row share one scale.
    pub fn scales_whole_rows(&self) -> bool {
        matches!(&self.stored, Stored::Integers(tensors) if tensors.scales_whole_rows())
    }

    /// How floats of eight bits share scales; `None` if there are none. Where its columns begin within a block, so do
    /// smaller ones that have its scale.
    pub fn fp8_scales(&self) -> Option<Fp8Scales> {
        let Stored::Fp8(tensors) = &self.stored else { return None };
        let rows = tensors.scales.rows_per_row;
        let rows = if self.first_row.is_multiple_of(rows) { rows } else { 1 };
        let is_whole_row = tensors.group >= self.stored_cols;
        let group = if is_whole_row { tensors.group } else { gcd(tensors.group, self.first_col) };
        Some(Fp8Scales { rows, group })
    }

    /// Row `row_idx` in E4M3, and the scale of each group of it.
    ///
    /// # Panics
    /// When there are no [scales of fp8](Self::fp8_scales).
    pub fn fp8_row(&self, row_idx: usize) -> (&[u8], impl Iterator<Item = f32>) {
        let Stored::Fp8(tensors) = &self.stored else { panic!("no numbers in E4M3") };
        let row = self.stored_row(row_idx);
        let codes = &tensors.levels[row * self.stored_cols + self.first_col..][..self.cols];
        let Fp8Scales { group, .. } = self.fp8_scales().expect("it has some");
        let starts = (self.first_col..self.first_col + self.cols).step_by(group);
        (codes, starts.map(move |col| tensors.scales.get(row, col / tensors.group)))
    }

    /// The integers of row `row_idx`.
    ///
    /// # Panics
    /// When there is no [integer format](Self::integer_format), or the matrix [splits](Self::splits) its groups.
    pub fn integer_row(&self, row_idx: usize) -> IntegerRow {
        match &self.stored {
            Stored::Floats(..) | Stored::Fp8(_) => panic!("floats are no integers"),
            Stored::Integers(tensors) => {
                let group = self.integer_format().expect("integers that have a format").group;
                let cols = self.first_col..self.first_col + self.cols;
                tensors.row(self.stored_row(row_idx), cols, group)
            }
            Stored::Blocks(span, tensor_type) => {
                let (bytes, skipped) = self.blocks(span, *tensor_type, row_idx);
                let row = blocks::integer_row(*tensor_type, bytes);
                let group = self.integer_format().expect("a type that has a format").group;
                row.part(skipped..skipped + self.cols, group)
            }
        }
    }
}

/// The largest number that divides both; the other, if one is 0.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
