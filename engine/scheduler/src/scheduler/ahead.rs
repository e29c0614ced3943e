//! A step that is decided while the one before it is computed.

use baton_kv_cache::BlockId;

use super::sequence_list::SequenceList;
use crate::{
    block_pool::BlockPool,
    plan::{Chunk, StepPlan},
    sequence::SequenceRole,
};

/// Whether a step is computed ahead, and the blocks of sequences that ended during it. The executor still writes these
/// blocks, so they return to the pool only when the step is over.
#[derive(Debug, Default)]
pub(super) struct StepAhead {
    is_ahead: bool,
    retired: Vec<BlockId>,
}

impl StepAhead {
    /// A step was computed; `is_ahead` says whether the one after it is already being computed.
    pub(super) fn computed(&mut self, is_ahead: bool, pool: &mut BlockPool) {
        pool.release(&self.retired);
        self.retired.clear();
        self.is_ahead = is_ahead;
    }

    /// Gives up the blocks of a sequence that ended, at once or when the step ahead is over.
    pub(super) fn retire(&mut self, blocks: &[BlockId], pool: &mut BlockPool) {
        if self.is_ahead {
            self.retired.extend(blocks);
        } else {
            pool.release(blocks);
        }
    }

    /// Blocks whose sequences ended during the step ahead.
    pub(super) fn retired(&self) -> &[BlockId] {
        &self.retired
    }
}

/// Decides the step after that of `plan`; see [`Scheduler::step_ahead`](super::Scheduler::step_ahead).
pub(super) fn plan(
    running: &mut SequenceList,
    pool: &mut BlockPool,
    block_size: usize,
    plan: &StepPlan,
    next: &mut StepPlan,
    follows: &mut Vec<usize>,
) -> bool {
    for sequence in running.iter_mut() {
        // Chunks are in the order of ids, unless a sequence came back. Then the step is not decided yet.
        let found = plan.chunks.binary_search_by_key(&sequence.id, |chunk| chunk.id);
        let Ok(row_idx) = found else { return false };
        let chunk = &plan.chunks[row_idx];
        if !chunk.wants_token || chunk.num_rows() != 1 || sequence.role != SequenceRole::Generate {
            return false;
        }
        if sequence.max_num_drafts() == 0 {
            continue;
        }
        let start_idx = chunk.start_idx + chunk.num_tokens;
        if sequence.blocks.len() * block_size <= start_idx {
            match pool.allocate() {
                Some(block) => sequence.blocks.push(block),
                None => return false,
            }
        }
        let id = sequence.id;
        next.chunks.push(Chunk {
            id,
            start_idx,
            num_tokens: 1,
            num_drafts: 0,
            num_scored: 0,
            wants_token: true,
        });
        follows.push(row_idx);
    }
    !next.chunks.is_empty()
}
