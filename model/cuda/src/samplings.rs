//! The sampling inputs of a step in the device's format, and the results. The inputs follow the batch in the same
//! copy.
//!
//! A row that the kernel cannot sample, because its lists do not fit or the host has to sample it, comes back as logits.

use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::sample::{
    CountSampled, NO_LOGPROBS, NO_TOKEN, RowOutcome, RowSampling, SampleRows, lowest_scaled,
};
use baton_model_spec::{InvalidLogits, SampledRow, SampledToken, TokenLogprobs, TokenSampling};

use crate::inputs::Inputs;

/// The largest number of likeliest tokens that are returned.
const MAX_TOP: usize = 20;

/// Words of all lists of a step. With penalties that is enough for some hundred thousand earlier tokens.
const MAX_LISTED: usize = 1 << 20;

/// Device memory of sampling, in addition to the inputs.
#[derive(Debug)]
pub struct SamplingBuffers {
    /// The tokens of a step's rows, then their log-probabilities.
    pub results: Address,
    /// Scratch.
    pub saved: Address,
    /// Of up to `max_masked` rows.
    pub masks: Address,
    pub max_masked: usize,
}

/// The samplings of one step.
#[derive(Debug, Default)]
pub struct SamplingInputs {
    rows: Vec<RowSampling>,
    counts: Vec<u32>,
    biases: Vec<u32>,
    stops: Vec<u32>,
    num_saved: usize,
    num_masked: usize,
    /// The wanted result of each row.
    wanted: Vec<Wanted>,
}

/// The result of a row: a token with its `num_top` likeliest tokens, or logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Token { num_top: Option<usize> },
    Logits,
}

/// Offsets of the parts, in bytes from the first word of the inputs.
#[derive(Clone, Copy, Debug)]
pub struct SamplingParts {
    rows: usize,
    counts: usize,
    biases: usize,
    stops: usize,
}

/// The layout of a step's results.
#[derive(Debug, Default)]
pub struct Results {
    wanted: Vec<Wanted>,
}

impl SamplingInputs {
    /// Bytes of the inputs for `num_rows` rows, including the source of each row's token.
    pub fn max_bytes(num_rows: usize) -> usize {
        num_rows * (size_of::<RowSampling>() + 4) + MAX_LISTED * 4 + 5 * 16
    }

    /// Bytes of [`SamplingBuffers`] for `num_rows` rows: results and scratch.
    pub fn buffer_bytes(num_rows: usize) -> [usize; 2] {
        [num_rows * (8 + 8 * MAX_TOP), MAX_LISTED / 2 * 4]
    }

    /// Fills the inputs with `samplings`. Returns the layout of the results. In a step that follows another step in
    /// flight, the count list of each row with penalties has a free entry for the token that the other step samples. The
    /// first `max_masked` masked rows have room for their masks.
    pub fn fill(
        &mut self,
        samplings: &[TokenSampling<'_>],
        is_following: bool,
        max_masked: usize,
    ) -> Results {
        let SamplingInputs { rows, counts, biases, stops, num_saved, num_masked, wanted } = self;
        rows.clear();
        counts.clear();
        biases.clear();
        stops.clear();
        wanted.clear();
        (*num_saved, *num_masked) = (0, 0);
        for sampling in samplings {
            let is_spare = is_following && sampling.has_penalties();
            let num_counts = sampling.num_counted() + usize::from(is_spare);
            let num_listed = 2 * num_counts + 2 * sampling.logit_bias.len() + sampling.masked.len();
            let is_listed = counts.len() + biases.len() + stops.len() + num_listed <= MAX_LISTED;
            let num_top = sampling.logprobs.map(|num_top| num_top as usize);
            let are_distinct = sampling.logit_bias.is_sorted_by(|a, b| a.0 < b.0);
            *num_masked += usize::from(sampling.is_masked);
            let has_room = is_listed && (!sampling.is_masked || *num_masked <= max_masked);
            if sampling.on_host || !has_room || !are_distinct || num_top > Some(MAX_TOP) {
                wanted.push(Wanted::Logits);
                rows.push(bytemuck::Zeroable::zeroed());
                continue;
            }
            wanted.push(Wanted::Token { num_top });
            rows.push(RowSampling {
                random: sampling.random,
                first_count: counts.len() as u32 / 2,
                num_counts: num_counts as u32,
                first_bias: biases.len() as u32 / 2,
                num_biases: sampling.logit_bias.len() as u32,
                first_stop: stops.len() as u32,
                num_stops: sampling.masked.len() as u32,
                first_saved: *num_saved as u32,
                repetition_penalty: sampling.repetition_penalty,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                temperature: sampling.temperature,
                lowest_scaled: lowest_scaled(sampling.min_p),
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                num_top: num_top.map_or(NO_LOGPROBS, |num_top| num_top as u32),
                mask: if sampling.is_masked { *num_masked as u32 } else { 0 },
            });
            let first = counts.len();
            counts.extend(sampling.counts.iter().flat_map(|count| [count.token, count.num_output]));
            counts.resize(first + 2 * sampling.num_counted(), 0);
            for drafted in &sampling.drafted {
                let at = first + 2 * drafted.idx;
                counts[at..at + 2].copy_from_slice(&[drafted.count.token, drafted.count.num_output]);
            }
            if is_spare {
                counts.extend([NO_TOKEN, 0]);
            }
            biases.extend(sampling.logit_bias.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]));
            stops.extend(&*sampling.masked);
            *num_saved += num_counts + sampling.logit_bias.len();
        }
        Results { wanted: wanted.clone() }
    }

    /// Appends the parts to the inputs of the step.
    pub fn append_to(&self, inputs: &mut Inputs) -> SamplingParts {
        SamplingParts {
            rows: inputs.append(bytemuck::cast_slice(&self.rows)),
            counts: inputs.append(&self.counts),
            biases: inputs.append(&self.biases),
            stops: inputs.append(&self.stops),
        }
    }

    /// Rows whose masks are given before they are sampled.
    pub fn num_masked(&self) -> usize {
        self.num_masked
    }

    /// Whether any row has a list of counts.
    pub fn has_counts(&self) -> bool {
        !self.counts.is_empty()
    }

    /// The kernel that counts the tokens of the previous step's rows `sources`.
    pub fn count_sampled(
        &self,
        parts: &SamplingParts,
        base: Address,
        sources: usize,
        sampled: Address,
    ) -> CountSampled {
        CountSampled {
            rows: base.offset_by(parts.rows),
            counts: base.offset_by(parts.counts),
            sources: base.offset_by(sources),
            sampled,
            num_rows: self.rows.len() as u64,
        }
    }

    /// The kernel that samples for `num_rows` rows from `first` on. Their logits start at `logits`, the inputs at
    /// `base`.
    pub fn kernel(
        &self,
        parts: &SamplingParts,
        base: Address,
        buffers: &SamplingBuffers,
        logits: Address,
        vocab_size: usize,
        (first, num_rows): (usize, usize),
    ) -> SampleRows {
        let at = Offsets::of(self.rows.len());
        let result = |offset: usize, row_bytes: usize| buffers.results.offset_by(offset + first * row_bytes);
        SampleRows {
            logits,
            rows: base.offset_by(parts.rows + first * size_of::<RowSampling>()),
            counts: base.offset_by(parts.counts),
            biases: base.offset_by(parts.biases),
            stops: base.offset_by(parts.stops),
            masks: buffers.masks,
            saved: buffers.saved,
            tokens: result(0, 4),
            logprobs: result(at.logprobs, 4),
            top_ids: result(at.top_ids, 4 * MAX_TOP),
            top_logprobs: result(at.top_logprobs, 4 * MAX_TOP),
            vocab: vocab_size as u32,
            max_top: MAX_TOP as u32,
            num_rows: num_rows as u64,
        }
    }
}

/// Offsets of the parts of a step's results, in bytes.
struct Offsets {
    logprobs: usize,
    top_ids: usize,
    top_logprobs: usize,
    end: usize,
}

impl Offsets {
    fn of(num_rows: usize) -> Offsets {
        let top_bytes = 4 * MAX_TOP * num_rows;
        let top_ids = 8 * num_rows;
        let top_logprobs = top_ids + top_bytes;
        Offsets { logprobs: 4 * num_rows, top_ids, top_logprobs, end: top_logprobs + top_bytes }
    }
}

impl Results {
    /// Bytes to copy back. Without log-probabilities these are the tokens only.
    pub fn num_bytes(&self) -> usize {
        let at = Offsets::of(self.wanted.len());
        let has_logprobs = |wanted: &Wanted| matches!(wanted, Wanted::Token { num_top: Some(_) });
        if self.wanted.iter().any(has_logprobs) { at.end } else { at.logprobs }
    }

    /// Rows that were not sampled.
    pub fn left(&self) -> impl Iterator<Item = usize> {
        let rows = self.wanted.iter().enumerate();
        rows.filter(|(_, wanted)| **wanted == Wanted::Logits).map(|(row_idx, _)| row_idx)
    }

    /// Reads results from `bytes`, and takes the unsampled rows from `logits`.
    pub fn read<'a>(&self, bytes: &[u8], logits: &'a [f32], vocab_size: usize) -> Vec<SampledRow<'a>> {
        let at = Offsets::of(self.wanted.len());
        let word = |offset: usize, idx: usize| {
            let at = offset + 4 * idx;
            u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
        };
        let float = |offset, idx| f32::from_bits(word(offset, idx));
        let mut left = logits.chunks_exact(vocab_size);
        let answer = |(row_idx, wanted): (usize, &Wanted)| match *wanted {
            Wanted::Logits => SampledRow::Logits(left.next().expect("a row for each that was not sampled")),
            Wanted::Token { num_top } => SampledRow::Sampled(match RowOutcome::read(word(0, row_idx)) {
                RowOutcome::InvalidLogits => Err(InvalidLogits),
                RowOutcome::Token(id) => Ok(SampledToken {
                    id,
                    logprobs: num_top.map(|num_top| TokenLogprobs {
                        logprob: float(at.logprobs, row_idx),
                        top: (row_idx * MAX_TOP..row_idx * MAX_TOP + num_top)
                            .map(|idx| (word(at.top_ids, idx), float(at.top_logprobs, idx)))
                            .collect(),
                    }),
                }),
            }),
        };
        self.wanted.iter().enumerate().map(answer).collect()
    }
}
