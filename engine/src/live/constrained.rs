//! The part of the live requests that have a grammar: their drafts and the masks of a step.

use baton_request::SpeculationMode;

use super::LiveRequests;
use crate::{
    events::EngineError,
    plan::StepPlan,
    step_time::{StepTime, TOKEN_GUESS},
};

/// Most tokens of forced text in a step.
const MAX_FORCED: usize = 16;

impl LiveRequests {
    /// Drafts the text that grammars force, for the plan's sequences that decode. The model may cut it into other tokens,
    /// so it is verified like every draft, and is as long as pays by what steps take. Returns whether there is such a draft.
    pub(crate) fn draft_forced(&mut self, plan: &StepPlan) -> bool {
        let mut has_drafts = false;
        // Of one more token for each sequence, in steps. To find the text costs none.
        let num_decodes = plan.num_decodes();
        let share = |step: StepTime| num_decodes as f64 * step.per_token / step.of(num_decodes);
        let cost = self.scheduler.step_time().map_or(TOKEN_GUESS, share);
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token && chunk.num_tokens == 1) {
            let live = self.requests.get_mut(&chunk.id).expect("planned sequences live");
            live.has_forced_draft = false;
            let Some(constraint) = &mut live.constraint else { continue };
            if live.request.speculation == SpeculationMode::Off {
                continue;
            }
            let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
            let max = sequence.max_num_drafts().min(MAX_FORCED);
            let max = live.forced_length.next(max, cost, 0.0);
            let forced = if max > 0 { constraint.forced(max) } else { Vec::new() };
            live.has_forced_draft = !forced.is_empty();
            has_drafts |= live.has_forced_draft;
            forced.into_iter().for_each(|token| self.scheduler.push_draft(chunk.id, token));
        }
        has_drafts
    }

    /// Cuts the drafts of the plan's sequences to what their grammars allow.
    pub(crate) fn cut_drafts(&mut self, plan: &StepPlan) {
        for chunk in &plan.chunks {
            let live = self.requests.get_mut(&chunk.id).expect("planned sequences live");
            let Some(constraint) = &mut live.constraint else { continue };
            let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
            if !sequence.draft().is_empty() {
                let num_allowed = constraint.num_allowed(sequence.draft());
                self.scheduler.truncate_draft(chunk.id, num_allowed);
            }
        }
    }

    /// Begins to compute the masks of the plan's rows.
    ///
    /// # Errors
    /// When the thread that does it cannot start or has ended.
    pub(crate) fn begin_masks(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token) {
            let live = self.requests.get_mut(&chunk.id).expect("planned sequences live");
            if let Some(constraint) = &mut live.constraint {
                let sequence = self.scheduler.sequence(chunk.id).expect("planned sequences run");
                self.masks.begin(chunk.id, constraint, sequence.draft())?;
            }
        }
        Ok(())
    }

    /// Waits for the masks of the step.
    ///
    /// # Errors
    /// As [`begin_masks`](Self::begin_masks).
    pub(crate) fn collect_masks(&mut self) -> Result<(), EngineError> {
        let requests = &mut self.requests;
        self.masks.collect(|id, constraint| {
            if let Some(live) = requests.get_mut(&id) {
                live.constraint = Some(Box::new(constraint));
            }
        })
    }
}
