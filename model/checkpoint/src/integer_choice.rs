//! Which integers a matrix is multiplied as: those that files hold, those that quantising on load makes, or none.
//!
//! It does not know how kernels want them, nor where they are computed with.

use baton_model_spec::{IntegerFormat, IntegerWidth, MAX_GROUP, MIN_GROUP};

use crate::matrix::Matrix;

/// How much quantising on load a matrix bears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// As much as was asked for.
    Any,
    /// Eight bits at least: every token's logits come from it.
    EightBits,
    /// None: it chooses experts.
    None,
}

/// What was asked for, of all matrices of a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct IntegerChoice {
    /// Weights of layers are quantised to it.
    pub quantise: Option<IntegerFormat>,
    /// Integers of files are multiplied as the floats that they stand for.
    pub widen: bool,
}

/// A part has some of the numbers that share a scale.
#[derive(Clone, Copy, Debug)]
pub struct SplitGroup {
    /// Which part.
    pub part_idx: usize,
    /// Where it begins or ends among them.
    pub column: usize,
    /// How many share the scale.
    pub group: usize,
    /// Parts may begin and end at multiples of it.
    pub multiple: usize,
}

impl IntegerChoice {
    /// The integers of a matrix made of `parts`; `None` if it is multiplied as floats.
    ///
    /// # Errors
    /// When a part has not all numbers of a group of these integers.
    pub fn format_of(
        &self,
        parts: &[Matrix],
        tolerance: Tolerance,
    ) -> Result<Option<IntegerFormat>, SplitGroup> {
        let are_integers = parts.iter().all(Matrix::is_integers) && !self.widen;
        let format = match (self.quantise, tolerance) {
            (Some(format), Tolerance::Any) => format,
            (Some(format), Tolerance::EightBits) => IntegerFormat { width: IntegerWidth::Eight, ..format },
            (None, Tolerance::Any | Tolerance::EightBits) if are_integers => common_format(parts),
            _ => return Ok(None),
        };
        let split = parts.iter().enumerate().find_map(|(idx, part)| Some((idx, part.splits(format)?)));
        let Some((part_idx, column)) = split else { return Ok(Some(format)) };
        let group = format.group;
        // Groups of files have smaller ones within them; numbers that are quantised here would be others.
        let multiple = if self.quantise.is_none() { MIN_GROUP } else { group };
        Err(SplitGroup { part_idx, column, group, multiple })
    }
}

/// The format of integers that all parts have. Where they differ, or where there is no kernel for it, it is one that
/// loses little: in groups of 32, eight bits are off by 1/254 of the largest number at most.
pub fn common_format(parts: &[Matrix]) -> IntegerFormat {
    let first = parts[0].integer_format().filter(|format| format.group <= MAX_GROUP);
    let all = parts.iter().all(|part| part.integer_format() == first);
    let otherwise = IntegerFormat { width: IntegerWidth::Eight, group: 32, has_zeros: false };
    first.filter(|_| all).unwrap_or(otherwise)
}
