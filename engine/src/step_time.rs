//! What steps take, learned from steps. Pure: times come from outside.

use std::time::Duration;

/// What a token more costs until it is measured, in steps: a row more while weights are read anyway.
pub(crate) const TOKEN_GUESS: f64 = 0.05;
/// How far the newest measurement moves the line.
pub(crate) const NEWEST: f64 = 0.125;
/// Tokens that weigh as much as the fixed part when a measurement is split between the two.
const BALANCE: f64 = 8.0;
/// A measurement counts as at most this many times what was expected, and at least as this part of it: a
/// processor that was taken away for a while says nothing about steps.
const OUTLIER: f64 = 4.0;
/// How far each step in which drafting did not pay moves what was learned back to the guesses. Without drafts
/// nothing is measured, and what has changed would never be noticed.
const FORGET: f64 = 1.0 / 8192.0;

/// Seconds that a step takes: a line over its tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepTime {
    pub(crate) fixed: f64,
    pub(crate) per_token: f64,
}

impl StepTime {
    /// From one step.
    pub(crate) fn guess(seconds: f64, num_tokens: usize) -> StepTime {
        let fixed = seconds / (1.0 + TOKEN_GUESS * num_tokens as f64);
        StepTime { fixed, per_token: TOKEN_GUESS * fixed }
    }

    /// Forgets a little: goes towards `share` of `other`.
    pub(crate) fn approach(&mut self, other: &StepTime, share: f64) {
        self.fixed += FORGET * (share * other.fixed - self.fixed);
        self.per_token += FORGET * (share * TOKEN_GUESS * other.fixed - self.per_token);
    }

    pub(crate) fn of(&self, num_tokens: usize) -> f64 {
        self.fixed + num_tokens as f64 * self.per_token
    }

    /// Normalised least mean squares (Widrow, Hoff 1960) in `1` and `num_tokens / BALANCE`.
    pub(crate) fn observe(&mut self, num_tokens: usize, seconds: f64) {
        let expected = self.of(num_tokens);
        let x = num_tokens as f64 / BALANCE;
        let error = seconds.clamp(expected / OUTLIER, expected * OUTLIER) - expected;
        let step = NEWEST * error / (1.0 + x * x);
        // Neither is ever nothing, or negative.
        self.fixed = (self.fixed + step).max(expected / 1000.0);
        self.per_token = (self.per_token + step * x / BALANCE).max(0.0);
    }
}

/// What steps without drafts take, and how much of prompts is computed beside sequences that decode, so that these get
/// their tokens in time.
///
/// Prompts and decodes share a step: its weights are read once for both. The longer the prompt's chunk, the better
/// the arithmetic units are used, and the longer everybody waits for the next token.
#[derive(Clone, Debug)]
pub(crate) struct PrefillBudget {
    target: Option<Duration>,
    step: Option<StepTime>,
    /// Tokens of the largest step so far: of what nobody has seen yet, twice as much is believed.
    largest: usize,
}

impl PrefillBudget {
    /// Without a target, nobody is slowed down.
    pub(crate) fn new(target: Option<Duration>) -> PrefillBudget {
        PrefillBudget { target, step: None, largest: 0 }
    }

    /// What a step takes, once one was observed.
    pub(crate) fn step(&self) -> Option<StepTime> {
        self.step
    }

    /// Tokens that fit into a step beside `num_decodes`, which takes as long as the target. It may be none.
    pub(crate) fn num_tokens_beside(&self, num_decodes: usize) -> usize {
        match (self.target, self.step) {
            (None, _) => usize::MAX,
            // Nothing is known yet: the first step tells.
            (Some(_), None) => 0,
            (Some(target), Some(step)) => {
                let left = target.as_secs_f64() - step.of(num_decodes);
                // Saturates: without a price per token any number fits.
                ((left.max(0.0) / step.per_token) as usize).min(2 * self.largest)
            }
        }
    }

    /// A step without drafts took so long.
    pub(crate) fn observe(&mut self, num_tokens: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        // Nothing is learned from a clock that stands still.
        if seconds > 0.0 {
            self.largest = self.largest.max(num_tokens);
            self.step
                .get_or_insert_with(|| StepTime::guess(seconds, num_tokens))
                .observe(num_tokens, seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_as_long_as_the_target_allows() {
        for (fixed, per_token, target, expected) in
            [(10.0, 0.5, 50.0, 72), (10.0, 0.05, 50.0, 792), (80.0, 0.5, 50.0, 0), (0.1, 2.0, 50.0, 16)]
        {
            let mut budget = PrefillBudget::new(Some(Duration::from_secs_f64(target / 1e3)));
            let num_decodes = 8;
            for step in 0..400 {
                // Steps of decodes alone, and steps with what is thought to fit.
                let beside =
                    if step % 4 == 0 { 0 } else { budget.num_tokens_beside(num_decodes).clamp(16, 2048) };
                let num_tokens = num_decodes + beside;
                budget.observe(
                    num_tokens,
                    Duration::from_secs_f64((fixed + per_token * num_tokens as f64) / 1e3),
                );
            }
            let found = budget.num_tokens_beside(num_decodes);
            let error = found.abs_diff(expected);
            assert!(
                error <= 1 + expected / 10,
                "{fixed} + {per_token} n <= {target}: {found}, not {expected}"
            );
        }
    }

    #[test]
    fn without_a_target_nothing_is_held_back() {
        let mut budget = PrefillBudget::new(None);
        budget.observe(10, Duration::from_secs(1));
        assert_eq!(budget.num_tokens_beside(10), usize::MAX);
    }
}
