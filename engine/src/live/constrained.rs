//! The part of the live requests that have a grammar: their drafts and the masks of a step.

use std::iter;

use baton_drafting::length;
use baton_request::SpeculationMode;
use baton_scheduler::{Chunk, SequenceId, StepPlan, StepTime, TOKEN_GUESS};

use super::LiveRequests;
use crate::events::EngineError;

/// Most tokens of forced text of one sequence in a step.
const MAX_FORCED: usize = 16;

impl LiveRequests {
    /// Drafts the text that grammars force, for the plan's sequences that decode. The model may cut it into other tokens,
    /// so it is verified like every draft, and is as long as pays by what steps take. All together obey the limit of other drafts.
    /// Returns whether there is such a draft.
    pub(crate) fn draft_forced(&mut self, plan: &StepPlan) -> bool {
        let (cost, budget) = (self.cost_of_forced(plan), self.draft_budget(plan));
        let mut forced: Vec<(SequenceId, Vec<u32>)> = Vec::new();
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token && chunk.num_tokens == 1) {
            let live = self.requests.get_mut(&chunk.id).expect("planned sequences live");
            live.has_forced_draft = false;
            let Some(constraint) = &mut live.constraint else { continue };
            if live.request.speculation == SpeculationMode::Off {
                continue;
            }
            let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
            let max = sequence.max_num_drafts().min(MAX_FORCED).min(budget);
            let max = live.forced_length.next(max, cost, 0.0);
            if max > 0 {
                forced.push((chunk.id, constraint.forced(max)));
            }
        }
        let mut lengths: Vec<usize> = forced.iter().map(|(_, tokens)| tokens.len()).collect();
        length::share(budget, &mut lengths);
        for ((id, tokens), &length) in forced.iter().zip(&lengths) {
            self.requests.get_mut(id).expect("planned sequences live").has_forced_draft = length > 0;
            tokens[..length].iter().for_each(|&token| self.scheduler.push_draft(*id, token));
        }
        lengths.iter().any(|&length| length > 0)
    }

    /// Cuts the drafts of the plan's sequences to what their grammars allow. The first token that is refused counts as one that the
    /// target refuses.
    pub(crate) fn cut_drafts(&mut self, plan: &StepPlan) {
        for chunk in &plan.chunks {
            let live = self.requests.get_mut(&chunk.id).expect("planned sequences live");
            let Some(constraint) = &mut live.constraint else { continue };
            let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
            let num_drafts = sequence.draft().len();
            if num_drafts == 0 {
                continue;
            }
            let num_allowed = constraint.num_allowed(sequence.draft());
            self.scheduler.truncate_draft(chunk.id, num_allowed);
            live.draft_cut_at = (num_allowed < num_drafts).then_some(num_allowed);
            // Nothing is left to verify.
            if num_allowed == 0 && !live.has_forced_draft {
                live.draft_length.observe(1, 0);
            }
        }
    }

    /// Begins to compute masks of the plan's rows: all if the executor samples. Otherwise those of greedy rows whose likeliest
    /// token is likely to be refused, and of rows that sample those that take long. Others are computed when a row needs them.
    ///
    /// # Errors
    /// When the thread that does it cannot start or has ended.
    pub(crate) fn begin_masks(&mut self, plan: &StepPlan, samples: bool) -> Result<(), EngineError> {
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token) {
            let live = self.requests.get_mut(&chunk.id).expect("planned sequences live");
            if let Some(constraint) = &mut live.constraint {
                let drafts = self.scheduler.sequence(chunk.id).expect("planned sequences run").draft();
                let is_greedy = live.history.sampling(&live.request.sampling).is_greedy();
                let is_worth_it = match is_greedy {
                    true => constraint.has_refused(),
                    false => !self.masks.caller_takes(drafts.len() + 1),
                };
                if samples || is_worth_it {
                    self.masks.begin(chunk.id, constraint.lend(), drafts)?;
                } else {
                    constraint.skip_masks();
                }
            }
        }
        Ok(())
    }

    /// Waits for the masks of the step. Drafts end before the row that has no mask: a device samples nothing there.
    ///
    /// # Errors
    /// As [`begin_masks`](Self::begin_masks).
    pub(crate) fn collect_masks(&mut self) -> Result<(), EngineError> {
        let LiveRequests { requests, scheduler, masks, .. } = self;
        masks.collect(|masked| {
            let live = requests.get_mut(&masked.key);
            let Some(constraint) = live.and_then(|live| live.constraint.as_mut()) else { return };
            let num_drafts = scheduler.sequence(masked.key).map_or(0, |sequence| sequence.draft().len());
            let num_masked = masked.masks.as_ref().map_or(num_drafts, |masks| masks.len() - 1);
            if num_masked < num_drafts {
                scheduler.truncate_draft(masked.key, num_masked);
            }
            constraint.take_back(masked);
        })?;
        Ok(())
    }

    /// The sequences of a plan's rows with masks, once for each row, without its heads.
    pub(crate) fn masked(&self, plan: &StepPlan) -> Vec<SequenceId> {
        let is_masked = |chunk: &&Chunk| {
            chunk.wants_token && self.requests[&chunk.id].constraint.is_some() && !self.is_head(chunk)
        };
        let rows = |chunk: &Chunk| iter::repeat_n(chunk.id, chunk.num_rows() - chunk.num_scored);
        plan.chunks.iter().filter(is_masked).flat_map(rows).collect()
    }

    /// Begins to compute the masks of a step ahead, now that the tokens before it are known.
    ///
    /// # Errors
    /// As [`begin_masks`](Self::begin_masks).
    pub(crate) fn begin_masks_ahead(&mut self, masked: &[SequenceId]) -> Result<(), EngineError> {
        for &id in masked {
            // Others have ended meanwhile.
            if let Some(constraint) = self.requests.get_mut(&id).and_then(|live| live.constraint.as_mut()) {
                self.masks.begin(id, constraint.lend(), &[])?;
            }
        }
        Ok(())
    }

    /// The bits of the masks of rows, `[rows][vocab_size.div_ceil(32)]`. All are 0 where no token is read: the sequence has ended, or its
    /// mask is an error.
    pub(crate) fn mask_bits(&self, masked: &[SequenceId], vocab_size: usize) -> Vec<u32> {
        let num_words = vocab_size.div_ceil(32);
        let mut bits = vec![0; masked.len() * num_words];
        let mut rows = bits.chunks_exact_mut(num_words);
        for rows_of_one in masked.chunk_by(|a, b| a == b) {
            let constraint = self.requests.get(&rows_of_one[0]).and_then(|live| live.constraint.as_ref());
            for (row_idx, row) in rows.by_ref().take(rows_of_one.len()).enumerate() {
                if let Some(Ok(Some(mask))) = constraint.map(|constraint| constraint.begun(row_idx)) {
                    mask.write_bits(row);
                }
            }
        }
        bits
    }

    /// Whether text is forced after the known tokens of a plan's sequence, and the next plan would draft it. The first of its
    /// tokens is already being computed. If not, the step is counted as one without drafts.
    pub(crate) fn awaits_draft(&mut self, plan: &StepPlan) -> bool {
        let cost = self.cost_of_forced(plan);
        let most = MAX_FORCED.min(self.draft_budget(plan));
        let awaits_draft = plan.chunks.iter().any(|chunk| {
            let live = self.requests.get_mut(&chunk.id).expect("planned sequences live");
            let Some(constraint) = &mut live.constraint else { return false };
            let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
            let max = sequence.max_num_drafts().min(most);
            live.request.speculation != SpeculationMode::Off
                && !live.forced_length.is_resting(max, cost, 0.0)
                && constraint.forced(2).len() == 2
        });
        if !awaits_draft {
            for chunk in &plan.chunks {
                let live = self.requests.get_mut(&chunk.id).expect("planned sequences live");
                let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
                live.forced_length.next(sequence.max_num_drafts().min(most), cost, 0.0);
            }
        }
        awaits_draft
    }

    /// What a forced token costs beside the plan's other tokens, in steps. To find the text costs none.
    fn cost_of_forced(&self, plan: &StepPlan) -> f64 {
        let num_decodes = plan.num_decodes();
        let share = |step: StepTime| num_decodes as f64 * step.per_token / step.of(num_decodes);
        self.scheduler.step_time().map_or(TOKEN_GUESS, share)
    }
}
