//! The seam between the engine and whatever computes: a [`Batch`] in, logits out, or tokens that were sampled where
//! the logits are.
//!
//! An executor knows tokens, positions and blocks. It does not know requests, or why a batch looks as it does.

use baton_kv_cache::{BlockId, BlockStorage, KvLayout};

use crate::sampling::{SampledRow, TokenSampling};

/// Sequences to advance in one step.
#[derive(Clone, Debug, Default)]
pub struct Batch<'a> {
    /// In the order in which their logits come back.
    pub sequences: Vec<BatchSequence<'a>>,
}

/// The next `tokens` of one sequence: a chunk of a prompt, or the token decoded last and those that are
/// drafted to follow it.
#[derive(Clone, Copy, Debug)]
pub struct BatchSequence<'a> {
    /// Tokens whose KV is computed in this step; at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them: as many tokens lie in the cache already.
    pub start_idx: usize,
    /// Blocks of the whole sequence, enough for `start_idx + tokens.len()` tokens.
    pub blocks: &'a [BlockId],
    /// Of so many of the last of `tokens` the logits that follow are wanted; at most all.
    pub num_logits: usize,
}

/// Computes forward passes of one model over one block storage.
///
/// The result for a sequence is a function of that sequence alone: on processors bit for bit the same whatever else is in
/// the batch and however its tokens are cut into chunks, on devices within what roundings of other sums explain.
pub trait Executor: Send {
    /// The layout that the KV of this model has in blocks.
    fn kv_layout(&self) -> KvLayout;

    /// Token ids are below this; a row of logits has this many.
    fn vocab_size(&self) -> usize;

    /// Called once on the thread that will call [`execute`](Self::execute), before it does: what belongs to a thread,
    /// such as the processor that it runs on, is set up here.
    ///
    /// # Errors
    /// When the system refuses.
    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        Ok(())
    }

    /// Runs one step: writes the KV of every token of the batch into its blocks and returns, row by
    /// row, the logits that are wanted (`[sum of num_logits][vocab_size]`): those of the first sequence in
    /// the order of its tokens, then those of the next.
    ///
    /// `on_layer(layer_idx)` is called when the KV of that layer has been written for the whole
    /// batch, while later layers are still to come: the layer-wise push begins there.
    ///
    /// # Errors
    /// When the device failed. The contents of the blocks that the batch writes are then unspecified.
    ///
    /// # Safety
    /// Nobody else writes the blocks of the batch during the call, and nobody reads the places of
    /// the tokens it computes before `on_layer` named their layer.
    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError>;

    /// The same as one that samples tokens itself; `None` where logits come to the host anyway.
    fn sampling(&mut self) -> Option<&mut dyn SamplingExecutor> {
        None
    }
}

/// An executor whose logits are not in the host's memory: it samples from them there, while its caller does something
/// else.
pub trait SamplingExecutor {
    /// Begins a step as [`Executor::execute`] runs it, and samples by one of `samplings` after each wanted row, in the order of
    /// the rows. It is waited for by [`collect`](Self::collect).
    ///
    /// A second step may be launched before the first is collected: with `follows`, which says for each sequence after
    /// which of the first step's rows its one token is sampled, whatever `tokens` says. That token is counted here, where
    /// [`TokenSampling::counts`] has any. Otherwise `follows` is empty.
    ///
    /// Returns whether every row is sampled here, as it must be for a step to follow.
    ///
    /// # Errors
    /// When the device failed.
    ///
    /// # Safety
    /// As [`Executor::execute`], until the step is collected.
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError>;

    /// Waits for the oldest step that was launched; what follows its wanted rows. `on_layer` is called for those layers
    /// of which `launch` has not told.
    ///
    /// # Errors
    /// When the device failed.
    ///
    /// # Panics
    /// When no step is under way.
    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<SampledRow<'_>>, ExecuteError>;
}

/// The device failed; the engine cannot go on with this executor.
#[derive(Debug, thiserror::Error)]
#[error("{device}: {message}")]
pub struct ExecuteError {
    /// "cpu", "cuda:0".
    pub device: String,
    /// What it said.
    pub message: String,
}
