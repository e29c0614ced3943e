//! Log-probabilities of a token and of the likeliest ones: those of the unmodified row of logits.
//! It does not know how tokens are chosen.

use baton_model_spec::{InvalidLogits, TokenLogprobs};

use crate::row::{NEGLIGIBLE, check, likeliest, num_above, sum_of, weight};

/// How likely the model found a token of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// Its id.
    pub id: u32,
    /// Of it, and of the most likely tokens in its place.
    pub logprobs: TokenLogprobs,
    /// One more than the number of tokens that are more likely.
    pub rank: u32,
}

impl ScoredToken {
    /// Scores `id` after the row `[vocab_size]`, with `num_top` of the most likely tokens.
    ///
    /// # Errors
    /// When the row is invalid.
    pub fn new(logits: &[f32], id: u32, num_top: u32) -> Result<ScoredToken, InvalidLogits> {
        let max = check(logits)?;
        let rank = 1 + num_above(logits, logits[id as usize]);
        Ok(ScoredToken { id, logprobs: token_logprobs(logits, max, id, num_top), rank })
    }
}

/// Log-probabilities of a sampled token, with `num_top` of the most likely tokens, if any are wanted.
///
/// # Errors
/// When the row is invalid.
pub(crate) fn wanted_logprobs(
    logits: &[f32],
    id: u32,
    num_top: Option<u32>,
) -> Result<Option<TokenLogprobs>, InvalidLogits> {
    let Some(num_top) = num_top else { return Ok(None) };
    Ok(Some(token_logprobs(logits, check(logits)?, id, num_top)))
}

/// Of a valid row whose largest logit is `max`. To 0.00001, and as exact as an f32 below -128.
fn token_logprobs(logits: &[f32], max: f32, id: u32, num_top: u32) -> TokenLogprobs {
    let log_sum = f64::from(max) + sum_of(logits, |logit| weight(logit - max, NEGLIGIBLE)).ln();
    let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut top = likeliest(logits, num_top as usize);
    for (_, logit) in &mut top {
        *logit = logprob(*logit);
    }
    TokenLogprobs { logprob: logprob(logits[id as usize]), top }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits from 0 to `width`.
    fn noise(num_logits: u32, width: f32) -> Vec<f32> {
        let unit = |id: u32| (id.wrapping_mul(2_654_435_761) >> 8) as f32 / 16_777_216.0;
        (0..num_logits).map(|id| width * unit(id)).collect()
    }

    /// By a softmax in f64.
    fn expected(logits: &[f32]) -> Vec<f64> {
        let max = f64::from(check(logits).expect("a valid row"));
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
        logits.iter().map(|&logit| f64::from(logit) - max - sum.ln()).collect()
    }

    #[test]
    fn log_probabilities_are_those_of_a_softmax_in_f64() {
        let slope: Vec<f32> = (0..1000).map(|id| 20.0 - 0.1 * id as f32).collect();
        let cases = [
            ("one", vec![-3.5]),
            ("equals", vec![7.25; 128_256]),
            ("noise", noise(128_256, 12.0)),
            ("a peak", [vec![9.0], noise(50_000, 8.0), vec![30.0]].concat()),
            ("large numbers", noise(5000, 10.0).into_iter().map(|logit| logit + 1000.0).collect()),
            ("95 below", [noise(5000, 4.0), vec![-91.5, f32::NEG_INFINITY]].concat()),
            ("a slope", slope),
        ];
        for (name, logits) in cases {
            let expected = expected(&logits);
            let is_right = |id: usize, logprob: f32| {
                logprob == expected[id] as f32 || (f64::from(logprob) - expected[id]).abs() < 1e-5
            };
            let num = logits.len();
            for id in [0, num / 3, num / 2, num.saturating_sub(2), num - 1] {
                let scored = ScoredToken::new(&logits, id as u32, 20).expect("a valid row");
                assert!(is_right(id, scored.logprobs.logprob), "{name}, {id}: {scored:?}, {}", expected[id]);
                assert_eq!(scored.logprobs.top.len(), num.min(20), "{name}");
                for &(top_id, logprob) in &scored.logprobs.top {
                    assert!(is_right(top_id as usize, logprob), "{name}: {logprob} of {top_id}");
                }
                let num_likelier = logits.iter().filter(|&&logit| logit > logits[id]).count();
                assert_eq!(scored.rank as usize, num_likelier + 1, "{name}");
                let sampled = wanted_logprobs(&logits, id as u32, Some(20)).expect("a valid row");
                assert_eq!(sampled, Some(scored.logprobs), "{name}: the same as of generated tokens");
            }
        }
    }

    #[test]
    fn only_finite_rows_have_log_probabilities() {
        let scored = |id| ScoredToken::new(&[f32::NEG_INFINITY, 1.5], id, 0).expect("one logit is finite");
        assert_eq!((scored(0).logprobs.logprob, scored(0).rank), (f32::NEG_INFINITY, 2));
        assert_eq!((scored(1).logprobs.logprob, scored(1).rank), (0.0, 1));
        for logits in [[1.0, f32::NAN, 0.0], [f32::INFINITY, 1.0, 0.0], [f32::NEG_INFINITY; 3]] {
            assert_eq!(ScoredToken::new(&logits, 0, 2), Err(InvalidLogits), "{logits:?}");
            assert_eq!(wanted_logprobs(&logits, 0, Some(2)), Err(InvalidLogits), "{logits:?}");
        }
    }
}
