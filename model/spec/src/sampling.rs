//! How a token is sampled from a row of logits, and the result, as plain data. The rules are those of the engine's
//! sampler; an executor that samples itself follows them.

use std::borrow::Cow;

/// How the token after a row is sampled. Everything that it depends on, besides the row, is here.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenSampling<'a> {
    /// In [0, 1).
    pub random: f64,
    /// Divides the logits; 0 takes the largest.
    pub temperature: f32,
    /// Only the `top_k` most likely tokens; 0 is off.
    pub top_k: u32,
    /// Only the fewest most likely tokens that together have this probability; in (0, 1], 1 is off.
    pub top_p: f32,
    /// Only tokens at least this fraction as likely as the likeliest; in [0, 1), 0 is off.
    pub min_p: f32,
    /// Divides positive logits of the tokens of `counts`, multiplies negative ones.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token of the output.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time the output has it.
    pub frequency_penalty: f32,
    /// The tokens before, each once, as far as they are known; empty without penalties.
    pub counts: Cow<'a, [TokenCount]>,
    /// Added to logits by token id, after the penalties. In rising order of ids, or a device leaves the row to the host.
    pub logit_bias: Cow<'a, [(u32, f32)]>,
    /// Tokens that cannot be sampled.
    pub masked: Cow<'a, [u32]>,
    /// Whether log-probabilities are wanted, and of how many of the likeliest tokens; at most 20.
    pub logprobs: Option<u32>,
}

/// A token that a sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct TokenCount {
    /// Its id.
    pub token: u32,
    /// How often the output has it; 0 for one that only the prompt has.
    pub num_output: u32,
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: u32,
    /// Present when they were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural logarithms of probabilities in the model's own distribution: before bias, penalties,
/// temperature and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// Of the likeliest tokens, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The logits hold NaN, or no finite largest value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidLogits;

/// What an executor that samples returns for a wanted row.
#[derive(Clone, Debug, PartialEq)]
pub enum SampledRow<'a> {
    /// The token that it sampled.
    Sampled(Result<SampledToken, InvalidLogits>),
    /// `[vocab_size]`: it could not sample as it was told, and leaves that to its caller.
    Logits(&'a [f32]),
}

/// The largest logit, and nothing else is asked for.
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
            logit_bias: Cow::Borrowed(&[]),
            masked: Cow::Borrowed(&[]),
            logprobs: None,
        }
    }
}

impl TokenSampling<'_> {
    /// The same, borrowing nothing.
    pub fn into_owned(self) -> TokenSampling<'static> {
        TokenSampling {
            counts: Cow::Owned(self.counts.into_owned()),
            logit_bias: Cow::Owned(self.logit_bias.into_owned()),
            masked: Cow::Owned(self.masked.into_owned()),
            ..self
        }
    }

    /// Whether anything changes the logits before a token is sampled.
    pub fn changes_logits(&self) -> bool {
        !(self.counts.is_empty() && self.logit_bias.is_empty() && self.masked.is_empty())
    }
}
