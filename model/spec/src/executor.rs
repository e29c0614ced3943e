//! The interface between the engine and a compute backend: a [`Batch`] goes in; logits come out, or tokens that the
//! backend sampled itself.
//!
//! An executor knows tokens, positions and blocks. It does not know requests or how a batch was scheduled.

use std::time::Duration;

use baton_kv_cache::{BlockId, BlockStorage, KvLayout};

use crate::blend::{BlendRefusal, Blended, BlendedPrompt, PassageKv};
use crate::sampling::{SampledRow, TokenSampling};

/// Sequences to advance in one step.
#[derive(Clone, Debug, Default)]
pub struct Batch<'a> {
    /// Their logits come back in this order.
    pub sequences: Vec<BatchSequence<'a>>,
}

/// The next `tokens` of one sequence: a chunk of a prompt, or the last decoded token followed by draft tokens.
#[derive(Clone, Copy, Debug)]
pub struct BatchSequence<'a> {
    /// Tokens whose KV this step computes; at least one.
    pub tokens: &'a [u32],
    /// Position of the first token. The cache already holds the KV of this many tokens.
    pub start_idx: usize,
    /// Blocks of the whole sequence, enough for `start_idx + tokens.len()` tokens.
    pub blocks: &'a [BlockId],
    /// The number of last tokens whose logits are returned; at most `tokens.len()`.
    pub num_logits: usize,
}

impl<'a> Batch<'a> {
    /// The tokens whose logits are returned, as a batch of their own: what follows the last layer's KV is computed for them alone.
    /// `None` if they are all tokens.
    pub fn wanted(&self) -> Option<Batch<'a>> {
        if self.sequences.iter().all(|sequence| sequence.num_logits == sequence.tokens.len()) {
            return None;
        }
        let sequences = self.sequences.iter().filter(|sequence| sequence.num_logits > 0);
        let wanted = |sequence: &BatchSequence<'a>| {
            let num_others = sequence.tokens.len() - sequence.num_logits;
            let (tokens, start_idx) = (&sequence.tokens[num_others..], sequence.start_idx + num_others);
            BatchSequence { tokens, start_idx, ..*sequence }
        };
        Some(Batch { sequences: sequences.map(wanted).collect() })
    }
}

/// Computes forward passes of one model over one block storage.
///
/// The result for a sequence depends on that sequence alone. On CPUs it is bit for bit the same whatever else is in
/// the batch and however the tokens are cut into chunks. On GPUs it may differ by rounding, because sums are taken in
/// another order.
pub trait Executor: Send {
    /// The layout of this model's KV in blocks.
    fn kv_layout(&self) -> KvLayout;

    /// Token ids are below this. A row of logits has this many entries.
    fn vocab_size(&self) -> usize;

    /// Sets up what belongs to a thread, such as CPU affinity. Called once, on the thread that will call
    /// [`execute`](Self::execute), before the first call.
    ///
    /// # Errors
    /// When the operating system refuses.
    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        Ok(())
    }

    /// Runs one step. Writes the KV of every token of the batch into its blocks and returns the requested logits,
    /// `[sum of num_logits][vocab_size]`: the rows of the first sequence in the order of its tokens, then those of
    /// the next sequence.
    ///
    /// Calls `on_layer(layer_idx)` when the KV of that layer is written for the whole batch, while later layers are
    /// still to be computed. The layer-wise KV transfer starts there.
    ///
    /// # Errors
    /// When the device fails. The contents of the blocks that the batch writes are then unspecified.
    ///
    /// # Safety
    /// During the call no other code writes the blocks of the batch. No other code reads the KV of the computed
    /// tokens in a layer before `on_layer` reported that layer.
    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError>;

    /// This executor as one that samples on the device; `None` if its logits are in host memory anyway.
    fn sampling(&mut self) -> Option<&mut dyn SamplingExecutor> {
        None
    }

    /// This executor as one that blends.
    ///
    /// # Errors
    /// When it or its model cannot.
    fn blending(&mut self) -> Result<&mut dyn BlendingExecutor, BlendRefusal> {
        Err(BlendRefusal::Backend)
    }
}

/// An executor whose logits stay in device memory. It samples there, and its caller works on while it does.
pub trait SamplingExecutor {
    /// Starts a step as [`Executor::execute`] does and samples one token after each requested row, with `samplings`
    /// in the order of the rows. [`collect`](Self::collect) waits for the step.
    ///
    /// A second step may be launched before the first is collected. Then `follows` holds, for each sequence, the
    /// index of the row of the first step whose sampled token is this sequence's one input token; `tokens` is
    /// ignored. The executor adds that token to [`TokenSampling::counts`] if the list is not empty. Otherwise
    /// `follows` is empty.
    ///
    /// Returns whether the device samples every row. Only then may another step follow.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As for [`Executor::execute`], until the step is collected.
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError>;

    /// Gives the masks of the newest launched step: of each row whose sampling [is masked](TokenSampling::is_masked), in the order of
    /// the rows, `[rows][vocab_size.div_ceil(32)]`. Bit `t % 32` of word `t / 32` says whether token `t` may come. The step samples only then, so its
    /// masks may be computed while it is. A step with such rows gets them once, before another one is launched and before it is
    /// collected.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the step has another number of such rows.
    fn mask(&mut self, masks: &[u32]) -> Result<(), ExecuteError>;

    /// How long the oldest launched step is still computed, at least. Zero when it is computed, and when only
    /// [`collect`](Self::collect) can wait for it.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When no step was launched.
    fn least_left(&mut self) -> Result<Duration, ExecuteError> {
        Ok(Duration::ZERO)
    }

    /// Waits for the oldest launched step and returns the result for each of its requested rows. Calls `on_layer` for
    /// the layers that `launch` has not reported.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When no step was launched, or it lacks masks.
    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<SampledRow<'_>>, ExecuteError>;
}

/// An executor that can blend.
pub trait BlendingExecutor {
    /// Tokens of the longest prompt that it blends.
    fn max_blended_tokens(&self) -> usize;

    /// Bytes of a passage's KV for each of its tokens.
    fn passage_token_bytes(&self) -> usize;

    /// Computes the KV of a passage of text on its own, as the whole of a prompt. It depends on the tokens alone.
    /// `blocks` are memory to compute in, enough for the tokens; their contents are unspecified afterwards.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// During the call no other code reads or writes the blocks.
    unsafe fn compute_passage(
        &mut self,
        tokens: &[u32],
        blocks: &[BlockId],
        storage: &BlockStorage,
    ) -> Result<PassageKv, ExecuteError>;

    /// Writes the KV of every token of `prompt` into its blocks, and calls `on_layer` as
    /// [`Executor::execute`] does. With
    /// [`BlendRatio::ALL`](crate::BlendRatio::ALL) the KV is bit for bit that of a full prefill.
    ///
    /// # Errors
    /// When the device fails. The contents of the blocks are then unspecified.
    ///
    /// # Panics
    /// When passages overlap, are out of order or beyond the prompt, or are of another executor, or the prompt is longer than
    /// [`max_blended_tokens`](Self::max_blended_tokens).
    ///
    /// # Safety
    /// As for [`Executor::execute`].
    unsafe fn blend(
        &mut self,
        prompt: &BlendedPrompt<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Blended<'_>, ExecuteError>;
}

/// The device failed. The engine cannot use this executor any more.
#[derive(Debug, thiserror::Error)]
#[error("{device}: {message}")]
pub struct ExecuteError {
    /// "cpu", "cuda:0".
    pub device: String,
    /// The device's error message.
    pub message: String,
}
