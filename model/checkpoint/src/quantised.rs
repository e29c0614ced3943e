//! Quantised safetensors: the tensors that make up one weight, by the method of `quantization_config`.
//!
//! | method | levels | scales | zeros |
//! |---|---|---|---|
//! | awq | `qweight [K, N / 8]` | `scales [K / group, N]` | `qzeros [K / group, N / 8]` |
//! | gptq | `qweight [K * bits / 32, N]` | `scales [groups, N]` | `qzeros [groups, N * bits / 32]`, `g_idx [K]` |
//! | compressed-tensors | `weight_packed [N, K * bits / 32]`, or `weight [N, K]` | `weight_scale [N, groups]` | `weight_zero_point` |
//! | fp8 | `weight [N, K]` | `weight_scale`, or `weight_scale_inv` of blocks | |
//!
//! N are the outputs, K the inputs. The shapes of a module's tensors show whether it is quantised, with how many bits
//! and in how many groups; the configuration states their size. So the lists of modules that are not quantised
//! (`modules_to_not_convert`, `ignore`, `exclude_modules`) are not read.
//!
//! Layouts: AutoAWQ's "gemm", AutoGPTQ and GPTQModel, AutoRound's packing as GPTQ, vLLM's
//! compressed-tensors, DeepSeek-V3's block scales.

use baton_model_spec::{FloatDtype, IntegerWidth, LoadError, StoredQuantisation};
use safetensors::tensor::Dtype;

use crate::integer_tensors::{
    Field, Fp8Tensors, Groups, IntegerTensors, SLOTS_IN_ORDER, Table, Zeros, listed_group,
};
use crate::matrix::{Matrix, Stored, StoredOrder};
use crate::tensors::{Raw, Tensors};

/// AWQ: the position of each integer within an int32, counted from its low end.
const AWQ_SLOTS: [u8; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
const WORD_BITS: usize = 32;
const SCALE_DTYPES: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

/// Tensors that describe the quantisation of activations and KV, which are not used.
pub(crate) fn is_about_activations(name: &str) -> bool {
    const SUFFIXES: &[&str] = &[
        ".activation_scale",
        ".input_global_scale",
        ".input_scale",
        ".input_scale_ub",
        ".input_zero_point",
        ".k_scale",
        // AutoFP8's older files: of keys and values together.
        ".kv_scale",
        ".output_scale",
        ".q_scale",
        ".v_scale",
    ];
    SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

/// Whether `module` has levels under a name of their own, not `weight`.
pub(crate) fn has(from: &Tensors, module: &str) -> bool {
    ["qweight", "weight_packed"].iter().any(|suffix| from.dtype_of(&format!("{module}.{suffix}")).is_some())
}

/// Takes the weight of `module` if it is not stored as floats.
pub(crate) fn take(
    from: &mut Tensors,
    quantisation: StoredQuantisation,
    module: &str,
    [rows, cols]: [usize; 2],
) -> Result<Option<Matrix>, LoadError> {
    let mut taker = Taker { from, module, stated_group: quantisation.group(), rows, cols };
    let has = |suffix: &str| taker.from.dtype_of(&format!("{module}.{suffix}"));
    let stored = match quantisation {
        StoredQuantisation::Awq { .. } if has("qweight").is_some() => Stored::Integers(taker.awq()?),
        StoredQuantisation::Gptq { zero_offset, .. } if has("qweight").is_some() => {
            Stored::Integers(taker.gptq(zero_offset)?)
        }
        StoredQuantisation::Named { .. } if has("weight_packed").is_some() => {
            Stored::Integers(taker.packed()?)
        }
        StoredQuantisation::Named { .. } if has("weight") == Some(Dtype::I8) => {
            Stored::Integers(taker.bytes()?)
        }
        StoredQuantisation::Named { block, .. } if has("weight") == Some(Dtype::F8_E4M3) => {
            Stored::Fp8(taker.fp8(block)?)
        }
        _ => return Ok(None),
    };
    let stored = match stored {
        Stored::Integers(tensors) => Stored::Integers(tensors.without_needless_zeros(rows)),
        other => other,
    };
    Ok(Some(Matrix::new(rows, cols, stored, StoredOrder::AsIs)))
}

/// Takes the tensors of one module.
struct Taker<'a> {
    from: &'a mut Tensors,
    module: &'a str,
    /// The size of groups that the configuration states.
    stated_group: Option<usize>,
    rows: usize,
    cols: usize,
}

/// The groups of a row.
#[derive(Clone, Copy)]
struct RowGroups {
    num: usize,
    /// Numbers of a group; the last one may have fewer.
    size: usize,
}

impl Taker<'_> {
    fn take(&mut self, suffix: &str, dtypes: &[Dtype], shapes: &[&[usize]]) -> Result<Raw, LoadError> {
        self.from.take_raw(&format!("{}.{suffix}", self.module), dtypes, shapes)
    }

    fn has(&self, suffix: &str) -> bool {
        self.dtype_of(suffix).is_some()
    }

    fn dtype_of(&self, suffix: &str) -> Option<Dtype> {
        self.from.dtype_of(&format!("{}.{suffix}", self.module))
    }

    fn shape_of(&self, suffix: &str) -> Vec<usize> {
        self.from.shape_of(&format!("{}.{suffix}", self.module)).unwrap_or_default()
    }

    fn awq(&mut self) -> Result<IntegerTensors, LoadError> {
        let (rows, cols) = (self.rows, self.cols);
        let words = rows.div_ceil(8);
        let field = |raw: Raw| Field {
            row_shift: 3,
            row_stride: 1,
            col_shift: 0,
            col_stride: words,
            slots: AWQ_SLOTS,
            ..in_words(raw, 4)
        };
        let qweight = self.take("qweight", &[Dtype::I32], &[&[cols, words]])?;
        let groups = self.row_groups("scales", 0)?;
        let scales = self.take("scales", SCALE_DTYPES, &[&[groups.num, rows]])?;
        let zeros = match self.has("qzeros") {
            true => Some(self.take("qzeros", &[Dtype::I32], &[&[groups.num, words]])?),
            false => None,
        };
        Ok(IntegerTensors {
            width: IntegerWidth::Four,
            cols,
            levels: field(qweight),
            scales: Table { row_stride: 1, col_stride: rows, ..table(scales) },
            zeros: zeros.map(|zeros| Zeros { levels: field(zeros), offset: 0 }),
            groups: Groups::InOrder(groups.size),
            num_groups: groups.num,
        })
    }

    fn gptq(&mut self, zero_offset: i16) -> Result<IntegerTensors, LoadError> {
        let (rows, cols) = (self.rows, self.cols);
        let width = self.width("qweight", 0);
        let per_word = WORD_BITS / width.bits();
        let qweight = self.take("qweight", &[Dtype::I32], &[&[cols.div_ceil(per_word), rows]])?;
        let groups = self.row_groups("scales", 0)?;
        let scales = self.take("scales", SCALE_DTYPES, &[&[groups.num, rows]])?;
        let zero_words = rows.div_ceil(per_word);
        let qzeros = self.take("qzeros", &[Dtype::I32], &[&[groups.num, zero_words]])?;
        Ok(IntegerTensors {
            width,
            cols,
            levels: Field {
                row_stride: 1,
                col_shift: per_word.ilog2(),
                col_stride: rows,
                ..in_words(qweight, width.bits())
            },
            scales: Table { row_stride: 1, col_stride: rows, ..table(scales) },
            zeros: Some(Zeros {
                levels: Field {
                    row_shift: per_word.ilog2(),
                    row_stride: 1,
                    col_stride: zero_words,
                    ..in_words(qzeros, width.bits())
                },
                offset: zero_offset,
            }),
            groups: self.groups("g_idx", groups)?,
            num_groups: groups.num,
        })
    }

    /// Integers of compressed-tensors, packed into words.
    fn packed(&mut self) -> Result<IntegerTensors, LoadError> {
        let (rows, cols) = (self.rows, self.cols);
        let width = self.width("weight_packed", 1);
        let per_word = WORD_BITS / width.bits();
        let words = cols.div_ceil(per_word);
        let levels = self.take("weight_packed", &[Dtype::I32], &[&[rows, words]])?;
        if self.has("weight_shape") {
            let shape = self.take("weight_shape", &[Dtype::I64, Dtype::I32], &[&[2]])?;
            let numbers = shape.span.chunks_exact(shape.span.len() / 2);
            let numbers =
                numbers.map(|bytes| bytes.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte)));
            let found: Vec<usize> = numbers.map(|number| number as usize).collect();
            if found != [rows, cols] {
                let tensor = format!("{}.weight_shape", self.module);
                return Err(shape.wrong_shape(tensor, found, vec![rows, cols]));
            }
        }
        let (scales, groups) = self.scales("weight_scale")?;
        let zeros = match self.dtype_of("weight_zero_point") {
            None => None,
            Some(Dtype::I32) => {
                let shape = [rows.div_ceil(per_word), groups.num];
                let raw = self.take("weight_zero_point", &[Dtype::I32], &[&shape])?;
                Some(Zeros {
                    levels: Field {
                        row_shift: per_word.ilog2(),
                        row_stride: groups.num,
                        ..in_words(raw, width.bits())
                    },
                    offset: 0,
                })
            }
            Some(_) => Some(self.byte_zeros(width, groups.num)?),
        };
        Ok(IntegerTensors {
            width,
            cols,
            levels: Field {
                row_stride: words,
                col_shift: per_word.ilog2(),
                ..in_words(levels, width.bits())
            },
            scales,
            zeros,
            groups: self.groups("weight_g_idx", groups)?,
            num_groups: groups.num,
        })
    }

    /// Integers of compressed-tensors, one per byte.
    fn bytes(&mut self) -> Result<IntegerTensors, LoadError> {
        let (rows, cols) = (self.rows, self.cols);
        let levels = self.take("weight", &[Dtype::I8], &[&[rows, cols]])?;
        let (scales, groups) = self.scales("weight_scale")?;
        let zeros = match self.has("weight_zero_point") {
            true => Some(self.byte_zeros(IntegerWidth::Eight, groups.num)?),
            false => None,
        };
        Ok(IntegerTensors {
            width: IntegerWidth::Eight,
            cols,
            levels: Field { row_stride: cols, ..in_bytes(levels) },
            scales,
            zeros,
            groups: self.groups("weight_g_idx", groups)?,
            num_groups: groups.num,
        })
    }

    fn fp8(&mut self, [block_rows, block_cols]: [usize; 2]) -> Result<Fp8Tensors, LoadError> {
        let (rows, cols) = (self.rows, self.cols);
        let levels = self.take("weight", &[Dtype::F8_E4M3], &[&[rows, cols]])?.span;
        let suffix = if self.has("weight_scale_inv") { "weight_scale_inv" } else { "weight_scale" };
        let blocks = [rows.div_ceil(block_rows), cols.div_ceil(block_cols)];
        let shape = self.shape_of(suffix);
        let is_blocks = shape == blocks && !is_whole_rows(&shape, rows);
        if !is_blocks {
            let (scales, groups) = self.scales(suffix)?;
            return Ok(Fp8Tensors { levels, cols, scales, group: groups.size });
        }
        let scales = self.take(suffix, SCALE_DTYPES, &[&blocks])?;
        let scales =
            Table { rows_per_row: block_rows, row_stride: blocks[1], col_stride: 1, ..table(scales) };
        Ok(Fp8Tensors { levels, cols, scales, group: block_cols })
    }

    /// Scales of the whole matrix, of rows, or of groups within rows; and the groups of a row.
    fn scales(&mut self, suffix: &str) -> Result<(Table, RowGroups), LoadError> {
        let groups = self.row_groups(suffix, 1)?;
        let per_row = [self.rows, groups.num];
        let raw = self.take(suffix, SCALE_DTYPES, &[&per_row, &[self.rows], &[1, 1], &[1], &[]])?;
        let is_one = raw.shape.iter().product::<usize>() == 1;
        let row_stride = if is_one { 0 } else { groups.num };
        Ok((Table { row_stride, col_stride: 1, ..table(raw) }, groups))
    }

    /// Zero points in bytes, with the shape of the scales.
    fn byte_zeros(&mut self, width: IntegerWidth, num_groups: usize) -> Result<Zeros, LoadError> {
        let per_row = [self.rows, num_groups];
        let raw =
            self.take("weight_zero_point", &[Dtype::I8], &[&per_row, &[self.rows], &[1, 1], &[1], &[]])?;
        let row_stride = if raw.span.len() == 1 { 0 } else { num_groups };
        let levels = Field { row_stride, ..in_bytes(raw) };
        // A signed zero point counts from the middle of the width.
        Ok(Zeros { levels, offset: i16::from(width.middle()) - 128 })
    }

    fn groups(&mut self, suffix: &str, of_row: RowGroups) -> Result<Groups, LoadError> {
        let RowGroups { num: num_groups, size } = of_row;
        if !self.has(suffix) {
            return Ok(Groups::InOrder(size));
        }
        let raw = self.take(suffix, &[Dtype::I32], &[&[self.cols]])?;
        let list = &raw.span;
        if (0..self.cols).all(|k| listed_group(list, k) == k / size) {
            return Ok(Groups::InOrder(size));
        }
        if let Some(k) = (0..self.cols).find(|k| listed_group(list, *k) >= num_groups) {
            let tensor = format!("{}.{suffix}", self.module);
            let found = listed_group(list, k) as i32;
            return Err(
                raw.bad(format!("tensor {tensor} names group {found}, expected 0 to {}", num_groups - 1))
            );
        }
        Ok(Groups::Listed(raw.span))
    }

    /// Four bits if `dimension` of the packed tensor fits four bits, else eight.
    fn width(&self, suffix: &str, dimension: usize) -> IntegerWidth {
        match self.shape_of(suffix).get(dimension) {
            Some(words) if *words == self.cols.div_ceil(WORD_BITS / 8) => IntegerWidth::Eight,
            _ => IntegerWidth::Four,
        }
    }

    /// The groups of a row, whose number is `dimension` of the scales. They have the stated size if that makes as many, else
    /// they are equal parts of a row: the module has a size of its own.
    fn row_groups(&self, suffix: &str, dimension: usize) -> Result<RowGroups, LoadError> {
        let cols = self.cols;
        let shape = self.shape_of(suffix);
        let num = if shape.len() == 2 { shape[dimension] } else { 1 };
        let stated = self.stated_group.map(|size| RowGroups { num: cols.div_ceil(size), size });
        match stated {
            Some(stated) if stated.num == num => Ok(stated),
            _ if num > 0 && cols.is_multiple_of(num) => Ok(RowGroups { num, size: cols / num }),
            Some(RowGroups { num: expected, size }) => {
                let tensor = format!("{}.{suffix}", self.module);
                let message = format!(
                    "tensor {tensor} has scales of {num} groups for {cols} columns, expected {expected} of {size}"
                );
                Err(LoadError::bad_file(self.from.by_name[&tensor].span.file().path(), message))
            }
            // An impossible number: the shape is refused.
            None => Ok(RowGroups { num: 1, size: cols }),
        }
    }
}

/// Whether there is one scale per row, or one for the whole matrix.
fn is_whole_rows(shape: &[usize], rows: usize) -> bool {
    matches!(shape, [] | [1] | [1, 1]) || shape == [rows] || shape == [rows, 1]
}

fn in_words(raw: Raw, bits: usize) -> Field {
    Field {
        span: raw.span,
        bits,
        word_bytes: 4,
        row_shift: 0,
        row_stride: 1,
        col_shift: 0,
        col_stride: 1,
        slots: SLOTS_IN_ORDER,
        is_signed: false,
    }
}

fn in_bytes(raw: Raw) -> Field {
    Field { word_bytes: 1, is_signed: true, ..in_words(raw, 8) }
}

fn table(raw: Raw) -> Table {
    let dtype = match raw.dtype {
        Dtype::F32 => FloatDtype::F32,
        Dtype::F16 => FloatDtype::F16,
        _ => FloatDtype::Bf16,
    };
    Table { span: raw.span, dtype, rows_per_row: 1, row_stride: 1, col_stride: 1 }
}

#[cfg(test)]
mod tests;
