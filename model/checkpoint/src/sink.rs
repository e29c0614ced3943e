//! The interface of a backend that converts the matrices of a decoder to its own layout.

use crate::integer_choice::{SplitGroup, Tolerance};
use crate::matrix::Matrix;

/// How the outputs of a product are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductKind {
    /// As they are.
    Plain,
    /// The first half are gates of the second half.
    Gated,
}

/// Receives the matrices of a decoder.
pub trait MatrixSink {
    /// The backend's own matrix type.
    type Matrix;

    /// Adds a matrix made of `parts` one after the other; all parts have the same number of columns.
    ///
    /// # Errors
    /// When the integer format's groups are cut at a part's first or last column.
    fn add(
        &mut self,
        parts: Vec<Matrix>,
        tolerance: Tolerance,
        kind: ProductKind,
    ) -> Result<Self::Matrix, SplitGroup>;
}
