//! Samples tokens from rows of logits: `kernels/sample.cu`.
//!
//! The rules and the random numbers are those of the engine's sampler on the host. The kernel adds weights in f32
//! within a part of a row and in f64 across parts; the host adds all of them in f64. The token therefore differs from
//! the host's when the random number, or the limit of top-p, is within about 1e-6 of the boundary between two tokens,
//! relative to the total weight. There are two more differences. Among tokens whose weights round to the same float,
//! top-p prefers the larger logit; the host prefers the smaller id. If only stop ids are finite, a token that the
//! model excludes stays excluded.

#[cfg(doc)]
use baton_model_spec::TokenCount;

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

/// Threads of a block, which is also the number of tokens that it sorts at a time.
pub const THREADS: u32 = 512;

pub fn source() -> KernelSource {
    source_with(THREADS)
}

/// [`source`] with another number of threads per block.
pub fn source_with(threads: u32) -> KernelSource {
    KernelSource { file: "sample.cu", defines: vec![("SAMPLE_THREADS", u64::from(threads))] }
}

/// How the token of one row is sampled. Lists are ranges in the lists of all rows.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct RowSampling {
    /// In [0, 1): the random number of the host's sampler for this output token.
    pub random: f64,
    /// Index in [`SampleRows::counts`].
    pub first_count: u32,
    pub num_counts: u32,
    /// Index in [`SampleRows::biases`].
    pub first_bias: u32,
    pub num_biases: u32,
    /// Index in [`SampleRows::stops`]. The list is empty once the output has `min_tokens` tokens.
    pub first_stop: u32,
    pub num_stops: u32,
    /// Index in [`SampleRows::saved`]: the row's own `num_counts + num_biases` numbers, if log-probabilities are
    /// wanted.
    pub first_saved: u32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// 0: the token with the largest logit.
    pub temperature: f32,
    /// The lowest logit of a candidate, relative to the largest and divided by the temperature: [`lowest_scaled`].
    pub lowest_scaled: f32,
    /// 0: off.
    pub top_k: u32,
    /// 1: off.
    pub top_p: f32,
    /// Number of likeliest tokens whose log-probabilities are wanted, at most [`SampleRows::max_top`].
    /// [`NO_LOGPROBS`]: not even that of the sampled token.
    pub num_top: u32,
    /// One more than the row's place in [`SampleRows::masks`]. 0: every token may come.
    pub mask: u32,
}

// SAFETY: numbers without padding. All zero bits are valid.
unsafe impl bytemuck::Zeroable for RowSampling {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for RowSampling {}

pub const NO_LOGPROBS: u32 = u32::MAX;

/// An entry of a list that is skipped.
pub const NO_TOKEN: u32 = u32::MAX;

/// The result of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOutcome {
    Token(u32),
    /// The row holds NaN, or its maximum is not finite.
    InvalidLogits,
}

impl RowOutcome {
    /// Reads the kernel's output for a row.
    pub fn read(word: u32) -> RowOutcome {
        if word == u32::MAX { RowOutcome::InvalidLogits } else { RowOutcome::Token(word) }
    }
}

/// [`RowSampling::lowest_scaled`] for `min_p`. Candidates below e^-40 of the largest are dropped, as on the host.
pub fn lowest_scaled(min_p: f32) -> f32 {
    if min_p > 0.0 { min_p.ln().max(-40.0) } else { -40.0 }
}

/// Samples a token for each row, and computes log-probabilities where they are wanted.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SampleRows {
    /// `[rows][vocab]`, f32. The kernel overwrites them with penalties, biases and stop ids applied.
    pub logits: Address,
    /// `[rows]`, [`RowSampling`].
    pub rows: Address,
    /// [`TokenCount`]s. A token occurs once in a row's range.
    pub counts: Address,
    /// `[..][2]`: a token, u32, and the f32 that is added to its logit after the penalties. A token occurs once in a
    /// row's range. Rows may share ranges.
    pub biases: Address,
    /// Token ids. Rows may share ranges.
    pub stops: Address,
    /// `[masked rows][vocab.div_ceil(32)]`, u32: a bit for each token that may come.
    pub masks: Address,
    /// f32, scratch.
    pub saved: Address,
    /// `[rows]`, output: token ids, decoded by [`RowOutcome::read`].
    pub tokens: Address,
    /// `[rows]`, f32, output: the token's log-probability before penalties. Not written for rows that want none or
    /// have invalid logits.
    pub logprobs: Address,
    /// `[rows][max_top]`, u32, output: the likeliest tokens in descending order, the smaller id first among equals.
    pub top_ids: Address,
    /// `[rows][max_top]`, f32.
    pub top_logprobs: Address,
    pub vocab: u32,
    pub max_top: u32,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `SampleRows` in the kernel file.
unsafe impl Kernel for SampleRows {
    const NAME: &'static str = "sample_rows";

    fn shape(&self) -> LaunchShape {
        // A sum for each segment of 512 numbers, as in the kernel file.
        let shared_bytes = self.vocab.div_ceil(512) * 4;
        LaunchShape { grid: [self.num_rows as u32, 1, 1], threads: THREADS, shared_bytes }
    }
}

/// Counts `sampled[sources[row]]` in the count list of each row. A step that follows another one in flight knows only
/// the tokens before that step's. The last entry of such a list is free for a new token and holds [`NO_TOKEN`] until
/// then.
///
/// Reads 8 bytes per token of the lists: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CountSampled {
    /// [`SampleRows::rows`]
    pub rows: Address,
    /// [`SampleRows::counts`]
    pub counts: Address,
    /// `[rows]`, u32: rows of the previous step.
    pub sources: Address,
    /// [`SampleRows::tokens`] of the previous step.
    pub sampled: Address,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `CountSampled` in the kernel file.
unsafe impl Kernel for CountSampled {
    const NAME: &'static str = "count_sampled";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_rows as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// `tokens[i] = sampled[sources[i]]`: a step takes the tokens that the previous step sampled. Moves 12 bytes per
/// token: bound by the launch.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TakeTokens {
    /// `[num]`, u32.
    pub tokens: Address,
    /// `[num]`, u32: rows of the previous step.
    pub sources: Address,
    /// [`SampleRows::tokens`] of the previous step. An invalid token produces a row that is not read.
    pub sampled: Address,
    pub num: u64,
}

// SAFETY: the fields are those of `TakeTokens` in the kernel file.
unsafe impl Kernel for TakeTokens {
    const NAME: &'static str = "take_tokens";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}
