//! Chooses the integer format in which a matrix is multiplied: that of its file, that of quantising on load, or none.
//!
//! It does not know kernels' layouts or backends.

use baton_model_spec::{IntegerFormat, IntegerWidth, MAX_GROUP, MIN_GROUP};

use crate::matrix::Matrix;

/// How far a matrix may be quantised on load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// To the requested format.
    Any,
    /// To eight bits at least: the head determines every token's logits.
    EightBits,
    /// Not at all: the router selects experts.
    None,
}

/// The choice for all matrices of a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct IntegerChoice {
    /// The format to which layer weights are quantised.
    pub quantise: Option<IntegerFormat>,
    /// Integers of files are dequantised and multiplied as floats.
    pub widen: bool,
}

/// A part cuts a group of numbers that share a scale.
#[derive(Clone, Copy, Debug)]
pub struct SplitGroup {
    /// The part's index.
    pub part_idx: usize,
    /// The column of the cut.
    pub column: usize,
    /// The size of the group.
    pub group: usize,
    /// Parts may be cut at multiples of this.
    pub multiple: usize,
}

impl IntegerChoice {
    /// The integer format of a matrix made of `parts`; `None` if it is multiplied as floats.
    ///
    /// # Errors
    /// When a part cuts a group of that format.
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
        // Groups of files can be divided into smaller ones. Numbers that are quantised here would change.
        let multiple = if self.quantise.is_none() { MIN_GROUP } else { group };
        Err(SplitGroup { part_idx, column, group, multiple })
    }
}

/// The integer format of all parts, or [another](IntegerFormat::OF_OTHER_GROUPS) if they differ or no kernel supports
/// theirs.
pub fn common_format(parts: &[Matrix]) -> IntegerFormat {
    let first = parts[0].integer_format().filter(|format| format.group <= MAX_GROUP);
    let all = parts.iter().all(|part| part.integer_format() == first);
    first.filter(|_| all).unwrap_or(IntegerFormat::OF_OTHER_GROUPS)
}
