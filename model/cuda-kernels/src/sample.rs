//! Tokens from rows of logits: `kernels/sample.cu`.
//!
//! The rules are those of the engine's sampler on the host, and so are the random numbers. Weights are added up in f32
//! within a row's parts and in f64 across them, on the host in f64 alone: so a token differs from the host's where the
//! random number, or what top-p asks for, is within some 1e-6 of the whole weight of the boundary between two tokens.
//! Two more differences: top-p takes tokens whose weights round to the same float in the order of their logits, the host
//! in that of their ids; and where nothing but stop ids is finite, a token that the model excludes stays excluded.

#[cfg(doc)]
use baton_model_spec::TokenCount;

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

/// Threads of a block, and tokens that it can sort at a time.
pub const THREADS: u32 = 512;

pub fn source() -> KernelSource {
    source_with(THREADS)
}

/// The same, with so many threads to a block.
pub fn source_with(threads: u32) -> KernelSource {
    KernelSource { file: "sample.cu", defines: vec![("SAMPLE_THREADS", u64::from(threads))] }
}

/// How the token of a row is chosen: what the kernel reads of each row, a step. Lists are ranges of the lists of all rows.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct RowSampling {
    /// In [0, 1): the one that the host's sampler takes for this output token.
    pub random: f64,
    /// In [`SampleRows::counts`].
    pub first_count: u32,
    pub num_counts: u32,
    /// In [`SampleRows::biases`].
    pub first_bias: u32,
    pub num_biases: u32,
    /// In [`SampleRows::stops`]; none once there are `min_tokens`.
    pub first_stop: u32,
    pub num_stops: u32,
    /// In [`SampleRows::saved`]: a range of `num_counts + num_biases` of the row's own, where log-probabilities are wanted.
    pub first_saved: u32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// 0 takes the largest.
    pub temperature: f32,
    /// Candidates are at least this far from the largest, when divided by the temperature: [`lowest_scaled`].
    pub lowest_scaled: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// Of so many of the likeliest tokens the log-probabilities are wanted, at most [`SampleRows::max_top`];
    /// [`NO_LOGPROBS`] if not even that of the token.
    pub num_top: u32,
    pub padding: u32,
}

// SAFETY: numbers without padding, and all zeroes are numbers.
unsafe impl bytemuck::Zeroable for RowSampling {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for RowSampling {}

pub const NO_LOGPROBS: u32 = u32::MAX;

/// A token of a list that is to be passed over.
pub const NO_TOKEN: u32 = u32::MAX;

/// What a row came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOutcome {
    Token(u32),
    /// The row holds NaN, or no finite largest number.
    InvalidLogits,
}

impl RowOutcome {
    /// What the kernel wrote for a row.
    pub fn read(word: u32) -> RowOutcome {
        if word == u32::MAX { RowOutcome::InvalidLogits } else { RowOutcome::Token(word) }
    }
}

/// What `min_p` leaves as [`RowSampling::lowest_scaled`]: nothing below e^-40 of the largest, as on the host.
pub fn lowest_scaled(min_p: f32) -> f32 {
    if min_p > 0.0 { min_p.ln().max(-40.0) } else { -40.0 }
}

/// A token for each row, and log-probabilities where they are wanted.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SampleRows {
    /// `[rows][vocab]`, f32. Penalties, bias and stop ids are written into them.
    pub logits: Address,
    /// `[rows]`, [`RowSampling`].
    pub rows: Address,
    /// [`TokenCount`]s, a token once in a row's range.
    pub counts: Address,
    /// `[..][2]`: a token, u32, and what is added to its logit after the penalties, f32. A token once in a row's range; rows may
    /// share ranges.
    pub biases: Address,
    /// Token ids; rows may share ranges.
    pub stops: Address,
    /// f32. Scratch.
    pub saved: Address,
    /// `[rows]`: a token's id, to be read as [`RowOutcome`].
    pub tokens: Address,
    /// `[rows]`, f32: of the token, in the row as it came. Not written for rows that want none, or cannot be used.
    pub logprobs: Address,
    /// `[rows][max_top]`, u32: the likeliest tokens, likeliest first, the smallest id of equals.
    pub top_ids: Address,
    /// `[rows][max_top]`, f32.
    pub top_logprobs: Address,
    pub vocab: u32,
    pub max_top: u32,
    pub num_rows: u64,
}

// SAFETY: as `SampleRows` in the file.
unsafe impl Kernel for SampleRows {
    const NAME: &'static str = "sample_rows";

    fn shape(&self) -> LaunchShape {
        // A sum for every segment: of 512 numbers, as the file has it.
        let shared_bytes = self.vocab.div_ceil(512) * 4;
        LaunchShape { grid: [self.num_rows as u32, 1, 1], threads: THREADS, shared_bytes }
    }
}

/// Counts `sampled[sources[row]]` in the list of each row that has one: a step that follows another is told of the tokens
/// before that one's. The last place of such a list is left for a token that is new; [`NO_TOKEN`] until then.
///
/// Reads 8 bytes a token of the lists: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CountSampled {
    /// [`SampleRows::rows`]
    pub rows: Address,
    /// [`SampleRows::counts`]
    pub counts: Address,
    /// `[rows]`, u32: rows of the step before.
    pub sources: Address,
    /// [`SampleRows::tokens`] of that step.
    pub sampled: Address,
    pub num_rows: u64,
}

// SAFETY: as `CountSampled` in the file.
unsafe impl Kernel for CountSampled {
    const NAME: &'static str = "count_sampled";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_rows as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// `tokens[i] = sampled[sources[i]]`: a step that follows another takes what that one sampled. 12 bytes a token: bound by the
/// launch.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TakeTokens {
    /// `[num]`, u32.
    pub tokens: Address,
    /// `[num]`, u32: rows of the step before.
    pub sources: Address,
    /// [`SampleRows::tokens`] of that step. One that is no token gives a row that is not read.
    pub sampled: Address,
    pub num: u64,
}

// SAFETY: as `TakeTokens` in the file.
unsafe impl Kernel for TakeTokens {
    const NAME: &'static str = "take_tokens";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}
