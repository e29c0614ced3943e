//! How far one distribution of the next token is from another, by their most likely tokens. Pure.

use std::collections::HashMap;

use crate::TokenLogprobs;

/// The least part that is taken for possible: what is below is rounding.
const LEAST: f64 = 1e-9;

impl TokenLogprobs {
    /// The Kullback-Leibler divergence of `approximate` from this one, in nats, as far as their most likely tokens tell: at most the true
    /// one, and near it where other tokens are unlikely. A token that `approximate` does not name has at most the part of the least
    /// likely one that it names. Tokens that neither names are taken together (log-sum inequality: Cover and Thomas, *Elements of
    /// Information Theory*, section 2.7).
    pub fn divergence(&self, approximate: &TokenLogprobs) -> f64 {
        let other: HashMap<u32, f32> = approximate.top.iter().copied().collect();
        let part = |logprob: f32| f64::from(logprob).exp();
        let least = approximate.top.last().map_or(1.0, |&(_, logprob)| part(logprob));
        let term = |p: f64, q: f64| if p > LEAST { p * (p / q.max(LEAST)).ln() } else { 0.0 };
        let (mut kl, mut rest, mut rest_approximate) = (0.0, 1.0, 1.0);
        for &(token, logprob) in &self.top {
            let (p, q) = (part(logprob), other.get(&token).map(|&logprob| part(logprob)));
            kl += term(p, q.unwrap_or(least));
            rest -= p;
            rest_approximate -= q.unwrap_or(0.0);
        }
        // Rounding may leave less than nothing.
        (kl + term(rest, rest_approximate)).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distribution(parts: &[(u32, f64)]) -> TokenLogprobs {
        TokenLogprobs {
            logprob: 0.0,
            top: parts.iter().map(|&(token, part)| (token, part.ln() as f32)).collect(),
        }
    }

    #[test]
    fn it_is_that_of_the_tokens_that_both_name_and_the_rest() {
        let full = distribution(&[(1, 0.5), (2, 0.25)]);
        for (blended, expected) in [
            (distribution(&[(1, 0.5), (2, 0.25)]), 0.0),
            // 2 has at most 0.1; the rest has at most 0.2.
            (
                distribution(&[(1, 0.8), (3, 0.1)]),
                0.5 * (0.5_f64 / 0.8).ln() + 0.25 * (0.25_f64 / 0.1).ln() + 0.25 * (0.25_f64 / 0.2).ln(),
            ),
            (distribution(&[(1, 0.25), (2, 0.5)]), 0.5 * 2.0_f64.ln() - 0.25 * 2.0_f64.ln()),
        ] {
            let kl = full.divergence(&blended);
            assert!((kl - expected).abs() < 1e-6, "{blended:?}: {kl}, not {expected}");
        }
        let certain = distribution(&[(1, 1.0)]);
        for wrong in [&[(2, 1.0), (1, 1e-12)][..], &[(2, 1.0), (3, 1e-12)]] {
            let kl = certain.divergence(&distribution(wrong));
            assert!(kl > 20.0 && kl.is_finite(), "{kl}");
        }
    }
}
