//! Weights as small integers: what quantised files hold, and what quantising on load makes.
//!
//! It does not know how files lay them out, nor how kernels want them.

use std::ops::Range;

/// What kernels take: numbers that share a scale are so many, or a multiple of it.
pub const MIN_GROUP: usize = 32;

/// Numbers that share a scale, at most.
pub const MAX_GROUP: usize = 1024;

/// How the numbers of a matrix became integers. Every `group` numbers of a row, the last ones perhaps fewer, share a
/// scale, and a zero if they have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IntegerFormat {
    /// Bits of a number.
    pub width: IntegerWidth,
    /// A multiple of [`MIN_GROUP`], at most [`MAX_GROUP`].
    pub group: usize,
    /// Whether groups have zeros of their own; if not, the zero is the [middle](IntegerWidth::middle).
    pub has_zeros: bool,
}

impl IntegerFormat {
    /// Activations that share a scale: whole groups of weights, together some 256 numbers. Where groups are small, a
    /// product of both scales for each of them would cost as much as its multiplications.
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

    /// The level that stands for zero where nothing else is said.
    #[inline]
    pub fn middle(self) -> u8 {
        1 << (self.bits() - 1)
    }
}

/// A row: number k is `scales[k / group] * (levels[k] - zeros[k / group])`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IntegerRow {
    /// In `0..16` or `0..256`.
    pub levels: Vec<u8>,
    /// One for each group.
    pub scales: Vec<f32>,
    /// Empty when the format has none.
    pub zeros: Vec<f32>,
}

impl IntegerRow {
    /// Rounds `values` to a symmetric format: the largest of a group becomes the largest level.
    ///
    /// # Panics
    /// When the format has zeros.
    pub fn quantise(values: &[f32], format: IntegerFormat) -> IntegerRow {
        assert!(!format.has_zeros, "quantising is symmetric");
        let middle = f32::from(format.width.middle());
        let mut row = IntegerRow::default();
        for group in values.chunks(format.group) {
            // The end that is one level longer goes to whichever sign has the largest number.
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

    /// The numbers `range`, which begins at a group and ends at one, or with the row.
    pub fn part(mut self, range: Range<usize>, group: usize) -> IntegerRow {
        if range == (0..self.levels.len()) {
            return self;
        }
        assert!(range.start.is_multiple_of(group), "a group is whole");
        let groups = range.start / group..range.end.div_ceil(group);
        self.levels = self.levels[range].to_vec();
        self.scales = self.scales[groups.clone()].to_vec();
        if !self.zeros.is_empty() {
            self.zeros = self.zeros[groups].to_vec();
        }
        self
    }

    /// `len` numbers that are zero, whatever they are multiplied with.
    pub fn zeroes(len: usize, format: IntegerFormat) -> IntegerRow {
        let groups = vec![0.0; len.div_ceil(format.group)];
        let zeros = if format.has_zeros { groups.clone() } else { vec![] };
        IntegerRow { levels: vec![0; len], scales: groups, zeros }
    }

    /// The numbers that the row stands for.
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
    fn quantised_numbers_are_half_a_level_off_at_most() {
        for width in [IntegerWidth::Four, IntegerWidth::Eight] {
            for (group, len) in [(32, 64), (32, 33), (128, 100)] {
                let format = IntegerFormat { width, group, has_zeros: false };
                let values = noise(len as u64, len);
                let row = IntegerRow::quantise(&values, format);
                assert_eq!(row.scales.len(), len.div_ceil(group));
                for (k, (value, got)) in values.iter().zip(row.values(format)).enumerate() {
                    // The far end of four bits is one level short.
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
