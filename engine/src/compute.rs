//! Plans as batches, and the calls of the executor: what holds while it computes, and who is told of layers meanwhile.
//! It does not know when.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use baton_kv_cache::{BlockId, BlockStorage};
use baton_model_spec::{Batch, BatchSequence, ExecuteError, Executor, SampledRow, TokenSampling};

use crate::{
    command::Reply,
    events::{EngineError, PrefillEvent},
    live::LiveRequests,
    plan::{Chunk, Plan},
    sequence::SequenceId,
};

/// Blocks that a chunk of a prefill completes, to be announced layer by layer.
pub(crate) struct Completion {
    id: SequenceId,
    first_block_idx: usize,
    blocks: Vec<BlockId>,
}

/// In place of a token that is not known yet.
pub(crate) const UNKNOWN: &[u32] = &[u32::MAX];

/// The plan's tokens. Logits are wanted after the last token of each chunk that wants one, and after the token before
/// its draft and each of the draft.
pub(crate) fn batch<'a>(live: &'a LiveRequests, plan: &Plan) -> Batch<'a> {
    let sequences = plan.chunks.iter().map(|chunk| {
        let sequence = live.scheduler.sequence(chunk.id).expect("planned sequences run");
        BatchSequence {
            tokens: &sequence.tokens_and_draft()[chunk.start_idx..chunk.start_idx + chunk.num_tokens],
            start_idx: chunk.start_idx,
            blocks: sequence.blocks(),
            num_logits: if chunk.wants_token { chunk.num_drafts + 1 } else { 0 },
        }
    });
    Batch { sequences: sequences.collect() }
}

/// The tokens of a plan that was decided before they are known: one of each sequence.
pub(crate) fn batch_ahead<'a>(live: &'a LiveRequests, plan: &Plan) -> Batch<'a> {
    let sequences = plan.chunks.iter().map(|chunk| {
        let sequence = live.scheduler.sequence(chunk.id).expect("planned sequences run");
        let (start_idx, blocks) = (chunk.start_idx, sequence.blocks());
        BatchSequence { tokens: UNKNOWN, start_idx, blocks, num_logits: 1 }
    });
    Batch { sequences: sequences.collect() }
}

/// Computes a batch; its logits.
pub(crate) fn execute<'e>(
    executor: &'e mut dyn Executor,
    batch: &Batch<'_>,
    storage: &BlockStorage,
    on_layer: &mut dyn FnMut(usize),
) -> Result<&'e [f32], EngineError> {
    // SAFETY: a chunk's tokens lie in blocks that its sequence allocated and that are not in the
    // prefix cache yet, so no other sequence has them; transfers write only reserved blocks, which
    // are in no batch, and read only what `on_layer` or a cached prefix announced. A running
    // prefill's blocks are not taken away while they are held.
    #[allow(unsafe_code)]
    let outcome = catch_panic(move || unsafe { executor.execute(batch, storage, on_layer) });
    Ok(outcome??)
}

/// Launches a batch; whether another can follow.
pub(crate) fn launch(
    executor: &mut dyn Executor,
    batch: &Batch<'_>,
    draws: &[TokenSampling<'_>],
    follows: &[usize],
    storage: &BlockStorage,
    on_layer: &mut dyn FnMut(usize),
) -> Result<bool, EngineError> {
    let executor = executor.sampling().expect("it draws");
    // SAFETY: as for `execute`, until the step is collected: a step is collected before the next command unless it was
    // planned ahead, and then the blocks of its sequences return to the pool only when it has been.
    #[allow(unsafe_code)]
    let outcome = catch_panic(move || unsafe { executor.launch(batch, draws, follows, storage, on_layer) });
    Ok(outcome??)
}

/// Waits for the oldest step that was launched.
pub(crate) fn collect<'e>(
    executor: &'e mut dyn Executor,
    on_layer: &mut dyn FnMut(usize),
) -> Result<Vec<SampledRow<'e>>, EngineError> {
    let executor = executor.sampling().expect("it draws");
    Ok(catch_panic(move || executor.collect(on_layer))??)
}

/// Tells who waits for blocks of a layer that they are complete.
pub(crate) fn announcing<'a>(
    completions: &'a [Completion],
    live: &'a LiveRequests,
) -> impl FnMut(usize) + 'a {
    move |layer_idx| {
        for completion in completions {
            if let Reply::Prefill(sink) = live.reply(completion.id) {
                sink.send(PrefillEvent::Ready {
                    layers: layer_idx..layer_idx + 1,
                    first_block_idx: completion.first_block_idx,
                    blocks: completion.blocks.clone(),
                });
            }
        }
    }
}

/// A panic of `execute` as an error. What it left behind is not used again: the engine ends.
pub(crate) fn catch_panic<T>(execute: impl FnOnce() -> T) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(execute)).map_err(|panic| EngineError::from_panic(&*panic))
}

impl Completion {
    /// What computing a plan completes, where somebody waits for blocks.
    pub(crate) fn all(plan: &Plan, live: &LiveRequests, block_size: usize) -> Vec<Completion> {
        let is_waited_for = |chunk: &&Chunk| matches!(live.reply(chunk.id), Reply::Prefill(_));
        let completion = |chunk: &Chunk| {
            let sequence = live.scheduler.sequence(chunk.id).expect("planned sequences run");
            Completion::of(chunk, sequence.blocks(), block_size)
        };
        plan.chunks.iter().filter(is_waited_for).filter_map(completion).collect()
    }

    fn of(chunk: &Chunk, blocks: &[BlockId], block_size: usize) -> Option<Completion> {
        let end = chunk.start_idx + chunk.num_tokens;
        let first = chunk.start_idx / block_size;
        // With the prompt its last block is complete, too, however full.
        let last = if chunk.wants_token { end.div_ceil(block_size) } else { end / block_size };
        let blocks = blocks[first..last.max(first)].to_vec();
        (first < last).then_some(Completion { id: chunk.id, first_block_idx: first, blocks })
    }
}

impl From<ExecuteError> for EngineError {
    fn from(error: ExecuteError) -> EngineError {
        EngineError::Executor { message: error.to_string() }
    }
}

impl EngineError {
    pub(crate) fn from_panic(panic: &(dyn Any + Send)) -> EngineError {
        let message = panic
            .downcast_ref::<&str>()
            .map(|message| message.to_string())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".into());
        EngineError::Panicked { message }
    }
}
