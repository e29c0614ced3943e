//! The cost of drafting, learned from measured steps. Pure: times come from outside.
//!
//! A step of `n` tokens takes about `fixed + n * per_token`: weights are read once, and arithmetic grows with the
//! tokens. One more drafted token for each of `n` sequences costs a step of the draft model and `n` more tokens to
//! verify:
//!
//! ```text
//! per token = (draft(n) + n * target.per_token) / plain(n)         in steps without drafts
//! per draft = target(n) / plain(n) - 1                             switching between two models
//! ```
//!
//! The more sequences decode, the larger the share of arithmetic in a step, and the closer the cost comes to 1 and
//! beyond.

use std::time::Duration;

use baton_scheduler::{NEWEST, StepTime, TOKEN_GUESS};

/// The part of a step's time that drafting is assumed to save where it pays.
const SAVING: f64 = 0.25;
/// The part of a step's time that is spent on probing whether drafting pays.
const PROBING: f64 = 1.0 / 64.0;

/// The costs of one engine. The scheduler learns `plain`, the time of a step without drafts.
#[derive(Clone, Debug)]
pub(crate) struct DraftCosts {
    /// Cost of a step of the drafter until it is measured, in steps of the target.
    draft_guess: f64,
    /// Time of steps with drafts. They are slower: caches and threads have just served the draft model.
    target: Option<StepTime>,
    draft: Option<StepTime>,
    /// Seconds of the draft model for one more token of a prompt.
    prompt_token: Option<f64>,
}

impl DraftCosts {
    /// Costs without a measurement.
    pub(crate) fn new(draft_guess: f64) -> DraftCosts {
        DraftCosts { draft_guess, target: None, draft: None, prompt_token: None }
    }

    /// Cost of one more drafted token for each of `num_sequences`, in steps of the target. From 1 on no draft pays.
    pub(crate) fn per_token(&self, plain: Option<StepTime>, num_sequences: usize) -> f64 {
        let Some(plain) = plain else { return self.draft_guess + TOKEN_GUESS };
        let step = plain.of(num_sequences);
        let draft = self.draft.map_or(self.draft_guess * step, |draft| draft.of(num_sequences));
        let verify = self.target.unwrap_or(plain).per_token;
        (draft + num_sequences as f64 * verify) / step
    }

    /// Additional cost of a step with a draft, however long the draft is; in steps.
    pub(crate) fn per_draft(&self, plain: Option<StepTime>, num_sequences: usize) -> f64 {
        match (plain, self.target) {
            (Some(plain), Some(target)) => {
                (target.of(num_sequences) / plain.of(num_sequences) - 1.0).max(0.0)
            }
            _ => 0.0,
        }
    }

    /// Whether the draft model should compute `num_missing` tokens of a sequence before it drafts `num_drafts`, after
    /// `num_output` output tokens. The remaining output is not known. The guess is as many tokens again, which is
    /// never far too high. A draft of one token is a probe, or gains at most one token; once the cost of prompt
    /// tokens is known it is worth little.
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

    /// Records a step of the draft model that computed missing tokens. They do not cost its fixed time: a step that only
    /// drafts takes that, too.
    pub(crate) fn observe_catch_up(&mut self, plain: Option<StepTime>, num_tokens: usize, elapsed: Duration) {
        if elapsed.is_zero() {
            return;
        }
        let guess = plain.map_or(0.0, |plain| self.draft_guess * plain.fixed);
        let fixed = self.draft.map_or(guess, |draft| draft.fixed);
        let newest = (elapsed.as_secs_f64() - fixed).max(0.0) / num_tokens as f64;
        let mean = self.prompt_token.get_or_insert(newest);
        *mean += NEWEST * (newest - *mean);
    }

    /// Records a step of the target with drafts.
    pub(crate) fn observe_target(&mut self, plain: Option<StepTime>, num_tokens: usize, elapsed: Duration) {
        // Starts from a step without drafts: an interrupted step says nothing, even if it is the first.
        self.target = self.target.or(plain);
        if let (Some(target), false) = (&mut self.target, elapsed.is_zero()) {
            target.observe(num_tokens, elapsed.as_secs_f64());
        }
    }

    /// Records a step of the draft model that computed only drafts.
    pub(crate) fn observe_draft(&mut self, plain: Option<StepTime>, num_tokens: usize, elapsed: Duration) {
        // Starts from the guess: the first steps of a process are slow.
        let guess = |StepTime { fixed, per_token }| StepTime {
            fixed: self.draft_guess * fixed,
            per_token: self.draft_guess * per_token,
        };
        self.draft = self.draft.or(plain.map(guess));
        if let (Some(draft), false) = (&mut self.draft, elapsed.is_zero()) {
            draft.observe(num_tokens, elapsed.as_secs_f64());
        }
    }

    /// Records a step in which drafting did not pay.
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
    use baton_scheduler::PrefillBudget;

    /// The costs and the plain step time after many steps of `fixed + num_tokens * per_token` milliseconds.
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
    fn costs_follow_the_measurements() {
        for (target, draft, num_sequences, expected) in [
            ((10.0, 0.1), (2.0, 0.0), 1, 2.1 / 10.1),
            ((10.0, 0.1), (2.0, 0.1), 8, 3.6 / 10.8),
            ((1.0, 1.0), (0.1, 0.1), 1, 1.2 / 2.0),
            ((1.0, 1.0), (0.1, 0.1), 16, 17.7 / 17.0), // arithmetic only
            ((1.0, 0.0), (1.5, 0.0), 1, 1.5),
        ] {
            let (costs, plain) = learned(target, draft, num_sequences);
            let cost = costs.per_token(plain, num_sequences);
            assert!((cost / expected - 1.0).abs() < 0.05, "{target:?} {draft:?}: {cost}, not {expected}");
        }
    }

    #[test]
    fn any_draft_may_make_a_step_longer() {
        let (mut costs, plain) = learned((10.0, 0.0), (2.0, 0.0), 1);
        assert!(costs.per_draft(plain, 1) < 0.01, "{costs:?}");
        (0..1000).for_each(|_| costs.observe_target(plain, 3, Duration::from_millis(14)));
        assert!((costs.per_draft(plain, 1) - 0.4).abs() < 0.1, "{costs:?}");
    }

    #[test]
    fn costs_are_guessed_until_they_are_measured() {
        let (costs, mut budget) = (DraftCosts::new(0.3), PrefillBudget::new(None));
        assert_eq!(costs.per_token(budget.step(), 1), 0.35);
        budget.observe(1, Duration::ZERO); // the clock stands still
        assert_eq!(costs.per_token(budget.step(), 1), 0.35);
        budget.observe(1, Duration::from_millis(7));
        assert!((costs.per_token(budget.step(), 1) - 0.35).abs() < 0.01, "{costs:?}");
    }

    #[test]
    fn a_long_prompt_is_computed_after_many_output_tokens() {
        let (mut costs, plain) = learned((10.0, 0.0), (2.0, 0.0), 1);
        // One token of a prompt takes a tenth of a step.
        costs.observe_catch_up(plain, 100, Duration::from_millis(100));
        for (num_missing, num_output, num_drafts, expected) in [
            (1, 1, 4, true),
            (10, 3, 4, false),
            (10, 5, 4, true),
            (1000, 300, 4, false),
            (2, 1, 1, true), // every draft computes this much
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
    fn prompt_tokens_do_not_cost_the_fixed_time_of_a_step() {
        let time = |num_tokens: usize| Duration::from_secs_f64((2.0 + 0.02 * num_tokens as f64) / 1e3);
        let (mut costs, plain) = learned((10.0, 0.0), (2.0, 0.02), 1);
        (0..100).for_each(|_| costs.observe_catch_up(plain, 9, time(9)));
        costs.observe_catch_up(plain, 2048, time(2048));
        // 80 ms, for a quarter of 60 steps.
        assert!(costs.pays_to_catch_up(plain, 4000, 60, 4), "{costs:?}");
    }

    #[test]
    fn an_interrupted_step_hardly_counts() {
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
    fn old_measurements_are_forgotten_slowly() {
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
