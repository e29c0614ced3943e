//! Weights as small integers, from quantised files or quantised on load.
//!
//! This module does not know file layouts or kernel layouts.

use std::ops::Range;

/// The smallest group of numbers that share a scale. Kernels need multiples of it.
pub const MIN_GROUP: usize = 32;

/// The largest group of numbers that share a scale.
pub const MAX_GROUP: usize = 1024;

/// A format of quantised rows. Every `group` numbers of a row share a scale and, if `has_zeros`, a zero point; the
/// last group may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IntegerFormat {
    /// Bits of a number.
    pub width: IntegerWidth,
    /// A multiple of [`MIN_GROUP`], at most [`MAX_GROUP`].
    pub group: usize,
    /// Whether each group has its own zero point. If not, it is the [middle](IntegerWidth::middle) level.
    pub has_zeros: bool,
}

impl IntegerFormat {
    /// The group size of a row with a single scale. Any size would be correct.
    pub const GROUP_OF_ROW: usize = 128;

    /// For integers in groups that no kernel supports: eight bits in groups of 32, which change a number by at most 1/254
    /// of the largest in its group.
    pub const OF_OTHER_GROUPS: IntegerFormat =
        IntegerFormat { width: IntegerWidth::Eight, group: MIN_GROUP, has_zeros: false };

    /// The number of activations that share a scale: whole groups of weights, about 256 numbers together. With one
    /// scale per small group, applying both scales would cost as much as the multiplications.
    #[inline]
    pub fn activation_group(self) -> usize {
        (256 / self.group).max(1) * self.group
    }
}

/// Bits of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IntegerWidth {
    /// 0 to 15.
    Four,
    /// 0 to 255.
    Eight,
}

impl IntegerWidth {
    /// 4 or 8.
    #[inline]
    pub fn bits(self) -> usize {
        match self {
            IntegerWidth::Four => 4,
            IntegerWidth::Eight => 8,
        }
    }

    /// The level that stands for zero if a group has no zero point.
    #[inline]
    pub fn middle(self) -> u8 {
        1 << (self.bits() - 1)
    }
}

/// A quantised row: number `k` is `scales[k / group] * (levels[k] - zeros[k / group])`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IntegerRow {
    /// In `0..16` or `0..256`.
    pub levels: Vec<u8>,
    /// One per group.
    pub scales: Vec<f32>,
    /// One per group; empty if the format has no zero points.
    pub zeros: Vec<f32>,
}

impl IntegerRow {
    /// Quantises `values` to a symmetric format: the number with the largest magnitude in a group gets the outermost
    /// level.
    ///
    /// # Panics
    /// When the format has zero points.
    pub fn quantise(values: &[f32], format: IntegerFormat) -> IntegerRow {
        assert!(!format.has_zeros, "a symmetric format has no zero points");
        let middle = f32::from(format.width.middle());
        let mut row = IntegerRow::default();
        for group in values.chunks(format.group) {
            // The negative side has one level more; the scale's sign gives it to the side with the largest magnitude.
            let largest = group.iter().fold(0.0f32, |max, &v| if v.abs() > max.abs() { v } else { max });
            let scale = match format.width {
                IntegerWidth::Four => largest / -middle,
                IntegerWidth::Eight => largest.abs() / (middle - 1.0),
            };
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            let level =
                |v: &f32| (v * inverse + middle).round_ties_even().clamp(0.0, 2.0 * middle - 1.0) as u8;
            row.levels.extend(group.iter().map(level));
            row.scales.push(scale);
        }
        row
    }

    /// The numbers in `range`, which starts at a group's start and ends at a group's end or the row's end.
    pub fn part(mut self, range: Range<usize>, group: usize) -> IntegerRow {
        if range == (0..self.levels.len()) {
            return self;
        }
        assert!(range.start.is_multiple_of(group), "a part starts at a group's start");
        let groups = range.start / group..range.end.div_ceil(group);
        self.levels = self.levels[range].to_vec();
        self.scales = self.scales[groups.clone()].to_vec();
        if !self.zeros.is_empty() {
            self.zeros = self.zeros[groups].to_vec();
        }
        self
    }

    /// A row of `len` zeros.
    pub fn zeroes(len: usize, format: IntegerFormat) -> IntegerRow {
        let groups = vec![0.0; len.div_ceil(format.group)];
        let zeros = if format.has_zeros { groups.clone() } else { vec![] };
        IntegerRow { levels: vec![0; len], scales: groups, zeros }
    }

    /// Dequantises the row.
    pub fn values(&self, format: IntegerFormat) -> impl Iterator<Item = f32> {
        let middle = f32::from(format.width.middle());
        self.levels.iter().enumerate().map(move |(k, &level)| {
            let group = k / format.group;
            let zero = if format.has_zeros { self.zeros[group] } else { middle };
            self.scales[group] * (f32::from(level) - zero)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_model_testing::noise;

    #[test]
    fn quantisation_is_off_by_half_a_level_at_most() {
        for width in [IntegerWidth::Four, IntegerWidth::Eight] {
            for (group, len) in [(32, 64), (32, 33), (128, 100)] {
                let format = IntegerFormat { width, group, has_zeros: false };
                let values = noise(len as u64, len);
                let row = IntegerRow::quantise(&values, format);
                assert_eq!(row.scales.len(), len.div_ceil(group));
                for (k, (value, got)) in values.iter().zip(row.values(format)).enumerate() {
                    // The other end of four bits has one level less.
                    let levels = if width == IntegerWidth::Four { 1.0 } else { 0.5 };
                    let bound = levels * row.scales[k / group].abs() * 1.0001;
                    assert!((value - got).abs() <= bound, "{width:?} {k}: {got} not {value}");
                }
            }
        }
        let format = IntegerFormat { width: IntegerWidth::Four, group: 32, has_zeros: false };
        let zeros = IntegerRow::quantise(&[0.0; 40], format);
        assert!(zeros.values(format).all(|value| value == 0.0));
    }
}
