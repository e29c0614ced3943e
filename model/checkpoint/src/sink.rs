//! What takes the matrices of a decoder: a backend, which makes of them what it multiplies with.

use crate::integer_choice::{SplitGroup, Tolerance};
use crate::matrix::Matrix;

/// What a product's outputs are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductKind {
    /// They are used as they are.
    Plain,
    /// The first half are gates of the second half.
    Gated,
}

/// Takes the matrices of a decoder.
pub trait MatrixSink {
    /// What it makes of them.
    type Matrix;

    /// Takes a matrix made of `parts`, which have as many columns, one after the other.
    ///
    /// # Errors
    /// When it would be multiplied as integers in groups of which a part has not all.
    fn add(
        &mut self,
        parts: Vec<Matrix>,
        tolerance: Tolerance,
        kind: ProductKind,
    ) -> Result<Self::Matrix, SplitGroup>;
}
