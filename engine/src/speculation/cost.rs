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
/// Of a step's time, what is spent to find out whether it would.
const PROBING: f64 = 1.0 / 64.0;

/// Costs of one engine, beside what a step without drafts takes: `plain`, which whoever plans steps learns.
#[derive(Clone, Debug)]
pub(crate) struct DraftCosts {
    /// What a step of the drafter costs until it is measured, in steps of the target.
    draft_guess: f64,
    /// Of steps with drafts: caches and threads have just been the draft model's.
    target: Option<StepTime>,
    draft: Option<StepTime>,
    /// Seconds that the draft model takes for a token of a prompt.
    prompt_token: Option<f64>,
}

impl DraftCosts {
    /// Nothing is measured yet.
    pub(crate) fn new(draft_guess: f64) -> DraftCosts {
        DraftCosts { draft_guess, target: None, draft: None, prompt_token: None }
    }

    /// One more drafted token for each of `num_sequences`, in steps of the target. From 1 on no draft pays.
    pub(crate) fn per_token(&self, plain: Option<StepTime>, num_sequences: usize) -> f64 {
        let Some(plain) = plain else { return self.draft_guess + TOKEN_GUESS };
        let step = plain.of(num_sequences);
        let draft = self.draft.map_or(self.draft_guess * step, |draft| draft.of(num_sequences));
        let verify = self.target.unwrap_or(plain).per_token;
        (draft + num_sequences as f64 * verify) / step
    }

    /// What a step with a draft costs more than one without, however long the draft is; in steps.
    pub(crate) fn per_draft(&self, plain: Option<StepTime>, num_sequences: usize) -> f64 {
        match (plain, self.target) {
            (Some(plain), Some(target)) => {
                (target.of(num_sequences) / plain.of(num_sequences) - 1.0).max(0.0)
            }
            _ => 0.0,
        }
    }

    /// Whether the draft model should compute `num_missing` tokens of a sequence before it drafts `num_drafts`, when
    /// `num_output` were drawn. Nobody knows how many will be; as many again is the guess that is never far too high.
    /// A single token is a probe, or gains no more than one; once it is known what tokens of a prompt take, it is worth
    /// little.
    pub(crate) fn pays_to_catch_up(
        &self,
        plain: Option<StepTime>,
        num_missing: usize,
        num_output: usize,
        num_drafts: usize,
    ) -> bool {
        let per_token = match (plain, self.prompt_token) {
            (Some(plain), Some(seconds)) => seconds / plain.of(1),
            _ => self.draft_guess * TOKEN_GUESS,
        };
        let is_known = self.prompt_token.is_some();
        let share = if num_drafts > 1 || !is_known { SAVING } else { PROBING };
        num_missing <= 2 || num_missing as f64 * per_token <= share * num_output as f64
    }

    /// A step of the draft model took so long that computed missing tokens.
    pub(crate) fn observe_catch_up(&mut self, num_tokens: usize, elapsed: Duration) {
        let newest = elapsed.as_secs_f64() / num_tokens as f64;
        if newest > 0.0 {
            let mean = self.prompt_token.get_or_insert(newest);
            *mean += NEWEST * (newest - *mean);
        }
    }

    /// A step of the target with drafts took so long.
    pub(crate) fn observe_target(&mut self, plain: Option<StepTime>, num_tokens: usize, elapsed: Duration) {
        // From a step without drafts on: one that was interrupted says nothing, also when it is the first.
        self.target = self.target.or(plain);
        if let (Some(target), false) = (&mut self.target, elapsed.is_zero()) {
            target.observe(num_tokens, elapsed.as_secs_f64());
        }
    }

    /// A step of the draft model did, in which nothing was computed but drafts.
    pub(crate) fn observe_draft(&mut self, plain: Option<StepTime>, num_tokens: usize, elapsed: Duration) {
        // From the guess on, as the first steps of a process are slow.
        let guess = |StepTime { fixed, per_token }| StepTime {
            fixed: self.draft_guess * fixed,
            per_token: self.draft_guess * per_token,
        };
        self.draft = self.draft.or(plain.map(guess));
        if let (Some(draft), false) = (&mut self.draft, elapsed.is_zero()) {
            draft.observe(num_tokens, elapsed.as_secs_f64());
        }
    }

    /// A step has passed in which drafting did not pay.
    pub(crate) fn forget(&mut self, plain: Option<StepTime>) {
        let Some(plain) = plain else { return };
        if let Some(target) = &mut self.target {
            target.approach(&plain, 1.0);
        }
        if let Some(draft) = &mut self.draft {
            draft.approach(&plain, self.draft_guess);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step_time::PrefillBudget;

    /// Costs, and what a step takes, after many steps that took `fixed + num_tokens * per_token` milliseconds.
    fn learned(
        target: (f64, f64),
        draft: (f64, f64),
        num_sequences: usize,
    ) -> (DraftCosts, Option<StepTime>) {
        let time = |(fixed, per_token): (f64, f64), num_tokens: usize| {
            Duration::from_secs_f64((fixed + per_token * num_tokens as f64) / 1e3)
        };
        let (mut costs, mut budget) = (DraftCosts::new(0.3), PrefillBudget::new(None));
        for step in 0..2000 {
            let num_tokens = num_sequences * (1 + step % 5);
            budget.observe(num_sequences, time(target, num_sequences));
            costs.observe_target(budget.step(), num_tokens, time(target, num_tokens));
            costs.observe_draft(budget.step(), num_sequences, time(draft, num_sequences));
        }
        (costs, budget.step())
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
            let (costs, plain) = learned(target, draft, num_sequences);
            let cost = costs.per_token(plain, num_sequences);
            assert!((cost / expected - 1.0).abs() < 0.05, "{target:?} {draft:?}: {cost}, not {expected}");
        }
    }

    #[test]
    fn a_step_may_take_longer_for_having_any_draft() {
        let (mut costs, plain) = learned((10.0, 0.0), (2.0, 0.0), 1);
        assert!(costs.per_draft(plain, 1) < 0.01, "{costs:?}");
        (0..1000).for_each(|_| costs.observe_target(plain, 3, Duration::from_millis(14)));
        assert!((costs.per_draft(plain, 1) - 0.4).abs() < 0.1, "{costs:?}");
    }

    #[test]
    fn until_something_is_measured_costs_are_guessed() {
        let (costs, mut budget) = (DraftCosts::new(0.3), PrefillBudget::new(None));
        assert_eq!(costs.per_token(budget.step(), 1), 0.35);
        budget.observe(1, Duration::ZERO); // a clock that stands still
        assert_eq!(costs.per_token(budget.step(), 1), 0.35);
        budget.observe(1, Duration::from_millis(7));
        assert!((costs.per_token(budget.step(), 1) - 0.35).abs() < 0.01, "{costs:?}");
    }

    #[test]
    fn a_long_prompt_is_caught_up_with_when_many_tokens_have_come() {
        let (mut costs, plain) = learned((10.0, 0.0), (2.0, 0.0), 1);
        // A token of a prompt takes a tenth of a step.
        costs.observe_catch_up(100, Duration::from_millis(100));
        for (num_missing, num_output, num_drafts, expected) in [
            (1, 1, 4, true),
            (10, 3, 4, false),
            (10, 5, 4, true),
            (1000, 300, 4, false),
            (2, 1, 1, true), // nothing but what every draft computes
            (10, 60, 1, false),
            (10, 70, 1, true),
        ] {
            assert_eq!(
                costs.pays_to_catch_up(plain, num_missing, num_output, num_drafts),
                expected,
                "{num_missing}, {num_output}, {num_drafts}"
            );
        }
    }

    #[test]
    fn a_step_that_was_interrupted_hardly_counts() {
        let (learned, plain) = learned((10.0, 0.1), (2.0, 0.0), 1);
        let of = |costs: &DraftCosts| costs.per_token(plain, 1) + costs.per_draft(plain, 1);
        for mut costs in [learned, DraftCosts::new(0.3)] {
            let before = of(&costs);
            costs.observe_draft(plain, 1, Duration::from_secs(5));
            assert!(of(&costs) < 1.5 * before, "{} after {before}", of(&costs));
            let before = of(&costs);
            costs.observe_target(plain, 3, Duration::from_secs(5));
            assert!(of(&costs) < before + 0.5, "{} after {before}", of(&costs));
        }
    }

    #[test]
    fn what_is_not_measured_any_more_is_forgotten_slowly() {
        let (mut costs, plain) = learned((1.0, 0.0), (3.0, 0.0), 1);
        assert!(costs.per_token(plain, 1) > 2.5);
        let num_steps = (0..100_000).take_while(|_| {
            costs.forget(plain);
            costs.per_token(plain, 1) >= 1.0
        });
        let num_steps = num_steps.count();
        assert!((5000..50_000).contains(&num_steps), "drafting is tried again after {num_steps} steps");
    }
}
