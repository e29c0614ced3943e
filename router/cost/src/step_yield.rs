//! How many tokens a step yields for a sequence.

use std::time::Duration;

/// Tokens that a step yields for each sequence that decodes: one, and the drafted ones that it accepts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepYield(f64);

/// No step yields more: drafts are shorter.
const YIELDS: std::ops::RangeInclusive<f64> = 1.0..=1024.0;

impl Default for StepYield {
    /// Without drafts.
    fn default() -> StepYield {
        StepYield(1.0)
    }
}

impl StepYield {
    /// That many tokens, if it can be true. Foreign reports are checked with it.
    pub fn checked(num_tokens: f64) -> Option<StepYield> {
        // A NaN is in no range.
        YIELDS.contains(&num_tokens).then_some(StepYield(num_tokens))
    }

    /// The tokens: one or more.
    pub fn num_tokens(self) -> f64 {
        self.0
    }

    /// What to expect so long after the newest step: what drafts gained is taken to be half as much with every minute. The next
    /// texts may be others.
    #[must_use]
    pub fn after(self, idle: Duration) -> StepYield {
        StepYield(1.0 + (self.0 - 1.0) / (idle.as_secs_f64() / 60.0).exp2())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_drafts_gained_is_forgotten_within_minutes() {
        let after = |num_tokens: f64, minutes: u64| {
            let measured = StepYield::checked(num_tokens).expect("it can be true");
            measured.after(Duration::from_secs(60 * minutes)).num_tokens()
        };
        for (minutes, expected) in [(0, 5.0), (1, 3.0), (2, 2.0), (100_000, 1.0)] {
            assert_eq!(after(5.0, minutes), expected, "{minutes} minutes");
            assert_eq!(after(1.0, minutes), 1.0, "without drafts");
        }
    }

    #[test]
    fn yields_that_cannot_be_true_are_refused() {
        for num_tokens in [1.0, 3.5, 1024.0] {
            assert_eq!(StepYield::checked(num_tokens).map(StepYield::num_tokens), Some(num_tokens));
        }
        for bad in [f64::NAN, f64::INFINITY, -3.0, 0.0, 0.99, 1025.0] {
            assert_eq!(StepYield::checked(bad), None, "{bad}");
        }
    }
}
