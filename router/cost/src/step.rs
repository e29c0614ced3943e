//! The time of one step, and of the steps that compute a prompt.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::StepYield;

/// What one step of an engine computes, all sequences together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Tokens.
    pub num_tokens: f64,
    /// Tokens whose KV attention reads, once for each chunk: those of the sequences up to their chunks' ends.
    pub num_context_tokens: f64,
    /// Pairs of a token and a token that it sees, itself included. The arithmetic of attention grows with it, and so with the
    /// square of a prompt's length.
    pub num_pairs: f64,
}

/// The tokens of a prompt that are to be computed, after those that are cached.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PromptWork {
    /// Tokens to compute.
    pub num_tokens: f64,
    /// See [`StepWork::num_pairs`].
    pub num_pairs: f64,
}

/// The tokens of a prompt that belong to passages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassageWork {
    /// All of them.
    pub num_tokens: f64,
    /// Those whose KV the worker has kept.
    pub num_kept: f64,
    /// So many layers are computed for all of them.
    pub layer: u32,
    /// The part that is computed again in the other layers.
    pub ratio: f64,
}

/// Seconds of a step, linear in what it computes:
///
/// ```text
/// t(step) = fixed + per_token tokens + per_context_token context + per_pair pairs
/// ```
///
/// `fixed` is the launch of the step and reading the weights; `per_token` the arithmetic of their products;
/// `per_context_token` reading KV, which bounds decoding; `per_pair` the arithmetic of attention, which bounds long prompts. The
/// first three terms are those of DistServe's latency model (Zhong et al., OSDI 2024, appendix A); there, too, attention of
/// prompts is a term of its own in the squares of their lengths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLine {
    /// Seconds of a step that computes nothing.
    pub fixed: f64,
    /// Seconds for each token.
    pub per_token: f64,
    /// Seconds for each token whose KV is read.
    pub per_context_token: f64,
    /// Seconds for each pair of a token and one that it sees.
    pub per_pair: f64,
}

/// No coefficient is outside of this range: less than a picosecond or more than this many seconds is no machine.
const COEFFICIENTS: std::ops::RangeInclusive<f64> = 0.0..=1e3;

impl StepWork {
    /// A chunk of `num_tokens` tokens after `start` computed ones.
    pub fn chunk(start: f64, num_tokens: f64) -> StepWork {
        StepWork {
            num_tokens,
            num_context_tokens: start + num_tokens,
            num_pairs: num_tokens * start + num_tokens * (num_tokens + 1.0) / 2.0,
        }
    }

    /// One token of each of `num_sequences` sequences with `num_context_tokens` tokens together.
    pub fn decode(num_sequences: f64, num_context_tokens: f64) -> StepWork {
        StepWork { num_tokens: num_sequences, num_context_tokens, num_pairs: num_context_tokens }
    }

    /// Both in one step.
    #[must_use]
    pub fn plus(self, other: StepWork) -> StepWork {
        StepWork {
            num_tokens: self.num_tokens + other.num_tokens,
            num_context_tokens: self.num_context_tokens + other.num_context_tokens,
            num_pairs: self.num_pairs + other.num_pairs,
        }
    }
}

impl PromptWork {
    /// A sequence of `num_tokens` tokens of which the first `num_cached` are cached.
    pub fn new(num_tokens: usize, num_cached: usize) -> PromptWork {
        let cached = num_cached.min(num_tokens) as f64;
        let StepWork { num_tokens, num_pairs, .. } = StepWork::chunk(cached, num_tokens as f64 - cached);
        PromptWork { num_tokens, num_pairs }
    }

    /// The same prompt if its passages are blended, in full tokens of work. The `s` layers of `num_layers` before the selecting one
    /// compute all tokens of a passage, and the others the part `ratio` (CacheBlend, Yao et al., EuroSys 2025, section 4); so a
    /// token of a passage costs `s/L + (1 - s/L) ratio`. A passage that is not kept is also computed alone. Attention shrinks in proportion.
    #[must_use]
    pub fn blended(self, passages: &PassageWork, num_layers: usize) -> PromptWork {
        let first = (f64::from(passages.layer) / num_layers.max(1) as f64).min(1.0);
        let part = first + (1.0 - first) * passages.ratio.clamp(0.0, 1.0);
        let kept = passages.num_kept.min(passages.num_tokens);
        let num_tokens = self.num_tokens - kept * (1.0 - part) + (passages.num_tokens - kept) * part;
        let num_tokens = num_tokens.max(0.0);
        PromptWork { num_tokens, num_pairs: self.num_pairs * num_tokens / self.num_tokens.max(1.0) }
    }
}

impl StepLine {
    /// Seconds of a step.
    pub fn seconds(&self, work: &StepWork) -> f64 {
        self.fixed
            + self.per_token * work.num_tokens
            + self.per_context_token * work.num_context_tokens
            + self.per_pair * work.num_pairs
    }

    /// Seconds for a token of each sequence of `batch`, which decode: a step over what it yields. Accepted drafts are computed, too.
    /// Rejected ones are not counted.
    pub fn token_seconds(&self, batch: &StepWork, step_yield: StepYield) -> f64 {
        let num = step_yield.num_tokens();
        let verifying =
            StepWork { num_tokens: num * batch.num_tokens, num_pairs: num * batch.num_pairs, ..*batch };
        self.seconds(&verifying) / num
    }

    /// Seconds of the prompt's own arithmetic: what its chunks add to the steps that they are in.
    pub fn own_seconds(&self, prompt: &PromptWork) -> f64 {
        self.per_token * prompt.num_tokens + self.per_pair * prompt.num_pairs
    }

    /// Seconds until the prompt is computed, in chunks of `chunk` tokens, each in a step that also computes `beside`.
    pub fn prompt_seconds(&self, prompt: &PromptWork, beside: &StepWork, chunk: f64) -> f64 {
        let num_chunks = (prompt.num_tokens / chunk.max(1.0)).ceil();
        num_chunks * self.seconds(beside) + self.own_seconds(prompt)
    }

    /// How many prompt tokens fit beside `beside` into a step of `target` seconds.
    pub fn chunk_within(&self, target: f64, beside: &StepWork) -> f64 {
        (target - self.seconds(beside)).max(0.0) / self.per_token.max(f64::MIN_POSITIVE)
    }

    /// What to expect so long after the newest step: what is slower than `prior` says is taken to be twice as fast with every minute,
    /// down to that. A worker that was slow gets no requests, and would otherwise never be measured again.
    #[must_use]
    pub fn after(self, idle: Duration, prior: &StepLine) -> StepLine {
        let factor = (idle.as_secs_f64() / 60.0).exp2();
        let relax = |measured: f64, prior: f64| measured.min((measured / factor).max(prior));
        StepLine {
            fixed: relax(self.fixed, prior.fixed),
            per_token: relax(self.per_token, prior.per_token),
            per_context_token: relax(self.per_context_token, prior.per_context_token),
            per_pair: relax(self.per_pair, prior.per_pair),
        }
    }

    /// The line, if it can be true: every coefficient is a number in its range, and a step takes time. Foreign reports are
    /// checked with it.
    pub fn checked(self) -> Option<StepLine> {
        let StepLine { fixed, per_token, per_context_token, per_pair } = self;
        let all = [fixed, per_token, per_context_token, per_pair];
        // A NaN is in no range.
        let in_range = all.iter().all(|coefficient| COEFFICIENTS.contains(coefficient));
        (in_range && fixed + per_token > 0.0).then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_passages_cost_their_first_layers_and_a_part_of_the_others() {
        let prompt = PromptWork::new(1000, 0);
        for (num_kept, layer, ratio, num_layers, expected) in [
            // 100 tokens of text, 900 of passages: 1/16 + 15/16 x 0.15 = 0.203.
            (900.0, 1, 0.15, 16, 100.0 + 900.0 * 0.203_125),
            (0.0, 1, 0.15, 16, 100.0 + 900.0 * 1.203_125),
            (450.0, 1, 0.15, 16, 100.0 + 450.0 * 0.203_125 + 450.0 * 1.203_125),
            (900.0, 1, 1.0, 16, 1000.0),
            // 2/16 + 14/16 x 0.15.
            (900.0, 2, 0.15, 16, 100.0 + 900.0 * 0.25625),
            (900.0, 8, 0.15, 4, 1000.0),
            // More than there are.
            (5000.0, 1, 0.0, 4, 100.0 + 900.0 * 0.25),
        ] {
            let passages = PassageWork { num_tokens: 900.0, num_kept, layer, ratio };
            let blended = prompt.blended(&passages, num_layers);
            assert!((blended.num_tokens - expected).abs() < 1e-6, "{passages:?}: {blended:?}");
            let part = blended.num_pairs / prompt.num_pairs;
            assert!((part - expected / 1000.0).abs() < 1e-9);
        }
    }

    const LINE: StepLine = StepLine { fixed: 10.0, per_token: 2.0, per_context_token: 0.5, per_pair: 0.1 };

    #[test]
    fn a_slow_line_comes_back_to_its_prior_within_minutes() {
        let prior = StepLine { fixed: 4.0, per_token: 1.5, per_context_token: 1.0, per_pair: 0.0 };
        let after = |minutes: u64| LINE.after(Duration::from_secs(60 * minutes), &prior);
        assert_eq!(after(0), LINE);
        let expected = StepLine { fixed: 5.0, per_token: 1.5, per_context_token: 0.5, per_pair: 0.05 };
        assert_eq!(after(1), expected, "what is faster stays");
        assert_eq!(after(100_000), StepLine { per_context_token: 0.5, ..prior });
    }

    #[test]
    fn chunks_of_a_prompt_are_the_prompt() {
        let mut pairs = 0.0;
        for (start, end) in [(0.0, 7.0), (7.0, 8.0), (8.0, 20.0)] {
            pairs += StepWork::chunk(start, end - start).num_pairs;
        }
        assert_eq!(pairs, PromptWork::new(20, 0).num_pairs);
        assert_eq!(PromptWork::new(20, 8).num_pairs, StepWork::chunk(8.0, 12.0).num_pairs);
        assert_eq!(PromptWork::new(20, 30), PromptWork { num_tokens: 0.0, num_pairs: 0.0 });
        assert_eq!(
            StepWork::chunk(9.0, 1.0),
            StepWork::decode(1.0, 10.0),
            "decoding is a chunk of one token"
        );
    }

    #[test]
    fn a_prompt_beside_a_batch_pays_the_batch_once_per_chunk() {
        let prompt = PromptWork { num_tokens: 100.0, num_pairs: 50.0 };
        let alone = LINE.prompt_seconds(&prompt, &StepWork::default(), 40.0);
        assert_eq!(alone, 3.0 * 10.0 + 200.0 + 5.0);
        let beside = LINE.prompt_seconds(&prompt, &StepWork::decode(2.0, 30.0), 40.0);
        assert_eq!(beside - alone, 3.0 * (2.0 * 2.0 + 30.0 * 0.6));
        assert_eq!(LINE.chunk_within(50.0, &StepWork::default()), 20.0);
        assert_eq!(LINE.chunk_within(5.0, &StepWork::default()), 0.0);
    }

    #[test]
    fn accepted_drafts_share_a_step_and_add_their_own_arithmetic() {
        let batch = StepWork::decode(2.0, 30.0);
        let token_seconds = |num_tokens: f64| {
            LINE.token_seconds(&batch, StepYield::checked(num_tokens).expect("it can be true"))
        };
        assert_eq!(token_seconds(1.0), LINE.seconds(&batch));
        // 8 rows, each with the pairs of its sequence; the KV is read once.
        assert_eq!(token_seconds(4.0), (10.0 + 8.0 * 2.0 + 30.0 * 0.5 + 4.0 * 30.0 * 0.1) / 4.0);
    }

    #[test]
    fn lines_that_cannot_be_true_are_refused() {
        assert_eq!(LINE.checked(), Some(LINE));
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e9] {
            assert_eq!(StepLine { fixed: bad, ..LINE }.checked(), None);
            assert_eq!(StepLine { per_pair: bad, ..LINE }.checked(), None);
        }
        let nothing = StepLine { fixed: 0.0, per_token: 0.0, per_context_token: 0.0, per_pair: 0.0 };
        assert_eq!(nothing.checked(), None);
    }
}
