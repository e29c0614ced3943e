//! The form in which a device holds a matrix, and the bytes of its rows.
//!
//! This module does not know devices. It fills host memory, some rows at a time.

use baton_checkpoint::{DeviceSource, Matrix, common_format};
use baton_cuda_kernels::device::FP8_BLOCK;
use baton_cuda_kernels::products::{Scales, WeightKind, pack};
use baton_model_spec::{FloatDtype, IntegerFormat, IntegerWidth};

/// The form of a matrix on a device: the format of its file or of `--quantize` if there are kernels for it, otherwise
/// bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightForm {
    Bf16,
    /// A scale for each block of `rows` rows and `group` columns.
    Fp8 {
        rows: usize,
        group: usize,
    },
    /// A scale, and a zero if the format has zeros, for each `group` columns of a row. `group` is the format's, or a
    /// whole row.
    Integers {
        format: IntegerFormat,
        group: usize,
    },
}

/// The largest number of rows that share a scale. Parts of a matrix start at multiples of it.
pub const MAX_SCALE_ROWS: usize = 128;

impl WeightForm {
    /// The form of consecutive matrices with the same number of columns.
    pub fn of<'m>(matrices: impl Iterator<Item = &'m DeviceSource> + Clone) -> WeightForm {
        let parts: Vec<&Matrix> = matrices.clone().flat_map(DeviceSource::parts).collect();
        let formats: Vec<_> = matrices.map(DeviceSource::integer_format).collect();
        let are_integers = formats.iter().all(Option::is_some);
        match formats[0] {
            Some(first) if formats.iter().all(|format| *format == Some(first)) => {
                WeightForm::of_integers(&parts, first)
            }
            // Parts of one matrix with different formats become the same.
            Some(_) if are_integers => WeightForm::of_integers(
                &parts,
                IntegerFormat { width: IntegerWidth::Eight, group: 32, has_zeros: false },
            ),
            None if formats.iter().all(Option::is_none) => WeightForm::of_floats(&parts),
            _ => WeightForm::Bf16,
        }
    }

    /// The form of a matrix that is only used for lookups. It keeps the quantisation of its file.
    pub fn of_table(table: &Matrix) -> WeightForm {
        match table.is_integers() {
            true => WeightForm::of_integers(&[table], common_format(std::slice::from_ref(table))),
            false => WeightForm::of_floats(&[table]),
        }
    }

    fn of_integers(parts: &[&Matrix], format: IntegerFormat) -> WeightForm {
        let is_row = |part: &&Matrix| part.scales_whole_rows() && part.integer_format() == Some(format);
        let group = if parts.iter().all(is_row) { parts[0].cols } else { format.group };
        WeightForm::Integers { format, group }
    }

    fn of_floats(parts: &[&Matrix]) -> WeightForm {
        let cols = parts[0].cols;
        let scales: Option<Vec<_>> = parts.iter().map(|part| part.fp8_scales()).collect();
        // Kernels require that 16 bytes belong to one row and 64 numbers to one group.
        let Some(scales) = scales.filter(|_| cols.is_multiple_of(16)) else { return WeightForm::Bf16 };
        let group = scales[0].group.min(cols);
        let are_equal = scales.iter().all(|scales| scales.group.min(cols) == group);
        if !are_equal || (group != cols && !group.is_multiple_of(64)) {
            return WeightForm::Bf16;
        }
        let rows = scales[0].rows;
        let is_whole = |part: &&Matrix| part.rows.is_multiple_of(rows);
        let are_blocks = scales.iter().all(|scales| scales.rows == rows)
            && MAX_SCALE_ROWS.is_multiple_of(rows)
            && parts[..parts.len() - 1].iter().all(is_whole);
        WeightForm::Fp8 { rows: if are_blocks { rows } else { 1 }, group }
    }

    pub fn kind(self) -> WeightKind {
        match self {
            WeightForm::Bf16 => WeightKind::Bf16,
            WeightForm::Fp8 { .. } => WeightKind::Fp8,
            WeightForm::Integers { format, .. } => kind_of(format.width),
        }
    }

    pub fn has_zeros(self) -> bool {
        matches!(self, WeightForm::Integers { format, .. } if format.has_zeros)
    }

    /// Number of scales of a row, and of zeros if there are any.
    pub fn num_groups(self, cols: usize) -> usize {
        match self {
            WeightForm::Bf16 => 0,
            WeightForm::Fp8 { group, .. } | WeightForm::Integers { group, .. } => cols.div_ceil(group),
        }
    }

    /// Number of scales of a column of groups.
    fn num_scales(self, rows: usize) -> usize {
        match self {
            WeightForm::Fp8 { rows: of_scale, .. } => rows.div_ceil(of_scale),
            WeightForm::Bf16 | WeightForm::Integers { .. } => rows,
        }
    }

    /// The layout of the scales, with null addresses. It is `[groups][rows]`, because kernels read the scales of
    /// neighbouring rows together; those of integers four at a time. [`Fp8Scaling::Blocks`](baton_cuda_kernels::device::Fp8Scaling::Blocks) has the
    /// layout of its library.
    pub fn scales(self, rows: usize, cols: usize) -> Scales {
        let stride = self.num_scales(rows) as u32;
        match self {
            WeightForm::Bf16 => Scales::NONE,
            WeightForm::Fp8 { rows: FP8_BLOCK, group: FP8_BLOCK } => Scales {
                rows_per_scale: FP8_BLOCK as u32,
                row_stride: self.num_groups(cols).next_multiple_of(4) as u32,
                group_stride: 1,
                group: FP8_BLOCK as u32,
                ..Scales::NONE
            },
            WeightForm::Fp8 { rows: of_scale, group } => Scales {
                rows_per_scale: of_scale as u32,
                row_stride: 1,
                group_stride: stride,
                group: group as u32,
                ..Scales::NONE
            },
            WeightForm::Integers { group, .. } => Scales {
                row_stride: 1,
                group_stride: stride.next_multiple_of(4),
                // No step of a kernel contains two groups.
                group: if group == cols { cols.next_multiple_of(128) as u32 } else { group as u32 },
                ..Scales::NONE
            },
        }
    }

    /// Numbers in a table of scales.
    fn table_len(self, rows: usize, cols: usize) -> usize {
        let scales = self.scales(rows, cols);
        let [row_stride, group_stride] = [scales.row_stride, scales.group_stride].map(|it| it as usize);
        (self.num_scales(rows) * row_stride).max(self.num_groups(cols) * group_stride)
    }

    /// Bytes of a matrix with its scales.
    pub fn size_bytes(self, rows: usize, cols: usize) -> usize {
        let tables = if self.has_zeros() { 2 } else { 1 };
        rows * self.kind().row_bytes(cols) + tables * self.table_len(rows, cols) * 4
    }

    /// Writes a row's bytes, and the scales and zeros of its groups.
    fn write_row(self, part: &Matrix, row_idx: usize, to: &mut Row<'_>) {
        match self {
            WeightForm::Bf16 => match part.row(row_idx) {
                Some(bytes) if part.dtype() == FloatDtype::Bf16 => to.bytes.copy_from_slice(bytes),
                _ => {
                    let rounded = part.row_values(row_idx).map(half::bf16::from_f32);
                    to.bytes
                        .chunks_exact_mut(2)
                        .zip(rounded)
                        .for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
                }
            },
            WeightForm::Fp8 { group, .. } => {
                let (codes, scales) = part.fp8_row(row_idx);
                to.bytes.copy_from_slice(codes);
                for ((to, scale), codes) in to.scales.iter_mut().zip(scales).zip(codes.chunks(group)) {
                    // Kernels do not support NaN weights. The whole group gets a NaN scale instead.
                    let is_nan = codes.iter().any(|code| code & 0x7f == 0x7f);
                    *to = if is_nan { f32::NAN } else { scale };
                }
            }
            WeightForm::Integers { format, .. } => {
                let row = part.integers_in(format, row_idx);
                pack(&row.levels, self.kind(), to.bytes);
                // A whole-row group has one scale for the row; all are equal.
                to.scales.iter_mut().zip(row.scales).for_each(|(to, scale)| *to = scale);
                let middle = f32::from(format.width.middle());
                to.zeros.iter_mut().zip(row.zeros).for_each(|(to, zero)| *to = zero - middle);
            }
        }
    }
}

fn kind_of(width: IntegerWidth) -> WeightKind {
    match width {
        IntegerWidth::Four => WeightKind::Int4,
        IntegerWidth::Eight => WeightKind::Int8,
    }
}

struct Row<'a> {
    bytes: &'a mut [u8],
    scales: &'a mut [f32],
    zeros: &'a mut [f32],
}

/// Some rows of a matrix in the device's form.
pub struct WeightRows {
    form: WeightForm,
    cols: usize,
    pub bytes: Vec<u8>,
    /// `[rows][groups]`, like the zeros. Empty without groups.
    scales: Vec<f32>,
    zeros: Vec<f32>,
}

impl WeightRows {
    pub fn new(form: WeightForm, cols: usize) -> WeightRows {
        WeightRows { form, cols, bytes: vec![], scales: vec![], zeros: vec![] }
    }

    /// Replaces the contents by the rows at `places` (a part and a row of it), on `num_threads` threads.
    pub fn fill(&mut self, places: &[(&Matrix, usize)], num_threads: usize) {
        let (form, row_bytes) = (self.form, self.form.kind().row_bytes(self.cols));
        // Without groups, each row still gets one number, so that the chunks below are not empty.
        let num_groups = form.num_groups(self.cols).max(1);
        self.bytes.resize(places.len() * row_bytes, 0);
        self.scales.resize(places.len() * num_groups, 0.0);
        self.zeros.resize(places.len() * num_groups, 0.0);
        let share = places.len().div_ceil(num_threads);
        std::thread::scope(|scope| {
            let shares = places
                .chunks(share)
                .zip(self.bytes.chunks_mut(share * row_bytes))
                .zip(self.scales.chunks_mut(share * num_groups))
                .zip(self.zeros.chunks_mut(share * num_groups));
            for (((places, bytes), scales), zeros) in shares {
                let mut write = move || {
                    let rows = bytes
                        .chunks_exact_mut(row_bytes)
                        .zip(scales.chunks_exact_mut(num_groups))
                        .zip(zeros.chunks_exact_mut(num_groups));
                    for (&(part, row_idx), ((bytes, scales), zeros)) in places.iter().zip(rows) {
                        form.write_row(part, row_idx, &mut Row { bytes, scales, zeros });
                    }
                };
                if num_threads == 1 { write() } else { drop(scope.spawn(write)) }
            }
        });
    }

    /// Copies the scales and zeros of these rows into the tables of the whole matrix. `first` is the index of the
    /// first row.
    pub fn place_scales(&self, first: usize, all: &mut Tables) {
        let num_groups = self.form.num_groups(self.cols);
        let Scales { rows_per_scale, row_stride, group_stride, .. } = all.places;
        let of_scale = rows_per_scale as usize;
        for (idx, scales) in self.scales.chunks_exact(num_groups.max(1)).enumerate() {
            let row = first + idx;
            for (group, scale) in scales.iter().enumerate().take(num_groups) {
                let place = group * group_stride as usize + row / of_scale * row_stride as usize;
                // If any row of a block has a NaN scale, the block has it.
                if row.is_multiple_of(of_scale) || scale.is_nan() {
                    all.scales[place] = *scale;
                }
                if self.form.has_zeros() {
                    all.zeros[place] = self.zeros[idx * num_groups + group];
                }
            }
        }
    }
}

/// Scales and zeros of a matrix in the layout of [`WeightForm::scales`].
pub struct Tables {
    pub scales: Vec<f32>,
    pub zeros: Vec<f32>,
    places: Scales,
}

impl Tables {
    pub fn new(form: WeightForm, rows: usize, cols: usize) -> Tables {
        let len = form.table_len(rows, cols);
        let zeros = vec![0.0; if form.has_zeros() { len } else { 0 }];
        Tables { scales: vec![0.0; len], zeros, places: form.scales(rows, cols) }
    }
}
