//! How tokens are sampled and when a sequence stops, with all defaults filled in, and the only check of these values.

use std::collections::HashSet;

use crate::{
    grammar::{Grammar, MAX_GRAMMAR_BYTES},
    invalid::{InvalidRequest, Problem, check_tokens},
};

/// Most log-probabilities per token, as in OpenAI's API.
pub const MAX_LOGPROBS: u32 = 20;

/// How tokens are sampled, and when to stop. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Output tokens after which the sequence ends with [`FinishReason::Length`](crate::FinishReason::Length); at least
    /// one.
    pub max_tokens: u32,
    /// Stop ids are not sampled before this many output tokens.
    pub min_tokens: u32,
    /// Divides the logits; in [0, 2], 0 is greedy.
    pub temperature: f32,
    /// Only the `top_k` most likely tokens; 0 is off.
    pub top_k: u32,
    /// Only the fewest most likely tokens that together have this probability; in (0, 1], 1 is off.
    pub top_p: f32,
    /// Only tokens at least this fraction as likely as the likeliest; in [0, 1), 0 is off.
    pub min_p: f32,
    /// Divides positive logits of tokens of prompt and output, multiplies negative ones; in (0, 100], 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token of the output; in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time the output has it; in [-2, 2].
    pub frequency_penalty: f32,
    /// Added to logits by token id, after the penalties; in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// Equal seeds give equal tokens.
    pub seed: u64,
    /// Tokens that end the sequence with [`FinishReason::Stop`](crate::FinishReason::Stop).
    pub stop_token_ids: Vec<u32>,
    /// Whether log-probabilities are wanted, and of how many of the likeliest tokens; at most [`MAX_LOGPROBS`].
    pub logprobs: Option<u32>,
    /// The same of each token of the prompt but the first. The prompt is then computed without cached prefixes.
    pub prompt_logprobs: Option<u32>,
    /// What the output must match.
    pub grammar: Option<Grammar>,
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
            prompt_logprobs: None,
            grammar: None,
        }
    }
}

impl SamplingParams {
    /// Checks every value for a model of this vocabulary. Names the first bad field.
    ///
    /// # Errors
    /// When a value is outside its range, or a token outside the vocabulary.
    pub fn validate(&self, vocab_size: usize) -> Result<(), InvalidRequest> {
        check_tokens("stop_token_ids", self.stop_token_ids.iter().copied(), vocab_size)?;
        check_tokens("logit_bias", self.logit_bias.iter().map(|&(token, _)| token), vocab_size)?;
        // Written so that NaN is outside every range.
        let checks = [
            ("max_tokens", self.max_tokens >= 1, f64::from(self.max_tokens), "at least 1"),
            between("temperature", self.temperature, 0.0, 2.0, "between 0 and 2"),
            ("top_p", self.top_p > 0.0 && self.top_p <= 1.0, f64::from(self.top_p), "above 0 and at most 1"),
            ("min_p", (0.0..1.0).contains(&self.min_p), f64::from(self.min_p), "between 0 and 1, 1 excluded"),
            (
                "repetition_penalty",
                self.repetition_penalty > 0.0 && self.repetition_penalty <= 100.0,
                f64::from(self.repetition_penalty),
                "above 0 and at most 100",
            ),
            between("presence_penalty", self.presence_penalty, -2.0, 2.0, "between -2 and 2"),
            between("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "between -2 and 2"),
            at_most_20("logprobs", self.logprobs),
            at_most_20("prompt_logprobs", self.prompt_logprobs),
        ];
        let biases = self.logit_bias.iter();
        let biases =
            biases.map(|&(_, bias)| between("logit_bias", bias, -100.0, 100.0, "between -100 and 100"));
        for (field, holds, value, expected) in checks.into_iter().chain(biases) {
            if !holds {
                return Err(InvalidRequest::new(field, Problem::OutOfRange { value, expected }));
            }
        }
        let &SamplingParams { min_tokens, max_tokens, .. } = self;
        if min_tokens > max_tokens {
            let problem = Problem::ExceedsMaxTokens { min_tokens, max_tokens };
            return Err(InvalidRequest::new("min_tokens", problem));
        }
        if let Some(grammar) = &self.grammar {
            if grammar.is_too_long() {
                let num_bytes = grammar.text.len();
                let problem = Problem::TooLong { num_bytes, max_bytes: MAX_GRAMMAR_BYTES };
                return Err(InvalidRequest::new("grammar", problem));
            }
            if min_tokens > 0 {
                return Err(InvalidRequest::new("min_tokens", Problem::WithGrammar));
            }
        }
        if min_tokens > 0 && covers(&self.stop_token_ids, vocab_size) {
            return Err(InvalidRequest::new("stop_token_ids", Problem::NothingAllowed { vocab_size }));
        }
        Ok(())
    }
}

/// The field, whether its value is in the range, the value, and the range in words.
type Check = (&'static str, bool, f64, &'static str);

fn between(field: &'static str, value: f32, low: f32, high: f32, expected: &'static str) -> Check {
    (field, (low..=high).contains(&value), f64::from(value), expected)
}

fn at_most_20(field: &'static str, num: Option<u32>) -> Check {
    let num = num.unwrap_or(0);
    (field, num <= MAX_LOGPROBS, f64::from(num), "at most 20")
}

/// Whether every token is one of `tokens`, all of which are in the vocabulary.
fn covers(tokens: &[u32], vocab_size: usize) -> bool {
    tokens.len() >= vocab_size && tokens.iter().collect::<HashSet<_>>().len() == vocab_size
}
