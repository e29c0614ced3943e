//! What is asked of the engine, what it answers with, and when an answer is over. Plain data: it
//! knows neither blocks nor threads.

use std::collections::HashSet;

pub use baton_model_spec::{SampledToken, TokenLogprobs};

/// One sequence to be continued.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// For logs; need not be unique.
    pub id: String,
    /// The prompt's tokens; at least one.
    pub prompt: Vec<u32>,
    /// Tokens that earlier attempts have delivered. They count as output: for penalties, for
    /// `max_tokens` and `min_tokens`, and for the index of the random number.
    pub output: Vec<u32>,
    /// How tokens are chosen, and when to stop.
    pub sampling: SamplingParams,
    /// Only requests of equal salt share blocks; a tenant's secret, or empty.
    pub cache_salt: String,
    /// Whether tokens may be drafted. It never changes them.
    pub speculation: SpeculationMode,
}

/// Whether the tokens of a request may be drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpeculationMode {
    /// If the engine has a drafter.
    #[default]
    Auto,
    /// Never: one token a step.
    Off,
}

/// How tokens are chosen, and when to stop. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Output tokens after which the sequence ends with [`FinishReason::Length`]; at least one.
    pub max_tokens: u32,
    /// Stop ids cannot be chosen before this many output tokens.
    pub min_tokens: u32,
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Only the `top_k` most likely tokens; 0 is off.
    pub top_k: u32,
    /// Only the fewest most likely tokens that together have this probability; in (0, 1], 1 is off.
    pub top_p: f32,
    /// Only tokens at least this fraction as likely as the likeliest; in [0, 1), 0 is off.
    pub min_p: f32,
    /// Divides positive logits of tokens of prompt and output, multiplies negative ones; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token of the output; in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time the output has it; in [-2, 2].
    pub frequency_penalty: f32,
    /// Added to logits by token id, after the penalties.
    pub logit_bias: Vec<(u32, f32)>,
    /// Equal seeds give equal tokens.
    pub seed: u64,
    /// Tokens that end the sequence with [`FinishReason::Stop`].
    pub stop_token_ids: Vec<u32>,
    /// Whether log-probabilities are wanted, and of how many of the likeliest tokens; at most 20.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            max_tokens: 16,
            min_tokens: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            stop_token_ids: Vec::new(),
            logprobs: None,
        }
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id was chosen; it is the last token that was delivered.
    Stop,
    /// `max_tokens` or the context is used up.
    Length,
    /// Somebody asked for it. The engine itself never says this: a dropped stream hears nothing.
    Abort,
}

/// What is wrong with a [`Request`]. No other engine of this model would take it either, except
/// where the variant says so.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidRequest {
    /// A prompt without tokens.
    #[error("prompt: is empty")]
    EmptyPrompt,
    /// A token id that the model does not have.
    #[error("{field}: token id {token} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// Where it stands.
        field: &'static str,
        /// The id.
        token: u32,
        /// Ids are below this.
        vocab_size: usize,
    },
    /// No room for even one more token.
    #[error("prompt: {num_tokens} tokens leave no room in a context of {context_length}")]
    ContextFull {
        /// Of prompt and delivered output.
        num_tokens: usize,
        /// The longest sequence, prompt and output together.
        context_length: usize,
    },
    /// A number outside its range.
    #[error("{field}: {value} is not {expected}")]
    OutOfRange {
        /// The field's name.
        field: &'static str,
        /// What it was.
        value: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// Every output token had been delivered before.
    #[error("output: {num_output_tokens} tokens are delivered of max_tokens {max_tokens}")]
    NothingLeft {
        /// Delivered by earlier attempts.
        num_output_tokens: usize,
        /// The limit.
        max_tokens: u32,
    },
    /// The sequence may not end yet, and every token would end it.
    #[error("stop_token_ids: all of the vocabulary of {vocab_size}, so nothing may follow before min_tokens")]
    NothingAllowed {
        /// Tokens of the model.
        vocab_size: usize,
    },
}

impl Request {
    /// Whether a model of this vocabulary and context can serve it. Names the first bad field.
    ///
    /// # Errors
    /// When it cannot.
    pub fn validate(&self, vocab_size: usize, context_length: usize) -> Result<(), InvalidRequest> {
        let params = &self.sampling;
        if self.prompt.is_empty() {
            return Err(InvalidRequest::EmptyPrompt);
        }
        let num_tokens = self.prompt.len() + self.output.len();
        if num_tokens >= context_length {
            return Err(InvalidRequest::ContextFull { num_tokens, context_length });
        }
        known("prompt", self.prompt.iter().copied(), vocab_size)?;
        known("output", self.output.iter().copied(), vocab_size)?;
        known("stop_token_ids", params.stop_token_ids.iter().copied(), vocab_size)?;
        known("logit_bias", params.logit_bias.iter().map(|&(token, _)| token), vocab_size)?;
        params.validate()?;
        if params.min_tokens > 0 && covers(&params.stop_token_ids, vocab_size) {
            return Err(InvalidRequest::NothingAllowed { vocab_size });
        }
        if self.output.len() >= params.max_tokens as usize {
            return Err(InvalidRequest::NothingLeft {
                num_output_tokens: self.output.len(),
                max_tokens: params.max_tokens,
            });
        }
        Ok(())
    }

    /// Why the sequence ends with `token` as its newest output, if it does. `num_output_tokens`
    /// counts that token and those of earlier attempts.
    pub fn finish_after(
        &self,
        num_output_tokens: usize,
        token: u32,
        context_length: usize,
    ) -> Option<FinishReason> {
        let params = &self.sampling;
        if num_output_tokens > params.min_tokens as usize && params.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop);
        }
        let used_up = num_output_tokens >= params.max_tokens as usize
            || self.prompt.len() + num_output_tokens >= context_length;
        used_up.then_some(FinishReason::Length)
    }

    /// Tokens of prompt and delivered output: everything whose KV is computed before the next token.
    pub fn num_known_tokens(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// Tokens of the sequence at its longest.
    pub fn max_num_tokens(&self, context_length: usize) -> usize {
        (self.prompt.len() + self.sampling.max_tokens as usize).min(context_length)
    }
}

impl SamplingParams {
    /// Whether every number is in its range. Names the first that is not.
    ///
    /// # Errors
    /// When one is not.
    pub fn validate(&self) -> Result<(), InvalidRequest> {
        // Written so that NaN is outside of every range.
        let penalty = |value: f32| (-2.0..=2.0).contains(&value);
        let checks = [
            (self.max_tokens >= 1, "max_tokens", f64::from(self.max_tokens), "at least 1"),
            (
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f64::from(self.min_tokens),
                "at most max_tokens",
            ),
            (
                self.temperature >= 0.0 && self.temperature.is_finite(),
                "temperature",
                f64::from(self.temperature),
                "a number from 0 on",
            ),
            (self.top_p > 0.0 && self.top_p <= 1.0, "top_p", f64::from(self.top_p), "in (0, 1]"),
            ((0.0..1.0).contains(&self.min_p), "min_p", f64::from(self.min_p), "in [0, 1)"),
            (
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
                "repetition_penalty",
                f64::from(self.repetition_penalty),
                "a number above 0",
            ),
            (
                penalty(self.presence_penalty),
                "presence_penalty",
                f64::from(self.presence_penalty),
                "in [-2, 2]",
            ),
            (
                penalty(self.frequency_penalty),
                "frequency_penalty",
                f64::from(self.frequency_penalty),
                "in [-2, 2]",
            ),
            (
                self.logprobs.unwrap_or(0) <= 20,
                "logprobs",
                f64::from(self.logprobs.unwrap_or(0)),
                "at most 20",
            ),
        ];
        for (holds, field, value, expected) in checks {
            if !holds {
                return Err(InvalidRequest::OutOfRange { field, value, expected });
            }
        }
        if let Some(&(_, value)) = self.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
            let value = f64::from(value);
            return Err(InvalidRequest::OutOfRange { field: "logit_bias", value, expected: "a number" });
        }
        Ok(())
    }
}

fn known(
    field: &'static str,
    mut tokens: impl Iterator<Item = u32>,
    vocab_size: usize,
) -> Result<(), InvalidRequest> {
    match tokens.find(|&token| token as usize >= vocab_size) {
        Some(token) => Err(InvalidRequest::UnknownToken { field, token, vocab_size }),
        None => Ok(()),
    }
}

/// Whether every token is one of `tokens`, which are known.
fn covers(tokens: &[u32], vocab_size: usize) -> bool {
    tokens.len() >= vocab_size && tokens.iter().collect::<HashSet<_>>().len() == vocab_size
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request { prompt: vec![1, 2, 3], ..Request::default() }
    }

    fn with(change: impl FnOnce(&mut Request)) -> Request {
        let mut request = request();
        change(&mut request);
        request
    }

    #[test]
    fn bad_requests_are_refused_by_field() {
        let cases = [
            ("prompt: is empty", with(|r| r.prompt.clear())),
            ("prompt: token id 100 is outside the vocabulary of 100", with(|r| r.prompt[1] = 100)),
            ("output: token id 777", with(|r| r.output = vec![777])),
            ("prompt: 32 tokens leave no room in a context of 32", with(|r| r.prompt = vec![0; 32])),
            ("prompt: 40 tokens leave no room", with(|r| r.output = vec![0; 37])),
            ("max_tokens: 0 is not at least 1", with(|r| r.sampling.max_tokens = 0)),
            ("min_tokens: 17 is not at most max_tokens", with(|r| r.sampling.min_tokens = 17)),
            ("temperature: -1 is not", with(|r| r.sampling.temperature = -1.0)),
            ("temperature: NaN is not", with(|r| r.sampling.temperature = f32::NAN)),
            ("temperature: inf is not", with(|r| r.sampling.temperature = f32::INFINITY)),
            ("top_p: 0 is not in (0, 1]", with(|r| r.sampling.top_p = 0.0)),
            ("top_p: NaN is not", with(|r| r.sampling.top_p = f32::NAN)),
            ("min_p: 1 is not in [0, 1)", with(|r| r.sampling.min_p = 1.0)),
            ("repetition_penalty: 0 is not", with(|r| r.sampling.repetition_penalty = 0.0)),
            ("presence_penalty: 3 is not", with(|r| r.sampling.presence_penalty = 3.0)),
            ("frequency_penalty: NaN is not", with(|r| r.sampling.frequency_penalty = f32::NAN)),
            ("logit_bias: token id 100", with(|r| r.sampling.logit_bias = vec![(100, 1.0)])),
            ("logit_bias: NaN is not a number", with(|r| r.sampling.logit_bias = vec![(1, f32::NAN)])),
            ("stop_token_ids: token id 100", with(|r| r.sampling.stop_token_ids = vec![100])),
            ("logprobs: 21 is not at most 20", with(|r| r.sampling.logprobs = Some(21))),
            (
                "stop_token_ids: all of the vocabulary of 100, so nothing may follow before min_tokens",
                with(|r| (r.sampling.min_tokens, r.sampling.stop_token_ids) = (1, (0..100).collect())),
            ),
            ("output: 16 tokens are delivered of max_tokens 16", with(|r| r.output = vec![0; 16])),
        ];
        for (message, request) in cases {
            let error = request.validate(100, 32).expect_err(message).to_string();
            assert!(error.starts_with(message), "expected {message:?}, got {error:?}");
        }
        assert_eq!(request().validate(100, 32), Ok(()));
    }

    #[test]
    fn a_sequence_ends_by_stop_id_length_or_context() {
        let request = with(|r| {
            r.sampling = SamplingParams {
                max_tokens: 5,
                min_tokens: 2,
                stop_token_ids: vec![7],
                ..SamplingParams::default()
            };
        });
        for (num_output_tokens, token, context_length, expected) in [
            (1, 3, 100, None),
            (2, 7, 100, None), // still among the first min_tokens
            (3, 7, 100, Some(FinishReason::Stop)),
            (5, 7, 100, Some(FinishReason::Stop)),
            (4, 3, 100, None),
            (5, 3, 100, Some(FinishReason::Length)),
            (2, 3, 5, Some(FinishReason::Length)),
            (1, 3, 5, None),
        ] {
            assert_eq!(request.finish_after(num_output_tokens, token, context_length), expected);
        }
    }
}
