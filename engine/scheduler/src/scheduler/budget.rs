//! How the tokens of a step, and those of them that are scored, are shared among prompts.

use crate::{
    plan::Chunk,
    sequence::{ScoredAhead, Sequence, SequenceId, SequenceRole},
};

/// The oldest prompt is sure of this part of a step: one of so many.
const OLDEST_SHARE: usize = 4;

/// Most tokens that a step scores: with 150,000 tokens in the vocabulary their logits are 38 MB.
const MAX_SCORED: usize = 64;

/// A part of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepShare {
    /// Tokens to compute.
    pub(super) num_tokens: usize,
    /// So many of them may be scored: each has a row of logits.
    pub(super) num_scored: usize,
}

impl StepShare {
    /// All of a step of `num_tokens` tokens.
    pub(super) fn whole(num_tokens: usize) -> StepShare {
        StepShare { num_tokens, num_scored: MAX_SCORED }
    }

    /// What a chunk takes.
    pub(super) fn of(chunk: &Chunk) -> StepShare {
        StepShare { num_tokens: chunk.num_tokens, num_scored: chunk.num_scored }
    }

    /// The most tokens of a sequence for which this is enough. `scored` are those of it that are scored.
    pub(super) fn max_tokens(self, scored: ScoredAhead) -> usize {
        self.num_tokens.min(scored.max_tokens(self.num_scored))
    }

    /// Both together.
    pub(super) fn plus(self, other: StepShare) -> StepShare {
        StepShare {
            num_tokens: self.num_tokens + other.num_tokens,
            num_scored: self.num_scored + other.num_scored,
        }
    }

    /// What `taken` leaves; nothing if it is more, as the head of a blended prompt may be.
    pub(super) fn minus(self, taken: StepShare) -> StepShare {
        StepShare {
            num_tokens: self.num_tokens.saturating_sub(taken.num_tokens),
            num_scored: self.num_scored.saturating_sub(taken.num_scored),
        }
    }
}

/// A claim of a running prompt, or of a waiting sequence, on a part of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct BudgetClaim {
    pub(super) id: SequenceId,
    /// Tokens to compute; 0 for a reservation.
    pub(super) num_left: usize,
    /// Those of them that are scored.
    scored: ScoredAhead,
    pub(super) is_waiting: bool,
    /// What [`share_budget`] gives to it. What other claims leave over may be added later.
    pub(super) share: StepShare,
    was_preempted: bool,
}

impl BudgetClaim {
    /// The claim of a running prompt.
    pub(super) fn running(sequence: &Sequence) -> BudgetClaim {
        BudgetClaim {
            id: sequence.id,
            num_left: sequence.num_left(),
            scored: sequence.scored_ahead(),
            is_waiting: false,
            share: StepShare::default(),
            was_preempted: sequence.was_preempted,
        }
    }

    /// The claim of a waiting sequence that has `num_cached_tokens` tokens in the prefix cache.
    pub(super) fn waiting(sequence: &Sequence, num_cached_tokens: usize) -> BudgetClaim {
        let computes_here = sequence.role != SequenceRole::Decode;
        let num_left = if computes_here { sequence.num_left() - num_cached_tokens } else { 0 };
        BudgetClaim { num_left, is_waiting: true, ..BudgetClaim::running(sequence) }
    }

    /// What it can use of `share` in one step.
    pub(super) fn part_of(&self, share: StepShare) -> StepShare {
        let num_tokens = share.max_tokens(self.scored).min(self.num_left);
        StepShare { num_tokens, num_scored: self.scored.num_in(num_tokens) }
    }
}

/// Shares `step` among `claims`, which are in the order of age, oldest first. Returns the rest.
///
/// A prompt with far fewer tokens left comes first: shortest first gives the least mean time to the first token (L.
/// Schrage, "A Proof of the Optimality of the Shortest Remaining Processing Time Discipline", 1968). Within the same
/// power of four the older comes first: passing would gain little and cost the last one much. Preempted prompts come
/// before all others: their readers wait in the middle of an answer. The oldest prompt always gets its part, or it
/// could wait for ever. All that holds among prompts of one priority; those of a lower number come first.
///
/// A scored prompt gets no more tokens than the step can score for it, so others get the rest.
pub(super) fn share_budget(claims: &mut [BudgetClaim], step: StepShare, block_size: usize) -> StepShare {
    let Some(oldest) = claims.iter().position(|claim| claim.num_left > 0) else { return step };
    let mut left = step;
    // Kept for the oldest until its turn.
    let mut kept = claims[oldest].part_of(StepShare {
        num_tokens: (step.num_tokens / OLDEST_SHARE).max(block_size).min(step.num_tokens),
        num_scored: step.num_scored / OLDEST_SHARE,
    });
    let mut order: Vec<usize> = (0..claims.len()).collect();
    order.sort_by_key(|&idx| {
        let claim = &claims[idx];
        (claim.id.priority, !claim.was_preempted, claim.num_left.checked_ilog(4))
    });
    for idx in order {
        if idx == oldest {
            kept = StepShare::default();
        }
        claims[idx].share = claims[idx].part_of(left.minus(kept));
        left = left.minus(claims[idx].share);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of the shares and of the rest, for claims like `8000 500 preempted:90 later:10 scored:70`, oldest first.
    fn shares(claims: &str, budget: usize) -> (Vec<usize>, usize) {
        let claim = |(nth, text): (usize, &str)| {
            let (word, num_left) = text.split_once(':').unwrap_or(("", text));
            let id = SequenceId::new(i32::from(word == "later"), nth as u64);
            let num_left: usize = num_left.parse().expect("a number of tokens");
            let num_scored = if word == "scored" { num_left - 1 } else { 0 };
            BudgetClaim {
                id,
                num_left,
                scored: ScoredAhead { num_before: 0, num_scored },
                is_waiting: false,
                share: StepShare::default(),
                was_preempted: word == "preempted",
            }
        };
        let mut claims: Vec<BudgetClaim> = claims.split_whitespace().enumerate().map(claim).collect();
        let left = share_budget(&mut claims, StepShare::whole(budget), 16);
        let num_scored: usize = claims.iter().map(|claim| claim.share.num_scored).sum();
        assert_eq!(num_scored + left.num_scored, MAX_SCORED, "{claims:?}");
        (claims.iter().map(|claim| claim.share.num_tokens).collect(), left.num_tokens)
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
            // A step scores 64 tokens. The last token of a prompt is not scored.
            ("scored:65", vec![65]),
            ("scored:1000 500", vec![64, 448]),
            ("scored:1000 scored:1000 8000", vec![64, 0, 448]),
            ("scored:1000 scored:10", vec![55, 10]),
            ("scored:10 scored:10 scored:10 scored:10", vec![10, 10, 10, 10]),
            // The oldest keeps a quarter of them, too.
            ("scored:1000 scored:60 scored:60 100", vec![16, 48, 0, 100]),
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
