//! How the tokens of a step are shared among prompts.

use crate::sequence::{Sequence, SequenceId, SequenceRole};

/// The oldest prompt is sure of this part of a step: one of so many.
const OLDEST_SHARE: usize = 4;

/// A claim of a running prompt, or of a waiting sequence, on a part of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct BudgetClaim {
    pub(super) id: SequenceId,
    /// Tokens to compute; 0 for a reservation.
    pub(super) num_left: usize,
    pub(super) is_waiting: bool,
    /// Tokens that [`share_budget`] gives to it. What other claims leave over may be added later.
    pub(super) share: usize,
    was_preempted: bool,
}

impl BudgetClaim {
    /// The claim of a running prompt.
    pub(super) fn running(sequence: &Sequence) -> BudgetClaim {
        BudgetClaim {
            id: sequence.id,
            num_left: sequence.num_left(),
            is_waiting: false,
            share: 0,
            was_preempted: sequence.was_preempted,
        }
    }

    /// The claim of a waiting sequence that has `num_cached_tokens` tokens in the prefix cache.
    pub(super) fn waiting(sequence: &Sequence, num_cached_tokens: usize) -> BudgetClaim {
        let computes_here = sequence.role != SequenceRole::Decode;
        let num_left = if computes_here { sequence.num_left() - num_cached_tokens } else { 0 };
        BudgetClaim { num_left, is_waiting: true, ..BudgetClaim::running(sequence) }
    }
}

/// Shares `budget` among `claims`, which are in the order of age, oldest first. Returns the rest.
///
/// A prompt with far fewer tokens left comes first: shortest first gives the least mean time to the first token (L.
/// Schrage, "A Proof of the Optimality of the Shortest Remaining Processing Time Discipline", 1968). Within the same
/// power of four the older comes first: passing would gain little and cost the last one much. Preempted prompts come
/// before all others: their readers wait in the middle of an answer. The oldest prompt always gets its part, or it
/// could wait for ever. All that holds among prompts of one priority; those of a lower number come first.
pub(super) fn share_budget(claims: &mut [BudgetClaim], mut budget: usize, block_size: usize) -> usize {
    let Some(oldest) = claims.iter().position(|claim| claim.num_left > 0) else { return budget };
    // Kept for the oldest until its turn.
    let mut kept = (budget / OLDEST_SHARE).max(block_size).min(budget).min(claims[oldest].num_left);
    let mut order: Vec<usize> = (0..claims.len()).collect();
    order.sort_by_key(|&idx| {
        let claim = &claims[idx];
        (claim.id.priority, !claim.was_preempted, claim.num_left.checked_ilog(4))
    });
    for idx in order {
        if idx == oldest {
            kept = 0;
        }
        claims[idx].share = claims[idx].num_left.min(budget - kept);
        budget -= claims[idx].share;
    }
    budget
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shares and the rest, for claims like `8000 500 preempted:90 later:10`, oldest first.
    fn shares(claims: &str, budget: usize) -> (Vec<usize>, usize) {
        let claim = |(nth, text): (usize, &str)| {
            let (word, num_left) = text.split_once(':').unwrap_or(("", text));
            let id = SequenceId::new(i32::from(word == "later"), nth as u64);
            let num_left = num_left.parse().expect("a number of tokens");
            BudgetClaim { id, num_left, is_waiting: false, share: 0, was_preempted: word == "preempted" }
        };
        let mut claims: Vec<BudgetClaim> = claims.split_whitespace().enumerate().map(claim).collect();
        let left = share_budget(&mut claims, budget, 16);
        (claims.iter().map(|claim| claim.share).collect(), left)
    }

    #[test]
    fn short_prompts_come_first_and_the_oldest_keeps_its_part() {
        for (claims, expected) in [
            ("", vec![]),
            ("8000", vec![512]),
            ("8000 100", vec![412, 100]),
            ("8000 500", vec![128, 384]),
            ("8000 500 100", vec![128, 284, 100]),
            // A prompt that is about as long, or longer, does not pass.
            ("8000 5000", vec![512, 0]),
            ("8000 90000", vec![512, 0]),
            ("8000 500 400", vec![128, 384, 0]),
            // The oldest is nearly done: it gets no more than it needs.
            ("60 50", vec![60, 50]),
            ("500 8000 400", vec![500, 0, 12]),
            ("2000 8000 400", vec![128, 0, 384]),
            ("8000 300 preempted:900", vec![128, 0, 384]),
            ("0 8000 100", vec![0, 412, 100]),
            // A later priority gets what is left over, also if it is shorter.
            ("8000 later:100", vec![512, 0]),
            ("300 later:500 later:100", vec![300, 112, 100]),
        ] {
            let total: usize = expected.iter().sum();
            assert_eq!(shares(claims, 512), (expected, 512 - total), "{claims}");
        }
    }

    #[test]
    fn small_budgets_are_shared_in_full() {
        for budget in 0..64 {
            let (shares, left) = shares("8000 10 7000", budget);
            assert_eq!((shares.iter().sum::<usize>(), left), (budget, 0));
            assert!(shares[0] >= budget.min(16), "{shares:?} of {budget}");
        }
    }
}
