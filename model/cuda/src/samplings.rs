//! How the tokens of a step are sampled, as the device reads it, behind the batch in the same copy; and what comes back.
//!
//! A row that the kernel cannot sample, for want of room for its lists, comes back as logits.

use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::sample::{
    CountSampled, NO_LOGPROBS, NO_TOKEN, RowOutcome, RowSampling, SampleRows, lowest_scaled,
};
use baton_model_spec::{InvalidLogits, SampledRow, SampledToken, TokenLogprobs, TokenSampling};

use crate::inputs::Inputs;

/// Of the likeliest tokens, so many at most.
const MAX_TOP: usize = 20;

/// Words of all lists of a step: the tokens before, if there are penalties, for some hundred thousand tokens in all.
const MAX_LISTED: usize = 1 << 20;

/// Memory of a device that sampling needs besides the inputs.
#[derive(Debug)]
pub struct SamplingBuffers {
    /// The tokens of a step's rows, then log-probabilities.
    pub results: Address,
    /// Scratch.
    pub saved: Address,
}

/// The samplings of one step.
#[derive(Debug, Default)]
pub struct SamplingInputs {
    rows: Vec<RowSampling>,
    counts: Vec<u32>,
    biases: Vec<u32>,
    stops: Vec<u32>,
    num_saved: usize,
    /// Of each row, whether it is sampled here, and how many likely tokens are told.
    wanted: Vec<Wanted>,
}

/// What a row came to, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Token { num_top: Option<usize> },
    Logits,
}

/// Where the parts are, in bytes from the first word of the inputs.
#[derive(Clone, Copy, Debug)]
pub struct SamplingParts {
    rows: usize,
    counts: usize,
    biases: usize,
    stops: usize,
}

/// What is copied back of the rows of a step.
#[derive(Debug, Default)]
pub struct Results {
    wanted: Vec<Wanted>,
}

impl SamplingInputs {
    /// Bytes for so many rows, and where the token of each comes from.
    pub fn max_bytes(num_rows: usize) -> usize {
        num_rows * (size_of::<RowSampling>() + 4) + MAX_LISTED * 4 + 5 * 16
    }

    /// Bytes of [`SamplingBuffers`] for so many rows: of results, and of scratch.
    pub fn buffer_bytes(num_rows: usize) -> [usize; 2] {
        [num_rows * (8 + 8 * MAX_TOP), MAX_LISTED / 2 * 4]
    }

    /// Takes them down; what the device then sends back. Lists of a step that follows another have a place for what that
    /// one samples.
    pub fn fill(&mut self, samplings: &[TokenSampling<'_>], is_following: bool) -> Results {
        let SamplingInputs { rows, counts, biases, stops, num_saved, wanted } = self;
        rows.clear();
        counts.clear();
        biases.clear();
        stops.clear();
        wanted.clear();
        *num_saved = 0;
        for sampling in samplings {
            let is_spare = is_following && !sampling.counts.is_empty();
            let num_counts = sampling.counts.len() + usize::from(is_spare);
            let num_listed = 2 * num_counts + 2 * sampling.logit_bias.len() + sampling.masked.len();
            let has_room = counts.len() + biases.len() + stops.len() + num_listed <= MAX_LISTED;
            let num_top = sampling.logprobs.map(|num_top| num_top as usize);
            let are_distinct = sampling.logit_bias.is_sorted_by(|a, b| a.0 < b.0);
            if !has_room || !are_distinct || num_top > Some(MAX_TOP) {
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
                padding: 0,
            });
            counts.extend(sampling.counts.iter().flat_map(|count| [count.token, count.num_output]));
            if is_spare {
                counts.extend([NO_TOKEN, 0]);
            }
            biases.extend(sampling.logit_bias.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]));
            stops.extend(&*sampling.masked);
            *num_saved += num_counts + sampling.logit_bias.len();
        }
        Results { wanted: wanted.clone() }
    }

    /// Adds them to what is copied to the device.
    pub fn append_to(&self, inputs: &mut Inputs) -> SamplingParts {
        SamplingParts {
            rows: inputs.append(bytemuck::cast_slice(&self.rows)),
            counts: inputs.append(&self.counts),
            biases: inputs.append(&self.biases),
            stops: inputs.append(&self.stops),
        }
    }

    /// Whether any row has a list of the tokens before.
    pub fn has_counts(&self) -> bool {
        !self.counts.is_empty()
    }

    /// Counts what the step before sampled, after the rows that `sources` says.
    pub fn count_sampled(
        &self,
        parts: &SamplingParts,
        base: Address,
        sources: usize,
        sampled: Address,
    ) -> CountSampled {
        CountSampled {
            rows: base.add(parts.rows),
            counts: base.add(parts.counts),
            sources: base.add(sources),
            sampled,
            num_rows: self.rows.len() as u64,
        }
    }

    /// Samples after `num_rows` rows from the `first` on, whose logits begin at `logits`; the inputs begin at `base`.
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
        let result = |offset: usize, row_bytes: usize| buffers.results.add(offset + first * row_bytes);
        SampleRows {
            logits,
            rows: base.add(parts.rows + first * size_of::<RowSampling>()),
            counts: base.add(parts.counts),
            biases: base.add(parts.biases),
            stops: base.add(parts.stops),
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

/// Where parts of the results of a step are, in bytes behind its tokens.
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
    /// Bytes to copy: of tokens alone, where no row wants log-probabilities.
    pub fn num_bytes(&self) -> usize {
        let at = Offsets::of(self.wanted.len());
        let tells_logprobs = |wanted: &Wanted| matches!(wanted, Wanted::Token { num_top: Some(_) });
        if self.wanted.iter().any(tells_logprobs) { at.end } else { at.logprobs }
    }

    /// Rows that were not sampled.
    pub fn left(&self) -> impl Iterator<Item = usize> {
        let rows = self.wanted.iter().enumerate();
        rows.filter(|(_, wanted)| **wanted == Wanted::Logits).map(|(row_idx, _)| row_idx)
    }

    /// What `bytes` say, and the `logits` of those that were not sampled.
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
