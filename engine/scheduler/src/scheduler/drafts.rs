//! Drafted tokens of a step: how many are verified, and which blocks they keep.
//! It does not know where drafts come from.

use super::sequence_list::SequenceList;
use crate::{block_pool::BlockPool, plan::StepPlan, sequence::Sequence};

/// Adds the drafts of running sequences to the chunks of `plan`. A draft is cut to `budget`, the number of tokens that
/// the step has left, and to the blocks that are available.
pub(super) fn plan(
    running: &mut SequenceList,
    pool: &mut BlockPool,
    block_size: usize,
    mut budget: usize,
    plan: &mut StepPlan,
) {
    for chunk in &mut plan.chunks {
        let sequence = running.get_mut(chunk.id).expect("planned sequences run");
        let num_tokens = sequence.tokens().len();
        debug_assert!(sequence.draft().is_empty() || (chunk.num_tokens == 1 && chunk.wants_token));
        sequence.truncate_draft(budget.min(sequence.max_num_drafts()));
        while sequence.blocks.len() * block_size < sequence.tokens_and_draft().len() {
            match pool.allocate() {
                Some(block) => sequence.blocks.push(block),
                None => sequence.truncate_draft(sequence.blocks.len() * block_size - num_tokens),
            }
        }
        chunk.num_drafts = sequence.draft().len();
        chunk.num_tokens += chunk.num_drafts;
        budget -= chunk.num_drafts;
    }
}

/// Appends a sampled token. True when the draft had that token. Otherwise the rest of the draft is gone, and the blocks
/// that only the draft needed return to the pool.
pub(super) fn push_token(sequence: &mut Sequence, token: u32, pool: &mut BlockPool) -> bool {
    let is_accepted = sequence.push(token);
    if is_accepted {
        let (before, filled) = sequence.advance(1);
        pool.cache_all(before, filled);
    } else {
        let num_blocks = sequence.blocks.len().min(sequence.num_blocks_needed());
        pool.release(&sequence.blocks[num_blocks..]);
        sequence.blocks.truncate(num_blocks);
    }
    is_accepted
}
