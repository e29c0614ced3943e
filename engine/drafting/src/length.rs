//! How many tokens to draft. Plain arithmetic over acceptance counts: it knows neither tokens nor time.
//!
//! If each drafted token is accepted with probability `a` once those before it were, a draft of `k` tokens yields
//! `1 + a + ... + a^k` tokens (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023,
//! equation 1). Its price is `1 + o + k c` steps: `c` is the cost of drafting and verifying one token, `o` the
//! overhead of any draft. The chosen length is the `k` of the best yield per price, and 0 when no draft is worth its
//! price.

/// Probability of acceptance that is assumed for a new sequence.
const FIRST_GUESS: f64 = 0.8;
/// Weight of the newest token in the running mean, which so remembers about the last eight.
const NEWEST: f64 = 0.125;
/// Least expected tokens per step of a draft. Below it, the measured costs are not precise enough to tell a gain.
const MIN_GAIN: f64 = 1.05;
/// Steps without a draft before the first probe, and the most before any later one.
const REST: std::ops::RangeInclusive<usize> = 8..=256;
/// Look-ups in a row that find nothing before there is none for some steps.
const MISSES: usize = 8;
/// Steps without a look-up after so many, and the most after any later one that finds nothing.
const SEARCH_REST: std::ops::RangeInclusive<usize> = 8..=32;

/// How many tokens to draft for one sequence. The length follows the measured acceptance. While drafting does not pay
/// it is 0, except for one token now and then that probes whether it would: 8 steps after the last rejection, then
/// 16, 32, ... 256, and at once after an accepted probe. While [look-ups](Self::looked_up) find nothing, it is 0 most of the
/// time, too: a sequence that may be drafted for keeps the next step from being launched ahead.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftLength {
    /// Running mean of the acceptance of verified draft tokens.
    acceptance: f64,
    /// Steps until a probe after the next rejection.
    rest: usize,
    /// Steps left until a probe.
    num_resting: usize,
    /// Look-ups since the last one that found a draft.
    num_misses: usize,
    /// Steps left until the next look-up.
    num_unsearched: usize,
}

impl Default for DraftLength {
    fn default() -> DraftLength {
        DraftLength {
            acceptance: FIRST_GUESS,
            rest: *REST.start(),
            num_resting: 0,
            num_misses: 0,
            num_unsearched: 0,
        }
    }
}

impl DraftLength {
    /// Whether [`next`](Self::next) would return 0.
    pub fn is_resting(&self, max: usize, cost: f64, overhead: f64) -> bool {
        gains_nothing(max, cost, overhead)
            || self.num_unsearched > 0
            || (self.num_resting > 0 && self.best(max, cost, overhead) == 0)
    }

    /// Tokens to draft for the next step, at most `max`. Drafting and verifying one token costs `cost` steps, and any
    /// draft costs `overhead` steps more.
    pub fn next(&mut self, max: usize, cost: f64, overhead: f64) -> usize {
        if gains_nothing(max, cost, overhead) {
            return 0;
        }
        if self.num_unsearched > 0 {
            self.num_unsearched -= 1;
            return 0;
        }
        let best = self.best(max, cost, overhead);
        if best > 0 {
            self.rest = *REST.start();
            self.num_resting = 0;
            return best;
        }
        if self.num_resting > 0 {
            self.num_resting -= 1;
            return 0;
        }
        1
    }

    /// Records that the first `num_accepted` of `num_drafts` tokens were accepted.
    pub fn observe(&mut self, num_drafts: usize, num_accepted: usize) {
        for _ in 0..num_accepted {
            self.acceptance += NEWEST * (1.0 - self.acceptance);
        }
        // Tokens after the first rejection say nothing.
        if num_accepted < num_drafts {
            self.acceptance -= NEWEST * self.acceptance;
            self.num_resting = self.rest;
            self.rest = (2 * self.rest).min(*REST.end());
        }
    }

    /// Records that a look-up proposed so many tokens. After eight in a row that proposed none, the length is 0 for 8 steps, after
    /// the next one for 16, then for 32 each time.
    pub fn looked_up(&mut self, num_proposed: usize) {
        self.num_misses = if num_proposed > 0 { 0 } else { self.num_misses + 1 };
        if let Some(num_rests) = self.num_misses.checked_sub(MISSES) {
            let doubled = *SEARCH_REST.start() << num_rests.min(8);
            self.num_unsearched = doubled.min(*SEARCH_REST.end());
        }
    }

    fn best(&self, max: usize, cost: f64, overhead: f64) -> usize {
        let (mut best, mut best_gain) = (0, MIN_GAIN);
        let (mut tokens, mut all_accepted) = (1.0, 1.0);
        for length in 1..=max {
            all_accepted *= self.acceptance;
            tokens += all_accepted;
            let gain = tokens / (1.0 + overhead + length as f64 * cost);
            if gain > best_gain {
                (best, best_gain) = (length, gain);
            }
        }
        best
    }
}

/// Whether even a draft that is always right gains nothing, because it costs a step per token.
fn gains_nothing(max: usize, cost: f64, overhead: f64) -> bool {
    max == 0 || cost + overhead / max as f64 >= 1.0
}

/// Cuts lengths so that their sum is at most `budget`: the longest first, and of equals the last.
pub fn share(mut budget: usize, lengths: &mut [usize]) {
    for level in 1..=lengths.iter().copied().max().unwrap_or(0) {
        for length in lengths.iter_mut().filter(|length| **length >= level) {
            match budget.checked_sub(1) {
                Some(left) => budget = left,
                None => *length = level - 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths of `num_steps` steps. `accepts` says of each drafted token, by its number, whether it is accepted.
    fn lengths(num_steps: usize, cost: f64, mut accepts: impl FnMut(usize) -> bool) -> Vec<usize> {
        let (mut length, mut num_verified) = (DraftLength::default(), 0);
        let mut step = || {
            let is_resting = length.is_resting(8, cost, 0.0);
            let num_drafts = length.next(8, cost, 0.0);
            assert_eq!(is_resting, num_drafts == 0);
            let mut is_right = || {
                num_verified += 1;
                accepts(num_verified - 1)
            };
            let num_accepted = (0..num_drafts).take_while(|_| is_right()).count();
            if num_drafts > 0 {
                length.observe(num_drafts, num_accepted);
            }
            num_drafts
        };
        (0..num_steps).map(|_| step()).collect()
    }

    #[test]
    fn an_accepted_draft_grows_to_the_maximum() {
        let lengths = lengths(30, 0.5, |_| true);
        assert!(lengths[0] < 8, "{lengths:?}");
        assert!(lengths.is_sorted(), "{lengths:?}");
        assert_eq!(lengths[29], 8);
    }

    #[test]
    fn a_rejected_draft_is_probed_ever_more_rarely() {
        let lengths = lengths(2000, 0.5, |_| false);
        let steps: Vec<usize> = (0..2000).filter(|&step| lengths[step] > 0).collect();
        let gaps: Vec<usize> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let first_rest = gaps.iter().position(|&gap| gap > 1).unwrap();
        assert!(first_rest < 8, "{steps:?}");
        assert_eq!(gaps[first_rest..][..6], [9, 17, 33, 65, 129, 257], "{steps:?}");
        assert!(gaps[first_rest + 6..].iter().all(|&gap| gap == 257));
        assert!(steps[first_rest + 1..].iter().all(|&step| lengths[step] == 1));
    }

    #[test]
    fn a_probe_finds_a_draft_that_becomes_right() {
        // Wrong for 12 tokens that were verified, then right.
        let lengths = lengths(3000, 0.5, |num_verified| num_verified >= 12);
        assert_eq!(lengths[2999], 8);
        let worst = lengths.iter().rposition(|&length| length == 0).unwrap();
        assert!(lengths[worst + 1..].len() > 1000, "it recovers after step {worst}");
    }

    #[test]
    fn a_text_in_which_lookups_find_nothing_is_searched_rarely() {
        let mut length = DraftLength::default();
        let mut is_searched = |num_proposed: usize| {
            let is_resting = length.is_resting(8, 0.05, 0.0);
            let is_searched = length.next(8, 0.05, 0.0) > 0;
            assert_ne!(is_resting, is_searched);
            if is_searched {
                length.looked_up(num_proposed);
            }
            is_searched
        };
        let steps: Vec<usize> = (0..200).filter(|_| is_searched(0)).collect();
        let gaps: Vec<usize> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(gaps[..11], [1, 1, 1, 1, 1, 1, 1, 9, 17, 33, 33], "{steps:?}");
        let num_resting = (0..100).take_while(|_| !is_searched(3)).count();
        assert!(num_resting < 33, "{num_resting}");
        assert_eq!((0..8).filter(|_| is_searched(0)).count(), 8, "a draft was found");
        assert!(!is_searched(0));
    }

    #[test]
    fn length_follows_acceptance_and_cost() {
        let after =
            |acceptance: f64, cost: f64| DraftLength { acceptance, ..Default::default() }.best(8, cost, 0.0);
        for (acceptance, cost, expected) in [
            (1.0, 0.5, 8),
            (0.97, 0.5, 7),
            (0.9, 0.5, 3),
            (0.6, 0.5, 1),
            (0.5, 0.5, 0), // half a token for half a step
            (0.2, 0.05, 1),
            (0.9, 0.05, 8),
            (0.04, 0.05, 0),
            (1.0, 1.0, 0),
        ] {
            assert_eq!(after(acceptance, cost), expected, "acceptance {acceptance}, cost {cost}");
        }
        assert_eq!(DraftLength::default().next(0, 0.05, 0.0), 0, "without room there is no draft");
        assert_eq!(DraftLength::default().next(8, 0.2, 0.0), 4);
        assert_eq!(
            DraftLength::default().next(8, 0.2, 2.0),
            1,
            "a probe: more tokens would not pay at this acceptance"
        );
        assert_eq!(DraftLength::default().next(8, 0.5, 4.0), 0, "with this overhead there is no probe");
        assert_eq!(DraftLength::default().next(8, 1.0, 0.0), 0, "without a possible gain there is no probe");
    }

    #[test]
    fn a_budget_is_shared_evenly() {
        for (budget, wanted, expected) in [
            (100, vec![3, 8, 0], vec![3, 8, 0]),
            (6, vec![3, 8, 0], vec![3, 3, 0]),
            (7, vec![1, 8, 8], vec![1, 3, 3]),
            (8, vec![8, 1, 8], vec![4, 1, 3]),
            (2, vec![4, 4, 4], vec![1, 1, 0]),
            (0, vec![4, 4], vec![0, 0]),
            (5, vec![], vec![]),
        ] {
            let mut lengths = wanted.clone();
            share(budget, &mut lengths);
            assert_eq!(lengths, expected, "{budget} for {wanted:?}");
        }
    }
}
