//! GGUF blocks of integers: how each type packs levels, scales and minima.
//!
//! Number `k` of a block is `scales[k / group] * (levels[k] - middle) - minima[k / group]`; types without minima have
//! zeros there. The order of operations is that of the reference implementation (ggml), so results are bit-identical
//! to it.

use baton_gguf::TensorType;

use baton_model_spec::{IntegerFormat, IntegerRow, IntegerWidth};

const MAX_BLOCK_LEN: usize = 256;
const MAX_GROUPS: usize = 16;
/// The sixteen levels of the IQ4 types, with 128 for zero.
const IQ4_LEVELS: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// The layout of a block type.
struct Layout {
    /// Numbers that share a scale.
    group: usize,
    /// The level that stands for zero before the minimum is subtracted.
    middle: u8,
    has_minima: bool,
}

fn layout(tensor_type: TensorType) -> Layout {
    let (group, middle, has_minima) = match tensor_type {
        TensorType::Q4_0 => (32, 8, false),
        TensorType::Q5_0 => (32, 16, false),
        TensorType::Q8_0 | TensorType::Iq4Nl | TensorType::Iq4Xs => (32, 128, false),
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => (32, 0, true),
        TensorType::Q2K => (16, 0, true),
        TensorType::Q3K => (16, 4, false),
        TensorType::Q6K => (16, 32, false),
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => unreachable!("floats have no blocks"),
    };
    Layout { group, middle, has_minima }
}

/// Dequantises a row of whole blocks.
pub(crate) fn read(tensor_type: TensorType, bytes: &[u8], to: &mut [f32]) {
    let Layout { group, middle, .. } = layout(tensor_type);
    let mut block = Block::default();
    let stored = bytes.chunks_exact(tensor_type.block_bytes());
    for (bytes, to) in stored.zip(to.chunks_exact_mut(tensor_type.block_len())) {
        block.unpack(tensor_type, bytes);
        for (k, (to, level)) in to.iter_mut().zip(block.levels).enumerate() {
            let level = f32::from(i16::from(level) - i16::from(middle));
            *to = block.scales[k / group] * level - block.minima[k / group];
        }
    }
}

/// The integer format that represents such blocks exactly. Groups of 16 (Q2_K, Q3_K, Q6_K) have none. Callers that
/// need integers of those quantise [the numbers](read) again, to eight bits with a scale per 32 numbers; that changes
/// a number by at most 1/254 of the largest of its 32.
pub(crate) fn integer_format(tensor_type: TensorType) -> Option<IntegerFormat> {
    let width = match tensor_type {
        TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q4K => IntegerWidth::Four,
        _ => IntegerWidth::Eight,
    };
    let Layout { group, has_minima, .. } = layout(tensor_type);
    (group == 32).then_some(IntegerFormat { width, group, has_zeros: has_minima })
}

/// A row of whole blocks in its [`integer_format`].
pub(crate) fn integer_row(tensor_type: TensorType, bytes: &[u8]) -> IntegerRow {
    let format = integer_format(tensor_type).expect("a type with a format");
    let Layout { group, middle, has_minima } = layout(tensor_type);
    // Symmetric levels are shifted so that their middle is the width's.
    let shift = if has_minima { 0 } else { format.width.middle() - middle };
    let (mut row, mut block) = (IntegerRow::default(), Block::default());
    for bytes in bytes.chunks_exact(tensor_type.block_bytes()) {
        block.unpack(tensor_type, bytes);
        let levels = &block.levels[..tensor_type.block_len()];
        for (group_idx, levels) in levels.chunks_exact(group).enumerate() {
            let (scale, minimum) = (block.scales[group_idx], block.minima[group_idx]);
            if has_minima && scale == 0.0 && minimum != 0.0 {
                // With a scale of 0 all numbers are the minimum, which no zero point can represent.
                row.levels.extend(std::iter::repeat_n(0, group));
                row.scales.push(minimum.abs());
                row.zeros.push(minimum.signum());
                continue;
            }
            row.levels.extend(levels.iter().map(|level| level + shift));
            row.scales.push(scale);
            if has_minima {
                row.zeros.push(if minimum == 0.0 { 0.0 } else { minimum / scale });
            }
        }
    }
    row
}

/// One unpacked block.
struct Block {
    levels: [u8; MAX_BLOCK_LEN],
    scales: [f32; MAX_GROUPS],
    minima: [f32; MAX_GROUPS],
}

impl Default for Block {
    fn default() -> Block {
        Block { levels: [0; MAX_BLOCK_LEN], scales: [0.0; MAX_GROUPS], minima: [0.0; MAX_GROUPS] }
    }
}

impl Block {
    fn unpack(&mut self, tensor_type: TensorType, bytes: &[u8]) {
        match tensor_type {
            TensorType::Q4_0 => {
                self.scales[0] = f16_at(bytes, 0);
                nibbles(&bytes[2..], &mut self.levels[..32]);
            }
            TensorType::Q4_1 => {
                self.scales[0] = f16_at(bytes, 0);
                self.minima[0] = -f16_at(bytes, 2);
                nibbles(&bytes[4..], &mut self.levels[..32]);
            }
            TensorType::Q5_0 => {
                self.scales[0] = f16_at(bytes, 0);
                nibbles(&bytes[6..], &mut self.levels[..32]);
                fifth_bits(&bytes[2..6], &mut self.levels[..32]);
            }
            TensorType::Q5_1 => {
                self.scales[0] = f16_at(bytes, 0);
                self.minima[0] = -f16_at(bytes, 2);
                nibbles(&bytes[8..], &mut self.levels[..32]);
                fifth_bits(&bytes[4..8], &mut self.levels[..32]);
            }
            TensorType::Q8_0 => {
                self.scales[0] = f16_at(bytes, 0);
                // A two's-complement number with its sign bit inverted is the number plus 128.
                self.levels.iter_mut().zip(&bytes[2..]).for_each(|(level, byte)| *level = byte ^ 0x80);
            }
            TensorType::Q2K => self.unpack_q2k(bytes),
            TensorType::Q3K => self.unpack_q3k(bytes),
            TensorType::Q4K => {
                self.six_bit_scales(bytes);
                for (pair, levels) in bytes[16..].chunks_exact(32).zip(self.levels.chunks_exact_mut(64)) {
                    nibbles(pair, levels);
                }
            }
            TensorType::Q5K => {
                self.six_bit_scales(bytes);
                for (pair, levels) in bytes[48..].chunks_exact(32).zip(self.levels.chunks_exact_mut(64)) {
                    nibbles(pair, levels);
                }
                // Bit g of byte l belongs to number l of group g.
                for (k, level) in self.levels.iter_mut().enumerate() {
                    *level |= (bytes[16 + k % 32] >> (k / 32) & 1) << 4;
                }
            }
            TensorType::Q6K => self.unpack_q6k(bytes),
            TensorType::Iq4Nl => {
                self.scales[0] = f16_at(bytes, 0);
                nibbles(&bytes[2..], &mut self.levels[..32]);
                self.choose_levels(32);
            }
            TensorType::Iq4Xs => {
                let scale = f16_at(bytes, 0);
                for group_idx in 0..8 {
                    let low = bytes[4 + group_idx / 2] >> (group_idx % 2 * 4) & 15;
                    let high = bytes[2 + group_idx / 4] >> (group_idx % 4 * 2) & 3;
                    self.scales[group_idx] = scale * f32::from((low | high << 4) as i8 - 32);
                }
                for (pair, levels) in bytes[8..].chunks_exact(16).zip(self.levels.chunks_exact_mut(32)) {
                    nibbles(pair, levels);
                }
                self.choose_levels(256);
            }
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => unreachable!("floats have no blocks"),
        }
    }

    fn choose_levels(&mut self, num: usize) {
        self.levels[..num].iter_mut().for_each(|level| *level = IQ4_LEVELS[usize::from(*level)]);
    }

    /// `scales[16] levels[64] scale minimum`; a byte of levels holds numbers of four groups of 32.
    fn unpack_q2k(&mut self, bytes: &[u8]) {
        let (scale, minimum) = (f16_at(bytes, 80), f16_at(bytes, 82));
        for (group_idx, &packed) in bytes[..16].iter().enumerate() {
            self.scales[group_idx] = scale * f32::from(packed & 15);
            self.minima[group_idx] = minimum * f32::from(packed >> 4);
        }
        for (k, level) in self.levels.iter_mut().enumerate() {
            *level = two_bits(&bytes[16..80], k);
        }
    }

    /// `high bits[32] levels[64] scales[12] scale`. A scale has four low bits in eight bytes and two high bits in
    /// four bytes, and is centred on 32.
    fn unpack_q3k(&mut self, bytes: &[u8]) {
        let (low, high) = bytes[96..108].split_at(8);
        let scale = f16_at(bytes, 108);
        for group_idx in 0..16 {
            let low = low[group_idx % 8] >> (group_idx / 8 * 4) & 15;
            let high = high[group_idx % 4] >> (group_idx / 4 * 2) & 3;
            self.scales[group_idx] = scale * f32::from((low | high << 4) as i8 - 32);
        }
        for (k, level) in self.levels.iter_mut().enumerate() {
            *level = two_bits(&bytes[32..96], k) | (bytes[k % 32] >> (k / 32) & 1) << 2;
        }
    }

    /// `low bits[128] high bits[64] scales[16] scale`. In each half of 128 numbers a byte of low bits holds numbers
    /// 64 apart, and a byte of high bits numbers 32 apart.
    fn unpack_q6k(&mut self, bytes: &[u8]) {
        let scale = f16_at(bytes, 208);
        for (group_idx, &stored) in bytes[192..208].iter().enumerate() {
            self.scales[group_idx] = scale * f32::from(stored as i8);
        }
        for (k, level) in self.levels.iter_mut().enumerate() {
            let (half, k) = (k / 128, k % 128);
            let low = bytes[64 * half + k % 64] >> (k / 64 * 4) & 15;
            let high = bytes[128 + 32 * half + k % 32] >> (k / 32 * 2) & 3;
            *level = low | high << 4;
        }
    }

    /// `scale minimum packed[12]`: eight scales and eight minima of six bits. The first four scales are the low six
    /// bits of bytes 0 to 3, the first four minima those of bytes 4 to 7. The others have their low four bits in
    /// bytes 8 to 11, and their high two bits above the first four.
    fn six_bit_scales(&mut self, bytes: &[u8]) {
        let (scale, minimum, packed) = (f16_at(bytes, 0), f16_at(bytes, 2), &bytes[4..16]);
        for group_idx in 0..8 {
            let (six_bit_scale, six_bit_minimum) = if group_idx < 4 {
                (packed[group_idx] & 63, packed[group_idx + 4] & 63)
            } else {
                let low = packed[group_idx + 4];
                (low & 15 | packed[group_idx - 4] >> 6 << 4, low >> 4 | packed[group_idx] >> 6 << 4)
            };
            self.scales[group_idx] = scale * f32::from(six_bit_scale);
            self.minima[group_idx] = minimum * f32::from(six_bit_minimum);
        }
    }
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The low four bits of every byte, then the high four.
fn nibbles(bytes: &[u8], to: &mut [u8]) {
    let (low, high) = to.split_at_mut(to.len() / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Number `k` gets bit `k` of four bytes.
fn fifth_bits(bytes: &[u8], to: &mut [u8]) {
    for (k, level) in to.iter_mut().enumerate() {
        *level |= (bytes[k / 8] >> (k % 8) & 1) << 4;
    }
}

/// The bits of number `k`. In halves of 128 numbers a byte holds numbers 32 apart.
fn two_bits(bytes: &[u8], k: usize) -> u8 {
    bytes[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3
}

#[cfg(test)]
mod tests {
    use baton_gguf::Gguf;

    use super::*;

    const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/gguf/fixtures/types.gguf");

    /// The recorded rows of a type, and the reference implementation's numbers for them.
    fn recorded(gguf: &Gguf<'_>, bytes: &[u8], tensor_type: TensorType) -> Vec<(Vec<u8>, Vec<f32>)> {
        let bytes_of = |name: &str| {
            let tensor = &gguf.tensors()[name];
            &bytes[tensor.start..][..tensor.size_bytes]
        };
        let stored = &gguf.tensors()[tensor_type.name()];
        assert_eq!(stored.tensor_type, tensor_type);
        let [num_rows, num_cols] = stored.shape[..] else { panic!("a matrix") };
        let rows = bytes_of(tensor_type.name()).chunks_exact(stored.size_bytes / num_rows);
        let values = bytes_of(&format!("{}.values", tensor_type.name()));
        let values = values.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
        let values: Vec<f32> = values.collect();
        rows.map(<[u8]>::to_vec).zip(values.chunks_exact(num_cols).map(<[f32]>::to_vec)).collect()
    }

    fn check_all(mut check: impl FnMut(TensorType, &[u8], &[f32])) {
        let bytes = std::fs::read(FIXTURE).unwrap();
        let gguf = Gguf::parse(&bytes).unwrap();
        let floats = [TensorType::F32, TensorType::F16, TensorType::Bf16];
        for tensor_type in TensorType::ALL.iter().filter(|tensor_type| !floats.contains(tensor_type)) {
            for (row, values) in recorded(&gguf, &bytes, *tensor_type) {
                check(*tensor_type, &row, &values);
            }
        }
    }

    #[test]
    fn numbers_equal_those_of_the_reference_implementation() {
        check_all(|tensor_type, row, expected| {
            let mut values = vec![0.0; expected.len()];
            read(tensor_type, row, &mut values);
            assert_eq!(values, expected, "{tensor_type:?}");
        });
    }

    #[test]
    fn integers_represent_the_same_numbers() {
        check_all(|tensor_type, row, expected| {
            let Some(format) = integer_format(tensor_type) else {
                assert!([TensorType::Q2K, TensorType::Q3K, TensorType::Q6K].contains(&tensor_type));
                return;
            };
            let row = integer_row(tensor_type, row);
            let num_groups = expected.len() / format.group;
            assert_eq!((row.levels.len(), row.scales.len()), (expected.len(), num_groups));
            assert_eq!(row.zeros.len(), if format.has_zeros { num_groups } else { 0 });
            assert!(row.levels.iter().all(|level| usize::from(*level) < 1 << format.width.bits()));
            for (k, (value, expected)) in row.values(format).zip(expected).enumerate() {
                // Symmetric formats are exact. With zero points the order of operations differs.
                let group = k / format.group;
                let size = |number: f32| (row.scales[group] * number).abs();
                let bound = row.zeros.get(group).map_or(0.0, |zero| size(*zero) + size(row.levels[k].into()));
                let bound = bound * 2.0 * f32::EPSILON;
                assert!((value - expected).abs() <= bound, "{tensor_type:?} {k}: {value} not {expected}");
            }
        });
    }
}
