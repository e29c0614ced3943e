//! A request for one sequence, and when the sequence ends.

use std::sync::Arc;

use crate::{
    blend::BlendMarks,
    invalid::{InvalidRequest, Problem, check_tokens},
    retention::Retention,
    sampling::SamplingParams,
};

/// A request: one sequence to continue.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// For logs; need not be unique.
    pub id: String,
    /// The prompt's tokens; at least one. Shared: choices and attempts of one prompt hold the same tokens.
    pub prompt: Arc<[u32]>,
    /// Tokens that earlier attempts have delivered. They count as output: for penalties, for
    /// `max_tokens` and `min_tokens`, and for the index of the random number.
    pub output: Vec<u32>,
    /// How tokens are sampled, and when to stop.
    pub sampling: SamplingParams,
    /// Workers serve requests of lower numbers first, and those of equal numbers in the order of arrival.
    pub priority: i32,
    /// Only requests with equal salts share blocks. A secret of a tenant, or empty.
    pub cache_salt: String,
    /// Whether tokens may be drafted. It never changes them.
    pub speculation: SpeculationMode,
    /// Passages of the prompt whose KV may be blended; `None`: the prompt is computed as ever.
    pub blend: Option<BlendMarks>,
    /// How long its KV is kept.
    pub retention: Retention,
}

/// Whether the tokens of a request may be drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpeculationMode {
    /// Drafts if the engine has a drafter.
    #[default]
    Auto,
    /// Never drafts: one token per step.
    Off,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id was sampled, the last token delivered; or a stop string matched.
    Stop,
    /// `max_tokens` or the context is used up.
    Length,
    /// The client asked for it. An engine never reports this, because it cancels only dropped streams.
    Abort,
}

impl FinishReason {
    /// OpenAI's name; none for an abort.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
        }
    }
}

impl Request {
    /// Checks whether a model with this vocabulary and context can serve the request. Names the first invalid field.
    ///
    /// # Errors
    /// When it cannot.
    pub fn validate(&self, vocab_size: usize, context_length: usize) -> Result<(), InvalidRequest> {
        if self.prompt.is_empty() {
            return Err(InvalidRequest::new("prompt", Problem::Empty));
        }
        let num_tokens = self.num_known_tokens();
        if num_tokens >= context_length {
            return Err(InvalidRequest::new("prompt", Problem::ContextFull { num_tokens, context_length }));
        }
        check_tokens("prompt", self.prompt.iter().copied(), vocab_size)?;
        check_tokens("output", self.output.iter().copied(), vocab_size)?;
        self.sampling.validate(vocab_size)?;
        self.blend.as_ref().map_or(Ok(()), |marks| marks.validate(self.prompt.len()))?;
        self.retention.validate()?;
        let (num_output_tokens, max_tokens) = (self.output.len(), self.sampling.max_tokens);
        if num_output_tokens >= max_tokens as usize {
            let problem = Problem::NothingLeft { num_output_tokens, max_tokens };
            return Err(InvalidRequest::new("output", problem));
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

    /// Whether log-probabilities of the prompt are still to be told: an attempt with output follows one that told them.
    pub fn is_scored(&self) -> bool {
        self.sampling.prompt_logprobs.is_some() && self.output.is_empty()
    }

    /// The passages that are to be blended, if there are any and it is decided how.
    pub fn blended(&self) -> Option<&BlendMarks> {
        self.blend.as_ref().filter(|marks| !marks.passages.is_empty() && marks.ratio.is_some())
    }

    /// The first so many known tokens as the prompt of a request: what caches share of it. `None`: there are none, or no whole head that
    /// is blended and a token after it.
    pub fn known_prefix(&self, num_tokens: usize) -> Option<Request> {
        let has_head = self.blended().is_none_or(|marks| marks.end_idx() < num_tokens);
        (num_tokens > 0 && has_head).then(|| Request {
            prompt: self.prompt.iter().chain(&self.output).copied().take(num_tokens).collect(),
            // A request that has all of its output is not valid.
            output: Vec::new(),
            ..self.clone()
        })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::{Grammar, GrammarKind};

    fn request() -> Request {
        Request { prompt: [1, 2, 3].into(), ..Request::default() }
    }

    fn grammar(text: &str) -> Grammar {
        Grammar::new(GrammarKind::Regex, text)
    }

    fn with(change: impl FnOnce(&mut Request)) -> Request {
        let mut request = request();
        change(&mut request);
        request
    }

    #[test]
    fn what_caches_share_has_a_whole_head_or_none() {
        let marked = |ratio| {
            with(|r| {
                r.output = vec![4, 5];
                r.blend = Some(BlendMarks { passages: vec![0..1, 1..2], layer: 1, ratio });
            })
        };
        for (request, least) in [(marked(Some(0.2)), 3), (marked(None), 1)] {
            for num_tokens in 0..=5 {
                let prefix = request.known_prefix(num_tokens);
                assert_eq!(prefix.is_some(), num_tokens >= least, "{num_tokens}");
                let Some(prefix) = prefix else { continue };
                assert_eq!(
                    (&prefix.prompt[..], &prefix.output[..]),
                    (&[1, 2, 3, 4, 5][..num_tokens], &[][..])
                );
                assert!(num_tokens < 3 || prefix.validate(100, 32).is_ok());
            }
        }
    }

    #[test]
    fn bad_requests_are_refused_by_field() {
        let cases = [
            ("prompt: has no tokens", with(|r| r.prompt = [].into())),
            ("prompt: token id 100 is outside the vocabulary of 100", with(|r| r.prompt = [1, 100].into())),
            ("output: token id 777", with(|r| r.output = vec![777])),
            ("prompt: 32 tokens leave no room in a context of 32", with(|r| r.prompt = [0; 32].into())),
            ("prompt: 40 tokens leave no room", with(|r| r.output = vec![0; 37])),
            ("max_tokens: 0 is not at least 1", with(|r| r.sampling.max_tokens = 0)),
            ("min_tokens: 17 exceeds max_tokens, which is 16", with(|r| r.sampling.min_tokens = 17)),
            ("temperature: -1 is not", with(|r| r.sampling.temperature = -1.0)),
            ("temperature: 2.5 is not between 0 and 2", with(|r| r.sampling.temperature = 2.5)),
            ("temperature: NaN is not", with(|r| r.sampling.temperature = f32::NAN)),
            ("temperature: inf is not", with(|r| r.sampling.temperature = f32::INFINITY)),
            ("top_p: 0 is not above 0 and at most 1", with(|r| r.sampling.top_p = 0.0)),
            ("top_p: NaN is not", with(|r| r.sampling.top_p = f32::NAN)),
            ("min_p: 1 is not between 0 and 1, 1 excluded", with(|r| r.sampling.min_p = 1.0)),
            ("repetition_penalty: 0 is not", with(|r| r.sampling.repetition_penalty = 0.0)),
            ("repetition_penalty: 101 is not", with(|r| r.sampling.repetition_penalty = 101.0)),
            ("presence_penalty: 3 is not", with(|r| r.sampling.presence_penalty = 3.0)),
            ("frequency_penalty: NaN is not", with(|r| r.sampling.frequency_penalty = f32::NAN)),
            ("logit_bias: token id 100", with(|r| r.sampling.logit_bias = vec![(100, 1.0)])),
            (
                "logit_bias: NaN is not between -100 and 100",
                with(|r| r.sampling.logit_bias = vec![(1, f32::NAN)]),
            ),
            ("logit_bias: -101 is not between", with(|r| r.sampling.logit_bias = vec![(1, -101.0)])),
            ("stop_token_ids: token id 100", with(|r| r.sampling.stop_token_ids = vec![100])),
            (
                "blend.passages: a passage ends at 3 in",
                with(|r| {
                    r.blend = Some(BlendMarks { passages: vec![1..2, 2..3], ..BlendMarks::default() });
                }),
            ),
            ("logprobs: 21 is not at most 20", with(|r| r.sampling.logprobs = Some(21))),
            ("prompt_logprobs: 21 is not at most 20", with(|r| r.sampling.prompt_logprobs = Some(21))),
            (
                "stop_token_ids: all of the vocabulary of 100, so no token may follow before min_tokens",
                with(|r| (r.sampling.min_tokens, r.sampling.stop_token_ids) = (1, (0..100).collect())),
            ),
            (
                "min_tokens: cannot be combined with a grammar",
                with(|r| (r.sampling.min_tokens, r.sampling.grammar) = (1, Some(grammar("a")))),
            ),
            (
                "grammar: 262145 bytes; at most 262144",
                with(|r| r.sampling.grammar = Some(grammar(&"a".repeat((256 << 10) + 1)))),
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
