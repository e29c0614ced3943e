//! A step line that follows measured steps.

use crate::{
    is_plausible,
    step::{StepLine, StepWork},
};

/// Weight of the newest step, in the coefficients that its time consists of.
const NEWEST: f64 = 0.15;
/// Weight of the newest step in all coefficients alike: what slows a device down slows all of its work.
const COMMON: f64 = 0.05;
/// A step counts as at most so many times as long as expected, and at least this part of it: a processor that did something
/// else says nothing about steps.
const OUTLIER: f64 = 2.0;
/// No coefficient is less: it could not grow again.
const LEAST: f64 = 1e-15;
const MOST: f64 = 1e3;

/// Learns a [`StepLine`] from measured steps.
///
/// Normalised least mean squares (Widrow, Hoff 1960) on logarithms: with the ratio `r` of measured to expected time and the
/// share `s_i` that coefficient `i` has in the expected time,
///
/// ```text
/// c_i <- c_i r^(COMMON + NEWEST s_i / sum of s_j^2)
/// ```
///
/// So decoding teaches the fixed part and prompts the others, coefficients stay positive, a prior that is wrong by a
/// thousand is forgotten in a hundred steps, and a step that cannot be true changes nothing. Steps that are all alike only
/// scale the line: it stays right for them, and elsewhere what it was.
#[derive(Clone, Copy, Debug)]
pub struct StepCalibration {
    line: Option<StepLine>,
    num_steps: u64,
}

impl StepCalibration {
    /// Starts with a prior, if there is one.
    pub fn new(prior: Option<StepLine>) -> StepCalibration {
        StepCalibration { line: prior.and_then(StepLine::checked), num_steps: 0 }
    }

    /// A step took so long.
    pub fn observe(&mut self, work: &StepWork, seconds: f64) {
        if !is_plausible(seconds) || work.num_tokens < 1.0 {
            return;
        }
        let line = self.line.get_or_insert_with(|| StepLine::through(seconds, work));
        let expected = line.seconds(work);
        let parts = [
            (&mut line.fixed, 1.0),
            (&mut line.per_token, work.num_tokens),
            (&mut line.per_context_token, work.num_context_tokens),
            (&mut line.per_pair, work.num_pairs),
        ];
        let shares = parts.map(|(coefficient, amount)| {
            let share = *coefficient * amount / expected;
            (coefficient, share)
        });
        let squares: f64 = shares.iter().map(|(_, share)| share * share).sum();
        let log_ratio = (seconds / expected).clamp(1.0 / OUTLIER, OUTLIER).ln();
        if !squares.is_normal() || !log_ratio.is_finite() {
            return;
        }
        for (coefficient, share) in shares {
            let change = (log_ratio * (COMMON + NEWEST * share / squares)).exp();
            *coefficient = (*coefficient * change).clamp(LEAST, MOST);
        }
        self.num_steps += 1;
    }

    /// What a step takes; `None` without a prior and before the first step.
    pub fn line(&self) -> Option<StepLine> {
        self.line
    }

    /// Steps that were measured.
    pub fn num_steps(&self) -> u64 {
        self.num_steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUTH: StepLine =
        StepLine { fixed: 0.008, per_token: 40e-6, per_context_token: 60e-9, per_pair: 1.3e-9 };

    /// Noise in [-1, 1), the same in every run.
    fn noise(idx: u64) -> f64 {
        let mixed =
            (idx + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Decoding of various batches, with and without chunks of prompts beside it.
    fn work(idx: u64) -> StepWork {
        let batch = (idx * 7 % 64) as f64;
        let decode = StepWork::decode(batch, batch * 1500.0);
        match idx % 3 {
            0 => decode.plus(StepWork::chunk(0.0, 1.0)),
            1 => decode.plus(StepWork::chunk((idx * 512 % 32_768) as f64, 512.0)),
            _ => StepWork::chunk((idx * 2048 % 65_536) as f64, 2048.0),
        }
    }

    fn learn(prior: Option<StepLine>, num_steps: u64, noise_level: f64) -> StepLine {
        let mut learned = StepCalibration::new(prior);
        for idx in 0..num_steps {
            learned.observe(&work(idx), TRUTH.seconds(&work(idx)) * (1.0 + noise_level * noise(idx)));
        }
        assert_eq!(learned.num_steps(), num_steps);
        learned.line().expect("it has seen steps")
    }

    fn worst(line: &StepLine) -> f64 {
        let ratios = (0..200).map(|idx| line.seconds(&work(idx)) / TRUTH.seconds(&work(idx)));
        ratios.map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn a_wrong_prior_or_none_is_corrected_by_steps() {
        let StepLine { fixed, per_token, per_context_token, per_pair } = TRUTH;
        let slow = StepLine {
            fixed: 10.0 * fixed,
            per_token: 10.0 * per_token,
            per_context_token: 10.0 * per_context_token,
            per_pair: 10.0 * per_pair,
        };
        let odd = StepLine {
            fixed: 0.3 * fixed,
            per_token: 3.0 * per_token,
            per_context_token: 0.5 * per_context_token,
            per_pair: 0.3 * per_pair,
        };
        for prior in [None, Some(slow), Some(odd)] {
            let exact = worst(&learn(prior, 600, 0.0));
            assert!(exact < 0.15, "{prior:?}: {exact}");
            let noisy = worst(&learn(prior, 600, 0.2));
            assert!(noisy < 0.2, "{prior:?} with noise: {noisy}");
        }
    }

    #[test]
    fn a_change_of_speed_is_followed() {
        let mut learned = StepCalibration::new(Some(TRUTH));
        for idx in 0..150 {
            learned.observe(&work(idx), 3.0 * TRUTH.seconds(&work(idx)));
        }
        let line = learned.line().expect("a prior");
        let ratio = line.seconds(&work(4)) / TRUTH.seconds(&work(4));
        assert!((2.7..3.3).contains(&ratio), "{ratio}");
    }

    #[test]
    fn one_interrupted_step_changes_little_and_absurd_ones_nothing() {
        let mut learned = StepCalibration::new(Some(TRUTH));
        learned.observe(&work(1), 100.0);
        let line = learned.line().expect("a prior");
        assert!(line.seconds(&work(1)) < 1.2 * TRUTH.seconds(&work(1)));
        let before = line;
        for seconds in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e9] {
            learned.observe(&work(1), seconds);
        }
        for num_tokens in [0.0, f64::NAN, f64::INFINITY] {
            learned.observe(&StepWork { num_tokens, ..StepWork::default() }, 0.1);
        }
        learned.observe(&StepWork { num_pairs: f64::NAN, ..work(1) }, 0.1);
        assert_eq!(learned.line(), Some(before));
    }
}
