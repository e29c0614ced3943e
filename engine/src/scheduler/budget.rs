//! How the tokens of a step are shared out among prompts.

use crate::sequence::{Role, Sequence, SequenceId};

/// The oldest prompt has one of so many parts of a step for sure.
const OLDEST_SHARE: usize = 4;

/// Somebody who asks for a part of a step: a prompt, or who waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) id: SequenceId,
    /// Tokens to compute; 0 of a reservation.
    pub(crate) num_left: usize,
    pub(crate) is_waiting: bool,
    /// Tokens that it gets, but for what others leave.
    pub(crate) share: usize,
    was_preempted: bool,
}

impl Claim {
    /// Of a prompt under way.
    pub(crate) fn running(sequence: &Sequence) -> Claim {
        Claim {
            id: sequence.id,
            num_left: sequence.num_left(),
            is_waiting: false,
            share: 0,
            was_preempted: sequence.was_preempted,
        }
    }

    /// Of one that waits, and has so many tokens in the cache.
    pub(crate) fn waiting(sequence: &Sequence, num_cached_tokens: usize) -> Claim {
        let computes_here = sequence.role != Role::Decode;
        let num_left = if computes_here { sequence.num_left() - num_cached_tokens } else { 0 };
        Claim { num_left, is_waiting: true, ..Claim::running(sequence) }
    }
}

/// Shares out `budget` among `claims`, of which the oldest come first; returns what is left.
///
/// Whoever has much fewer tokens left comes first: the shortest first gives the least mean time to a first token (L.
/// Schrage, "A Proof of the Optimality of the Shortest Remaining Processing Time Discipline", 1968). Of those within the
/// same power of four the older comes first: to pass each other would gain them little, and cost the last one much.
/// Before them all come those that were preempted: somebody waits for these in the midst of an answer. And a part is the
/// oldest's whatever the others have, or it might wait for ever.
pub(crate) fn share_out(claims: &mut [Claim], mut budget: usize, block_size: usize) -> usize {
    let Some(oldest) = claims.iter().position(|claim| claim.num_left > 0) else { return budget };
    // For the oldest, as long as it has had nothing.
    let mut kept = (budget / OLDEST_SHARE).max(block_size).min(budget).min(claims[oldest].num_left);
    let mut order: Vec<usize> = (0..claims.len()).collect();
    order.sort_by_key(|&idx| (!claims[idx].was_preempted, claims[idx].num_left.checked_ilog(4)));
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

    /// Of claims like `8000 500 preempted:90`, oldest first, the shares, and what is left.
    fn shares(claims: &str, budget: usize) -> (Vec<usize>, usize) {
        let claim = |(nth, text): (usize, &str)| {
            let (was_preempted, num_left) = match text.strip_prefix("preempted:") {
                Some(num_left) => (true, num_left),
                None => (false, text),
            };
            let num_left = num_left.parse().expect("a number of tokens");
            Claim { id: SequenceId(nth as u64), num_left, is_waiting: false, share: 0, was_preempted }
        };
        let mut claims: Vec<Claim> = claims.split_whitespace().enumerate().map(claim).collect();
        let left = share_out(&mut claims, budget, 16);
        (claims.iter().map(|claim| claim.share).collect(), left)
    }

    #[test]
    fn the_short_come_first_and_the_oldest_has_a_part() {
        for (claims, expected) in [
            ("", vec![]),
            ("8000", vec![512]),
            ("8000 100", vec![412, 100]),
            ("8000 500", vec![128, 384]),
            ("8000 500 100", vec![128, 284, 100]),
            // What is about as long does not pass, nor what is longer.
            ("8000 5000", vec![512, 0]),
            ("8000 90000", vec![512, 0]),
            ("8000 500 400", vec![128, 384, 0]),
            // The older is nearly done: its part is no more than it needs.
            ("60 50", vec![60, 50]),
            ("500 8000 400", vec![500, 0, 12]),
            ("2000 8000 400", vec![128, 0, 384]),
            ("8000 300 preempted:900", vec![128, 0, 384]),
            ("0 8000 100", vec![0, 412, 100]),
        ] {
            let total: usize = expected.iter().sum();
            assert_eq!(shares(claims, 512), (expected, 512 - total), "{claims}");
        }
    }

    #[test]
    fn small_budgets_are_shared_out_in_whole() {
        for budget in 0..64 {
            let (shares, left) = shares("8000 10 7000", budget);
            assert_eq!((shares.iter().sum::<usize>(), left), (budget, 0));
            assert!(shares[0] >= budget.min(16), "{shares:?} of {budget}");
        }
    }
}
