//! A matrix in mapped files, stored as floats or as integers, read row by row.
//!
//! It knows how numbers are stored. It does not know what they are for or how kernels lay them out.

use std::ops::Range;

use baton_gguf::TensorType;
use baton_kv_cache::KvDtype;
use baton_model_spec::{FloatDtype, IntegerFormat, IntegerRow, MIN_GROUP};

use crate::blocks;
use crate::file::Span;
use crate::integer_tensors::{Fp8Tensors, IntegerTensors};

/// A matrix: a tensor, or a range of its rows and columns.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Rows: outputs of a product.
    pub rows: usize,
    /// Columns: inputs of a product.
    pub cols: usize,
    stored: Stored,
    order: StoredOrder,
    /// The first row in the stored tensor.
    first_row: usize,
    first_col: usize,
    /// Columns of the stored tensor.
    stored_cols: usize,
}

/// How the numbers are stored, row after row.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
    Floats(Span, FloatDtype),
    /// GGUF blocks of integers.
    Blocks(Span, TensorType),
    /// Integers with scales and zero points in tensors of their own.
    Integers(IntegerTensors),
    Fp8(Fp8Tensors),
}

/// Blocks of E4M3 numbers that share a scale. Block rows are counted from the matrix's first row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Scales {
    /// Rows of a block; 1 if the first row is inside a block.
    pub rows: usize,
    /// Columns of a block. May exceed the matrix's columns if a scale is for whole rows.
    pub group: usize,
}

/// The order of a matrix's rows in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoredOrder {
    AsIs,
    /// Heads of `head_dim` rows; in each head the rows of the first and of the second half alternate.
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

    /// The rows in `range`.
    ///
    /// # Panics
    /// When `range` exceeds the rows.
    pub fn rows_at(&self, range: Range<usize>) -> Matrix {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        Matrix { rows: range.len(), first_row: self.first_row + range.start, ..self.clone() }
    }

    /// The columns in `range`. A cut inside a group of quantised numbers is possible: see [`splits`](Self::splits).
    ///
    /// # Panics
    /// When `range` exceeds the columns.
    pub fn columns_at(&self, range: Range<usize>) -> Matrix {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        Matrix { cols: range.len(), first_col: self.first_col + range.start, ..self.clone() }
    }

    /// The first or last column of this matrix if it is inside a group of `format`. Quantised to that format, the
    /// numbers would then differ from those of the whole matrix.
    pub fn splits(&self, format: IntegerFormat) -> Option<usize> {
        let is_one_group = match &self.stored {
            Stored::Integers(tensors) => tensors.scales_whole_rows() && tensors.format() == Some(format),
            Stored::Floats(..) | Stored::Blocks(..) | Stored::Fp8(_) => false,
        };
        let end = self.first_col + self.cols;
        let is_inside = |col: &usize| *col != self.stored_cols && !col.is_multiple_of(format.group);
        [self.first_col, end].into_iter().find(is_inside).filter(|_| !is_one_group)
    }

    /// The type to which rows are dequantised: the stored type of floats, else f32.
    pub fn dtype(&self) -> FloatDtype {
        match self.stored {
            Stored::Floats(_, dtype) => dtype,
            Stored::Blocks(..) | Stored::Integers(_) | Stored::Fp8(_) => FloatDtype::F32,
        }
    }

    /// The default type of KV: that of the floats, or of the scales.
    pub fn kv_dtype(&self) -> KvDtype {
        match self.stored {
            Stored::Floats(_, dtype) => dtype.kv_dtype(),
            Stored::Blocks(..) => KvDtype::F16,
            Stored::Integers(ref tensors) => tensors.scales.dtype.kv_dtype(),
            Stored::Fp8(ref tensors) => tensors.scales.dtype.kv_dtype(),
        }
    }

    /// The bytes of row `row_idx`; `None` if the matrix is not stored as floats.
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

    /// Dequantises row `row_idx` into `to`, which has `cols` numbers.
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

    /// The whole blocks that contain a row's columns, and the number of values before the first column.
    fn blocks<'a>(&self, span: &'a Span, tensor_type: TensorType, row_idx: usize) -> (&'a [u8], usize) {
        let (len, num_bytes) = (tensor_type.block_len(), tensor_type.block_bytes());
        let (first, end) = (self.first_col / len, (self.first_col + self.cols).div_ceil(len));
        let before = self.stored_row(row_idx) * (self.stored_cols / len) + first;
        (&span[before * num_bytes..][..(end - first) * num_bytes], self.first_col % len)
    }

    /// The dequantised numbers of row `row_idx`.
    pub fn row_values(&self, row_idx: usize) -> impl Iterator<Item = f32> {
        let mut values = vec![0.0; self.cols];
        self.read_row(row_idx, &mut values);
        values.into_iter()
    }

    /// All rows, dequantised.
    pub fn to_f32(&self) -> Vec<f32> {
        (0..self.rows).flat_map(|row_idx| self.row_values(row_idx)).collect()
    }

    /// Whether the numbers are stored as integers, also in groups that no kernel supports.
    pub fn is_integers(&self) -> bool {
        matches!(self.stored, Stored::Blocks(..) | Stored::Integers(_))
    }

    /// Whether the numbers are stored as FP8.
    pub fn is_fp8(&self) -> bool {
        matches!(self.stored, Stored::Fp8(_))
    }

    /// The integer format of the rows, if they are stored as integers in groups that kernels support. If a cut is
    /// inside a group, smaller groups with the same scale are used, if kernels support their size.
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

    /// The integers of row `row_idx` in `format`: as stored if the formats agree, else quantised again.
    pub fn integers_in(&self, format: IntegerFormat, row_idx: usize) -> IntegerRow {
        if self.integer_format() == Some(format) {
            return self.integer_row(row_idx);
        }
        let values: Vec<f32> = self.row_values(row_idx).collect();
        IntegerRow::quantise(&values, format)
    }

    /// Whether all integers of a row share one scale.
    pub fn scales_whole_rows(&self) -> bool {
        matches!(&self.stored, Stored::Integers(tensors) if tensors.scales_whole_rows())
    }

    /// The blocks in which FP8 numbers share scales; `None` for other formats. If a cut is inside a block, smaller
    /// blocks with the same scale are used.
    pub fn fp8_scales(&self) -> Option<Fp8Scales> {
        let Stored::Fp8(tensors) = &self.stored else { return None };
        let rows = tensors.scales.rows_per_row;
        let rows = if self.first_row.is_multiple_of(rows) { rows } else { 1 };
        let is_whole_row = tensors.group >= self.stored_cols;
        let group = if is_whole_row { tensors.group } else { gcd(tensors.group, self.first_col) };
        Some(Fp8Scales { rows, group })
    }

    /// Row `row_idx` in E4M3, and the scale of each of its groups.
    ///
    /// # Panics
    /// When [`fp8_scales`](Self::fp8_scales) is `None`.
    pub fn fp8_row(&self, row_idx: usize) -> (&[u8], impl Iterator<Item = f32>) {
        let Stored::Fp8(tensors) = &self.stored else { panic!("the matrix is not stored as FP8") };
        let row = self.stored_row(row_idx);
        let codes = &tensors.levels[row * self.stored_cols + self.first_col..][..self.cols];
        let Fp8Scales { group, .. } = self.fp8_scales().expect("FP8 has scales");
        let starts = (self.first_col..self.first_col + self.cols).step_by(group);
        (codes, starts.map(move |col| tensors.scales.get(row, col / tensors.group)))
    }

    /// The stored integers of row `row_idx`.
    ///
    /// # Panics
    /// When [`integer_format`](Self::integer_format) is `None`, or the matrix [splits](Self::splits) its groups.
    pub fn integer_row(&self, row_idx: usize) -> IntegerRow {
        match &self.stored {
            Stored::Floats(..) | Stored::Fp8(_) => panic!("the matrix is not stored as integers"),
            Stored::Integers(tensors) => {
                let group = self.integer_format().expect("integers with a format").group;
                let cols = self.first_col..self.first_col + self.cols;
                tensors.row(self.stored_row(row_idx), cols, group)
            }
            Stored::Blocks(span, tensor_type) => {
                let (bytes, skipped) = self.blocks(span, *tensor_type, row_idx);
                let row = blocks::integer_row(*tensor_type, bytes);
                let group = self.integer_format().expect("a block type with a format").group;
                row.part(skipped..skipped + self.cols, group)
            }
        }
    }
}

/// The greatest common divisor; `gcd(a, 0)` is `a`.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
