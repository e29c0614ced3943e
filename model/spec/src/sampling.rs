//! Parameters and result of sampling one token from a row of logits, as plain data. The rules are those of the
//! engine's sampler; an executor that samples on the device follows them.

use std::borrow::Cow;

/// How to sample the token after a row. The result depends on these values and the row alone.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenSampling<'a> {
    /// A uniform random number in [0, 1).
    pub random: f64,
    /// Divides the logits. With 0 the token with the largest logit is taken.
    pub temperature: f32,
    /// Keeps only the `top_k` most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keeps the smallest set of most likely tokens whose probabilities add up to this; in (0, 1], 1 is off.
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the largest; in [0, 1), 0 is off.
    pub min_p: f32,
    /// Divides positive logits of the tokens of `counts`, multiplies negative ones.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token of the output.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time the output has it.
    pub frequency_penalty: f32,
    /// The known previous tokens, each once: those of the output, and with a repetition penalty those of the prompt. Empty
    /// when no penalty is set. [`drafted`](Self::drafted) says what drafts change in it.
    pub counts: Cow<'a, [TokenCount]>,
    /// The counts of tokens that drafts before the row changed, by ascending index. So the rows of a sequence share its list.
    pub drafted: Vec<DraftedCount>,
    /// Added to logits by token id, after the penalties. Ids ascend; a device returns the row to the host if they do
    /// not.
    pub logit_bias: Cow<'a, [(u32, f32)]>,
    /// Tokens that cannot be sampled.
    pub masked: Cow<'a, [u32]>,
    /// The host reads the row: a device returns it.
    pub on_host: bool,
    /// A mask restricts the token; see [`SamplingExecutor::mask`](crate::SamplingExecutor::mask).
    pub is_masked: bool,
    /// The number of most likely tokens whose log-probabilities are returned, at most 20; `None` returns none at all.
    pub logprobs: Option<u32>,
}

/// How often a token occurred in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct TokenCount {
    /// Its id.
    pub token: u32,
    /// Occurrences in the output; 0 if the token is only in the prompt.
    pub num_output: u32,
}

/// A count that drafts changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftedCount {
    /// Index in [`TokenSampling::counts`] of the count that this one replaces. New tokens have the indices that follow the list's.
    pub idx: usize,
    /// The token with its occurrences in output and drafts.
    pub count: TokenCount,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: u32,
    /// Present if requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural logarithms of probabilities in the model's own distribution: before bias, penalties, temperature and
/// truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the sampled token.
    pub logprob: f32,
    /// Of the most likely tokens, the most likely first.
    pub top: Vec<(u32, f32)>,
}

/// The logits contain NaN, or their largest value is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidLogits;

/// The result of a sampling executor for one requested row.
#[derive(Clone, Debug, PartialEq)]
pub enum SampledRow<'a> {
    /// The sampled token.
    Sampled(Result<SampledToken, InvalidLogits>),
    /// `[vocab_size]`: the device cannot sample with these parameters, so the host samples.
    Logits(&'a [f32]),
}

/// Greedy: takes the token with the largest logit.
impl Default for TokenSampling<'_> {
    fn default() -> Self {
        TokenSampling {
            random: 0.0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            counts: Cow::Borrowed(&[]),
            drafted: Vec::new(),
            logit_bias: Cow::Borrowed(&[]),
            masked: Cow::Borrowed(&[]),
            on_host: false,
            is_masked: false,
            logprobs: None,
        }
    }
}

impl TokenSampling<'_> {
    /// Whether the token is the likeliest one, whatever the random number is.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// The previous tokens, each once, drafts counted.
    pub fn counted(&self) -> impl Iterator<Item = TokenCount> {
        let num_changed = self.drafted.partition_point(|drafted| drafted.idx < self.counts.len());
        let (changed, new) = self.drafted.split_at(num_changed);
        let mut changed = changed.iter().peekable();
        let listed = self.counts.iter().enumerate().map(move |(idx, &count)| {
            changed.next_if(|drafted| drafted.idx == idx).map_or(count, |drafted| drafted.count)
        });
        listed.chain(new.iter().map(|drafted| drafted.count))
    }

    /// The number of these tokens.
    pub fn num_counted(&self) -> usize {
        self.drafted.last().map_or(0, |last| last.idx + 1).max(self.counts.len())
    }

    /// A copy that borrows nothing, with drafts counted in its list.
    pub fn into_owned(self) -> TokenSampling<'static> {
        TokenSampling {
            counts: self.counted().collect(),
            drafted: Vec::new(),
            logit_bias: Cow::Owned(self.logit_bias.into_owned()),
            masked: Cow::Owned(self.masked.into_owned()),
            ..self
        }
    }

    /// Whether a token that is sampled changes the logits after it. It is counted then, also where nothing is counted yet.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether any parameter changes the logits before sampling.
    pub fn changes_logits(&self) -> bool {
        self.num_counted() > 0 || !self.logit_bias.is_empty() || !self.masked.is_empty()
    }
}
