//! What drafting costs, learned from what steps took. Pure: times come from outside.
//!
//! A step of `n` tokens takes about `fixed + n * per_token`: weights are read once, arithmetic grows with the
//! tokens. One more drafted token for each of `n` sequences is a step of the draft model and `n` tokens more
//! to verify:
//!
//! ```text
//! per token = (draft(n) + n * target.per_token) / plain(n)         in steps without drafts
//! per draft = target(n) / plain(n) - 1                             going back and forth between two models
//! ```
//! The more sequences decode, the more of a step is arithmetic, and the closer this comes to 1 and beyond.

use std::time::Duration;

use crate::step_time::{NEWEST, StepTime, TOKEN_GUESS};

/// Of a step's time, what drafting is taken to save where it pays.
const SAVING: f64 = 0.25;

/// Costs of one engine.
#[derive(Clone, Debug)]
pub struct Costs {
    /// What a step of the drafter costs until it is measured, in steps of the target.
    draft_guess: f64,
    /// Of steps without drafts.
    plain: Option<StepTime>,
    /// Of steps with drafts: caches and threads have just been the draft model's.
    target: Option<StepTime>,
    draft: Option<StepTime>,
    /// Seconds that the draft model takes for a token of a prompt.
    prompt_token: Option<f64>,
}

impl Costs {
    /// Nothing is measured yet.
    pub fn new(draft_guess: f64) -> Costs {
        Costs { draft_guess, plain: None, target: None, draft: None, prompt_token: None }
    }

    /// One more drafted token for each of `num_sequences`, in steps of the target. From 1 on no draft pays.
    pub fn per_token(&self, num_sequences: usize) -> f64 {
        let Some(plain) = &self.plain else { return self.draft_guess + TOKEN_GUESS };
        let step = plain.of(num_sequences);
        let draft = self.draft.as_ref().map_or(self.draft_guess * step, |draft| draft.of(num_sequences));
        let verify = self.target.as_ref().unwrap_or(plain).per_token;
        (draft + num_sequences as f64 * verify) / step
    }

    /// What a step with a draft costs more than one without, however long the draft is; in steps.
    pub fn per_draft(&self, num_sequences: usize) -> f64 {
        match (&self.plain, &self.target) {
            (Some(plain), Some(target)) => {
                (target.of(num_sequences) / plain.of(num_sequences) - 1.0).max(0.0)
            }
            _ => 0.0,
        }
    }

    /// Whether the draft model should compute `num_missing` tokens of a sequence first, `num_output` of which
    /// were drawn. Nobody knows how many will be; as many again is the guess that is never far too high.
    pub fn pays_to_catch_up(&self, num_missing: usize, num_output: usize) -> bool {
        let per_token = match (&self.plain, self.prompt_token) {
            (Some(plain), Some(seconds)) => seconds / plain.of(1),
            _ => self.draft_guess * TOKEN_GUESS,
        };
        num_missing as f64 * per_token <= SAVING * num_output as f64
    }

    /// A step of the draft model took so long that computed missing tokens.
    pub fn observe_catch_up(&mut self, num_tokens: usize, elapsed: Duration) {
        let newest = elapsed.as_secs_f64() / num_tokens as f64;
        if newest > 0.0 {
            let mean = self.prompt_token.get_or_insert(newest);
            *mean += NEWEST * (newest - *mean);
        }
    }

    /// A step of the target took so long, `num_drafts` of its tokens being drafts.
    pub fn observe_step(&mut self, num_tokens: usize, num_drafts: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        // Nothing is learned from a clock that stands still.
        if seconds > 0.0 {
            let time = if num_drafts == 0 { &mut self.plain } else { &mut self.target };
            time.get_or_insert_with(|| StepTime::guess(seconds, num_tokens)).observe(num_tokens, seconds);
        }
    }

    /// A step of the draft model did, in which nothing was computed but drafts.
    pub fn observe_draft(&mut self, num_tokens: usize, elapsed: Duration) {
        // From the guess on, as the first steps of a process are slow.
        if let (None, Some(StepTime { fixed, per_token })) = (&self.draft, &self.plain) {
            let (fixed, per_token) = (self.draft_guess * fixed, self.draft_guess * per_token);
            self.draft = Some(StepTime { fixed, per_token });
        }
        if let Some(draft) = &mut self.draft {
            draft.observe(num_tokens, elapsed.as_secs_f64());
        }
    }

    /// A step has passed in which drafting did not pay.
    pub fn forget(&mut self) {
        let Some(plain) = &self.plain else { return };
        if let Some(target) = &mut self.target {
            target.approach(plain, 1.0);
        }
        if let Some(draft) = &mut self.draft {
            draft.approach(plain, self.draft_guess);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Costs after many steps that take `fixed + num_tokens * per_token` milliseconds.
    fn learned(target: (f64, f64), draft: (f64, f64), num_sequences: usize) -> Costs {
        let time = |(fixed, per_token): (f64, f64), num_tokens: usize| {
            Duration::from_secs_f64((fixed + per_token * num_tokens as f64) / 1e3)
        };
        let mut costs = Costs::new(0.3);
        for step in 0..2000 {
            let num_tokens = num_sequences * (1 + step % 5);
            costs.observe_step(num_sequences, 0, time(target, num_sequences));
            costs.observe_step(num_tokens, num_tokens - num_sequences + 1, time(target, num_tokens));
            costs.observe_draft(num_sequences, time(draft, num_sequences));
        }
        costs
    }

    #[test]
    fn costs_are_those_that_were_measured() {
        for (target, draft, num_sequences, expected) in [
            ((10.0, 0.1), (2.0, 0.0), 1, 2.1 / 10.1),
            ((10.0, 0.1), (2.0, 0.1), 8, 3.6 / 10.8),
            ((1.0, 1.0), (0.1, 0.1), 1, 1.2 / 2.0),
            ((1.0, 1.0), (0.1, 0.1), 16, 17.7 / 17.0), // arithmetic is all there is
            ((1.0, 0.0), (1.5, 0.0), 1, 1.5),
        ] {
            let cost = learned(target, draft, num_sequences).per_token(num_sequences);
            assert!((cost / expected - 1.0).abs() < 0.05, "{target:?} {draft:?}: {cost}, not {expected}");
        }
    }

    #[test]
    fn a_step_may_take_longer_for_having_any_draft() {
        let mut costs = learned((10.0, 0.0), (2.0, 0.0), 1);
        assert!(costs.per_draft(1) < 0.01, "{costs:?}");
        (0..1000).for_each(|_| costs.observe_step(3, 2, Duration::from_millis(14)));
        assert!((costs.per_draft(1) - 0.4).abs() < 0.1, "{costs:?}");
    }

    #[test]
    fn until_something_is_measured_costs_are_guessed() {
        let mut costs = Costs::new(0.3);
        assert_eq!(costs.per_token(1), 0.35);
        costs.observe_step(1, 0, Duration::ZERO); // a clock that stands still
        assert_eq!(costs.per_token(1), 0.35);
        costs.observe_step(1, 0, Duration::from_millis(7));
        assert!((costs.per_token(1) - 0.35).abs() < 0.01, "{costs:?}");
    }

    #[test]
    fn a_long_prompt_is_caught_up_with_when_many_tokens_have_come() {
        let mut costs = learned((10.0, 0.0), (2.0, 0.0), 1);
        // A token of a prompt takes a tenth of a step.
        costs.observe_catch_up(100, Duration::from_millis(100));
        for (num_missing, num_output, expected) in
            [(1, 1, true), (10, 3, false), (10, 5, true), (1000, 300, false)]
        {
            assert_eq!(
                costs.pays_to_catch_up(num_missing, num_output),
                expected,
                "{num_missing}, {num_output}"
            );
        }
    }

    #[test]
    fn a_step_that_was_interrupted_hardly_counts() {
        let mut costs = learned((10.0, 0.1), (2.0, 0.0), 1);
        let before = costs.per_token(1);
        costs.observe_draft(1, Duration::from_secs(5));
        assert!(costs.per_token(1) < 1.5 * before, "{} after {before}", costs.per_token(1));
    }

    #[test]
    fn what_is_not_measured_any_more_is_forgotten_slowly() {
        let mut costs = learned((1.0, 0.0), (3.0, 0.0), 1);
        assert!(costs.per_token(1) > 2.5);
        let num_steps = (0..100_000).take_while(|_| {
            costs.forget();
            costs.per_token(1) >= 1.0
        });
        let num_steps = num_steps.count();
        assert!((5000..50_000).contains(&num_steps), "drafting is tried again after {num_steps} steps");
    }
}
