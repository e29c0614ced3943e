//! How large a batch can be, and the sizes to which batches are padded.

/// Limits of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Tokens of all sequences of a step.
    pub num_rows: usize,
    /// Sequences of a step.
    pub num_sequences: usize,
    /// Tokens of one sequence, including those in the cache.
    pub context_length: usize,
    /// Tokens of the longest prompt that is blended, at most [`MAX_BLENDED`]. 0: none is. Several ranks do not blend.
    pub num_blended: usize,
}

/// Its memory is taken at the start: 41 KiB for each token of an 8 B model.
pub const MAX_BLENDED: usize = 32 << 10;

/// The next size to which batches are padded.
pub fn padded(count: usize) -> usize {
    match count {
        0..=8 => count.next_power_of_two(),
        9..=64 => count.next_multiple_of(8),
        _ => count.next_multiple_of(32),
    }
}
