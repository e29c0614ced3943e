//! Step times, learned from measured steps. Pure: times come from outside.

use std::time::Duration;

/// Cost of one more token until it is measured, in steps: one more row while the weights are read anyway.
pub const TOKEN_GUESS: f64 = 0.05;
/// Weight of the newest measurement.
pub const NEWEST: f64 = 0.125;
/// Number of tokens at which the fixed and the proportional part share a measurement equally.
const BALANCE: f64 = 8.0;
/// A measurement counts as at most this many times the expected time, and at least this part of it: an interrupted
/// processor says nothing about steps.
const OUTLIER: f64 = 4.0;
/// So many of the first measured steps may be those of a cold process, which take up to a hundred times as long.
const COLD: u32 = 8;
/// They took more than so many times as long as was expected. A decode step after a long prompt may take a quarter, as guesses of a
/// prompt token's part are rough.
const COLD_FACTOR: f64 = 16.0;
/// How far each step in which drafting does not pay moves the learned times back to the guesses. Without drafts
/// nothing is measured, so a change would go unnoticed.
const FORGET: f64 = 1.0 / 8192.0;

/// Seconds of a step, as a line over its number of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Of a step without tokens.
    pub fixed: f64,
    /// More for each token.
    pub per_token: f64,
}

impl StepTime {
    /// The line through one measured step.
    pub fn guess(seconds: f64, num_tokens: usize) -> StepTime {
        let fixed = seconds / (1.0 + TOKEN_GUESS * num_tokens as f64);
        StepTime { fixed, per_token: TOKEN_GUESS * fixed }
    }

    /// Moves a little towards `share` of `other`.
    pub fn approach(&mut self, other: &StepTime, share: f64) {
        self.fixed += FORGET * (share * other.fixed - self.fixed);
        self.per_token += FORGET * (share * TOKEN_GUESS * other.fixed - self.per_token);
    }

    /// Of a step of so many tokens.
    pub fn of(&self, num_tokens: usize) -> f64 {
        self.fixed + num_tokens as f64 * self.per_token
    }

    /// Normalised least mean squares (Widrow, Hoff 1960) in `1` and `num_tokens / BALANCE`.
    pub fn observe(&mut self, num_tokens: usize, seconds: f64) {
        let expected = self.of(num_tokens);
        let x = num_tokens as f64 / BALANCE;
        let error = seconds.clamp(expected / OUTLIER, expected * OUTLIER) - expected;
        let step = NEWEST * error / (1.0 + x * x);
        // The fixed part stays positive, and the other never becomes negative.
        self.fixed = (self.fixed + step).max(expected / 1000.0);
        self.per_token = (self.per_token + step * x / BALANCE).max(0.0);
    }
}

/// The time of steps without drafts, and how many prompt tokens fit beside decoding sequences within the target time
/// between tokens.
///
/// Prompts and decodes share a step, which reads the weights once for both. A longer chunk of a prompt uses the
/// arithmetic units better, but every decoding sequence waits longer for its next token.
#[derive(Clone, Debug)]
pub struct PrefillBudget {
    target: Option<Duration>,
    step: Option<StepTime>,
    /// Tokens of the largest step so far. The line is trusted up to twice that size.
    largest: usize,
    /// Measured steps.
    num_steps: u32,
}

impl PrefillBudget {
    /// Without a target, prompts are not limited.
    pub fn new(target: Option<Duration>) -> PrefillBudget {
        PrefillBudget { target, step: None, largest: 0, num_steps: 0 }
    }

    /// The time of a step; `None` before the first measurement.
    pub fn step(&self) -> Option<StepTime> {
        self.step
    }

    /// Prompt tokens that fit into a step with `num_decodes` decodes within the target. May be 0.
    pub fn num_tokens_beside(&self, num_decodes: usize) -> usize {
        match (self.target, self.step) {
            (None, _) => usize::MAX,
            // Nothing is measured yet: the first step will tell.
            (Some(_), None) => 0,
            (Some(target), Some(step)) => {
                let left = target.as_secs_f64() - step.of(num_decodes);
                // Saturates: at a cost of 0 per token any number fits.
                ((left.max(0.0) / step.per_token) as usize).min(2 * self.largest)
            }
        }
    }

    /// Records the duration of a step without drafts.
    pub fn observe(&mut self, num_tokens: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        // A clock that stands still teaches nothing.
        if seconds <= 0.0 {
            return;
        }
        let is_far_below = |step: StepTime| seconds < step.of(num_tokens) / COLD_FACTOR;
        if self.num_steps < COLD && num_tokens <= self.largest && self.step.is_some_and(is_far_below) {
            // What was learned is the time of a cold process.
            self.step = None;
        }
        self.num_steps = self.num_steps.saturating_add(1);
        self.largest = self.largest.max(num_tokens);
        self.step.get_or_insert_with(|| StepTime::guess(seconds, num_tokens)).observe(num_tokens, seconds);
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
                // Steps with decodes only, and steps with the tokens that are believed to fit.
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
    fn the_time_of_a_cold_process_is_forgotten() {
        let mut budget = PrefillBudget::new(None);
        let mut after = |num_tokens: usize, millis: f64| {
            budget.observe(num_tokens, Duration::from_secs_f64(millis / 1e3));
            1e3 * budget.step().expect("it is measured").of(1)
        };
        assert!(after(100, 2000.0) > 300.0);
        assert!(after(1, 900.0) > 300.0);
        assert!((after(1, 10.0) - 10.0).abs() < 1e-3);
        for _ in 0..20 {
            after(1, 10.0);
        }
        // Later, a step seems short when the one before was collected late.
        assert!(after(1, 0.01) > 8.0);
    }

    #[test]
    fn without_a_target_nothing_is_held_back() {
        let mut budget = PrefillBudget::new(None);
        budget.observe(10, Duration::from_secs(1));
        assert_eq!(budget.num_tokens_beside(10), usize::MAX);
    }
}
