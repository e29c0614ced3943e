//! Blocks that the prefix cache gets while a prompt is computed that has them further back: from a tier or another engine, which
//! is read from its end while the engine computes from its beginning.

use baton_kv_cache::BlockHash;

use super::{holds::Holds, sequence_list::SequenceList};
use crate::{
    block_pool::BlockPool,
    plan::{Adoption, StepPlan},
    sequence::Sequence,
};

/// Gives running prompts the blocks of theirs that are cached by now, if any `is_new`, and moves those that have reached such blocks
/// behind them. No step may be in flight: it writes blocks of their tables.
pub(super) fn plan(
    running: &mut SequenceList,
    holds: &mut Holds,
    pool: &mut BlockPool,
    is_new: bool,
    plan: &mut StepPlan,
) {
    let is_prompt = |sequence: &&mut Sequence| sequence.num_left() > 1 && sequence.num_head_left() == 0;
    for sequence in running.iter_mut().filter(is_prompt) {
        if is_new {
            adopt(sequence, holds, pool);
        }
        let first_block_idx = sequence.num_computed / sequence.block_size();
        let num_blocks = match num_before_adopted(sequence, pool) {
            0 => {
                sequence.blocks[first_block_idx..].iter().take_while(|&&block| pool.is_cached(block)).count()
            }
            _ => continue,
        };
        drop(sequence.advance(num_blocks * sequence.block_size()));
        let (id, is_first) = (sequence.id, !sequence.was_preempted);
        plan.adopted.push(Adoption { id, first_block_idx, num_blocks, is_first });
    }
}

/// Tokens of a sequence from its computed ones to the first block that it adopted; all that are left if there is none.
pub(super) fn num_before_adopted(sequence: &Sequence, pool: &BlockPool) -> usize {
    if !sequence.has_adopted {
        return sequence.num_left();
    }
    let block_size = sequence.block_size();
    let first = sequence.num_computed.div_ceil(block_size);
    let found = sequence.blocks[first..].iter().position(|&block| pool.is_cached(block));
    found.map_or(sequence.num_left(), |idx| (first + idx) * block_size - sequence.num_computed)
}

/// Tokens of a sequence from its computed ones to the first block of its that is expected; all that are left if there is none.
pub(super) fn num_before_expected<'a>(
    sequence: &Sequence,
    expected: impl Iterator<Item = &'a (usize, BlockHash)>,
) -> usize {
    let is_own = |&&(idx, hash): &&(usize, BlockHash)| sequence.hashes().get(idx) == Some(&hash);
    let num_before =
        |&(idx, _): &(usize, _)| (idx * sequence.block_size()).checked_sub(sequence.num_computed);
    let nearest = expected.filter(is_own).filter_map(num_before).filter(|&num| num > 0).min();
    nearest.unwrap_or_else(|| sequence.num_left())
}

/// Exchanges the blocks that a sequence has not written for those that are cached under their hashes.
pub(super) fn adopt(sequence: &mut Sequence, holds: &mut Holds, pool: &mut BlockPool) {
    let first = sequence.num_computed.div_ceil(sequence.block_size());
    for idx in first..sequence.sharable_hashes().len() {
        let Some(block) = pool.find(&sequence.hashes()[idx]) else { continue };
        if block != sequence.blocks[idx] {
            pool.acquire(&[block]);
            pool.release(&[std::mem::replace(&mut sequence.blocks[idx], block)]);
            // Invariant 5: what is handed over is what the sequence has.
            holds.exchange(sequence.id, idx, block, pool);
        }
        sequence.has_adopted = true;
    }
}
