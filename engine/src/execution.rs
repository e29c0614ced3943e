//! Calls of an executor. A panic or an error of the device becomes an [`EngineError`].
//! It does not know sequences, plans or requests.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use baton_kv_cache::{BlockId, BlockStorage};
use baton_model_spec::{
    Batch, Blended, BlendedPrompt, BlendingExecutor, ExecuteError, Executor, InvalidLogits, PassageKv,
    SampledRow, TokenSampling,
};

use crate::events::EngineError;

/// Stands for a token that is not known yet.
pub(crate) const UNKNOWN: &[u32] = &[u32::MAX];

/// Computes a batch and returns its logits.
pub(crate) fn execute<'e>(
    executor: &'e mut dyn Executor,
    batch: &Batch<'_>,
    storage: &BlockStorage,
    on_layer: &mut dyn FnMut(usize),
) -> Result<&'e [f32], EngineError> {
    // SAFETY: A chunk's tokens are in blocks that its sequence allocated and that are not in the prefix cache yet, so
    // no other sequence has them. Transfers write only reserved blocks, which are in no batch, and read only blocks
    // that `on_layer` or a cached prefix announced. A held block of a running prefill is never reused.
    #[allow(unsafe_code)]
    let outcome = catch_panic(move || unsafe { executor.execute(batch, storage, on_layer) });
    Ok(outcome??)
}

/// Launches a batch. Returns whether another step can be launched before this one is collected.
pub(crate) fn launch(
    executor: &mut dyn Executor,
    batch: &Batch<'_>,
    samplings: &[TokenSampling<'_>],
    follows: &[usize],
    storage: &BlockStorage,
    on_layer: &mut dyn FnMut(usize),
) -> Result<bool, EngineError> {
    let executor = executor.sampling().expect("the executor samples");
    // SAFETY: As for `execute`, until the step is collected. A step is collected before the next command that could end a sequence
    // unless it was planned ahead. In that case the blocks of its sequences return to the pool only after it is collected.
    #[allow(unsafe_code)]
    let outcome =
        catch_panic(move || unsafe { executor.launch(batch, samplings, follows, storage, on_layer) });
    Ok(outcome??)
}

/// Gives the masks of the step that was launched last.
pub(crate) fn mask(executor: &mut dyn Executor, masks: &[u32]) -> Result<(), EngineError> {
    let executor = executor.sampling().expect("the executor samples");
    Ok(catch_panic(move || executor.mask(masks))??)
}

/// Computes the KV of a passage on its own, in the blocks of a sequence.
pub(crate) fn compute_passage(
    executor: &mut dyn Executor,
    tokens: &[u32],
    blocks: &[BlockId],
    storage: &BlockStorage,
) -> Result<PassageKv, EngineError> {
    let executor = blending(executor);
    // SAFETY: a head is computed from its first token on, so all its blocks are its sequence's own, and no layer of them
    // was announced.
    #[allow(unsafe_code)]
    let outcome = catch_panic(move || unsafe { executor.compute_passage(tokens, blocks, storage) });
    Ok(outcome??)
}

/// Blends the head of a sequence.
pub(crate) fn blend<'e>(
    executor: &'e mut dyn Executor,
    prompt: &BlendedPrompt<'_>,
    storage: &BlockStorage,
    on_layer: &mut dyn FnMut(usize),
) -> Result<Blended<'e>, EngineError> {
    let executor = blending(executor);
    // SAFETY: as for `compute_passage`; readers wait for `on_layer`.
    #[allow(unsafe_code)]
    let outcome = catch_panic(move || unsafe { executor.blend(prompt, storage, on_layer) });
    Ok(outcome??)
}

fn blending(executor: &mut dyn Executor) -> &mut dyn BlendingExecutor {
    executor.blending().expect("a sequence has a head only if the executor blends")
}

/// How long the oldest launched step is still computed, at least.
pub(crate) fn least_left(executor: &mut dyn Executor) -> Result<Duration, EngineError> {
    let executor = executor.sampling().expect("the executor samples");
    Ok(catch_panic(move || executor.least_left())??)
}

/// Waits for the oldest launched step.
pub(crate) fn collect<'e>(
    executor: &'e mut dyn Executor,
    on_layer: &mut dyn FnMut(usize),
) -> Result<Vec<SampledRow<'e>>, EngineError> {
    let executor = executor.sampling().expect("the executor samples");
    Ok(catch_panic(move || executor.collect(on_layer))??)
}

/// Turns a panic of the executor into an error. The engine ends after it and does not use the executor again.
fn catch_panic<T>(execute: impl FnOnce() -> T) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(execute)).map_err(|panic| EngineError::from_panic(&*panic))
}

impl From<InvalidLogits> for EngineError {
    fn from(InvalidLogits: InvalidLogits) -> EngineError {
        EngineError::InvalidLogits
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
