//! What an executor computes for a plan: the batch, and the blocks that it completes.
//! It does not know when a plan is computed.

use baton_kv_cache::BlockId;
use baton_model_spec::{Batch, BatchSequence};
use baton_scheduler::{Chunk, SequenceId, StepPlan};

use crate::{
    blending::Head, events::PrefillEvent, execution::UNKNOWN, live::LiveRequests, live_request::ReplyChannel,
};

/// Blocks that a chunk of a prefill completes. They are announced layer by layer.
pub(crate) struct Completion {
    pub(crate) id: SequenceId,
    first_block_idx: usize,
    blocks: Vec<BlockId>,
}

/// The tokens of a plan. A chunk that wants a token gets logits after its last token. A chunk with a draft gets logits
/// after the token before the draft and after each token of the draft. So does a chunk that is scored. Heads are left out: see [`heads`].
pub(crate) fn batch<'a>(live: &'a LiveRequests, plan: &StepPlan) -> Batch<'a> {
    let chunks = plan.chunks.iter().filter(|chunk| !live.is_head(chunk));
    let sequences = chunks.map(|chunk| {
        let sequence = live.scheduler.sequence(chunk.id).expect("planned sequences run");
        BatchSequence {
            tokens: &sequence.tokens_and_draft()[chunk.start_idx..chunk.start_idx + chunk.num_tokens],
            start_idx: chunk.start_idx,
            blocks: sequence.blocks(),
            num_logits: chunk.num_rows(),
        }
    });
    Batch { sequences: sequences.collect() }
}

/// The heads of a plan, which are blended one by one.
pub(crate) fn heads<'a>(
    live: &'a LiveRequests,
    plan: &'a StepPlan,
) -> impl Iterator<Item = (SequenceId, Head<'a>)> {
    plan.chunks.iter().filter(|chunk| live.is_head(chunk)).map(|chunk| (chunk.id, live.head(chunk)))
}

/// The batch of a plan that was decided before its tokens are known: one token of each sequence.
pub(crate) fn batch_ahead<'a>(live: &'a LiveRequests, plan: &StepPlan) -> Batch<'a> {
    let sequences = plan.chunks.iter().map(|chunk| {
        let sequence = live.scheduler.sequence(chunk.id).expect("planned sequences run");
        let (start_idx, blocks) = (chunk.start_idx, sequence.blocks());
        BatchSequence { tokens: UNKNOWN, start_idx, blocks, num_logits: 1 }
    });
    Batch { sequences: sequences.collect() }
}

/// A callback for the executor: it tells the readers of prefills which blocks of a layer are complete.
pub(crate) fn announcing<'a>(
    completions: &'a [Completion],
    live: &'a LiveRequests,
) -> impl FnMut(usize) + 'a {
    move |layer_idx| {
        for completion in completions {
            if let ReplyChannel::Prefill(sink) = live.reply(completion.id) {
                sink.send(PrefillEvent::Ready {
                    layers: layer_idx..layer_idx + 1,
                    first_block_idx: completion.first_block_idx,
                    blocks: completion.blocks.clone(),
                });
            }
        }
    }
}

impl Completion {
    /// The blocks that the batch of a plan completes for prefills.
    pub(crate) fn of_batch(plan: &StepPlan, live: &LiveRequests, block_size: usize) -> Vec<Completion> {
        Completion::all(plan, live, block_size, false)
    }

    /// The blocks that the heads of a plan complete for prefills. They are computed after the batch.
    pub(crate) fn of_heads(plan: &StepPlan, live: &LiveRequests, block_size: usize) -> Vec<Completion> {
        Completion::all(plan, live, block_size, true)
    }

    fn all(plan: &StepPlan, live: &LiveRequests, block_size: usize, heads: bool) -> Vec<Completion> {
        let is_prefill = |chunk: &&Chunk| {
            // A sequence of a step ahead may have ended since: it has no head.
            live.is_head(chunk) == heads && matches!(live.reply(chunk.id), ReplyChannel::Prefill(_))
        };
        let completion = |chunk: &Chunk| {
            let sequence = live.scheduler.sequence(chunk.id).expect("planned sequences run");
            Completion::of(chunk, sequence.blocks(), block_size)
        };
        plan.chunks.iter().filter(is_prefill).filter_map(completion).collect()
    }

    fn of(chunk: &Chunk, blocks: &[BlockId], block_size: usize) -> Option<Completion> {
        let end = chunk.start_idx + chunk.num_tokens;
        let first = chunk.start_idx / block_size;
        // The end of the prompt completes its last block, even if that block is not full.
        let last = if chunk.wants_token { end.div_ceil(block_size) } else { end / block_size };
        let blocks = blocks[first..last.max(first)].to_vec();
        (first < last).then_some(Completion { id: chunk.id, first_block_idx: first, blocks })
    }
}
