//! One rank of an executor: what it computes with, and how it samples.
//!
//! It does not know threads, nor how many ranks there are.

use baton_kv_cache::{BlockStorage, KvLayout};

use crate::executor::{Batch, ExecuteError};
use crate::sampling::{SampledRow, TokenSampling};

/// One rank: what it computes with, and its end of what connects it with the others.
pub trait RankExecutor: Send + 'static {
    /// Whether ranks meet before one tells of a layer, so that all have written it. Otherwise each tells of what it has
    /// written itself.
    const MEETS_FOR_LAYERS: bool;

    /// What it computes on, as errors name it.
    fn device(&self) -> &str;

    /// As of an executor of the whole model.
    fn kv_layout(&self) -> KvLayout;

    /// Likewise.
    fn vocab_size(&self) -> usize;

    /// As [`Executor::attach_thread`].
    fn attach_thread(&mut self) -> Result<(), ExecuteError>;

    /// The rank's part of a step; how many logits there are, 0 for all ranks but the first.
    ///
    /// # Errors
    /// When it fails, or another rank is gone.
    ///
    /// # Safety
    /// As [`Executor::execute`]; all ranks compute the same batch on the same storage.
    unsafe fn compute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<usize, RankError>;

    /// The first logits of the last step.
    fn logits(&self, num_logits: usize) -> &[f32];

    /// The same as one that samples; `None` where logits come to the host.
    fn sampling(&mut self) -> Option<&mut dyn SamplingRank> {
        None
    }

    /// Ends its part in what the ranks do together: the ranks that wait for it, or come to wait, are told. It is not
    /// asked for anything any more.
    fn leave(&mut self);
}

/// Why a rank has not computed its part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankError {
    /// Another is gone, which is not its fault.
    Missed(String),
    /// Its own device failed.
    Failed(String),
}

/// A rank that computes where tokens can be sampled. All launch and collect the same steps.
pub trait SamplingRank {
    /// The rank's part of [`SamplingExecutor::launch`]; what the first returns is whether it samples every row.
    ///
    /// # Errors
    /// When it fails, or another rank is gone.
    ///
    /// # Safety
    /// As [`SamplingExecutor::launch`].
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, RankError>;

    /// Waits for its part of the oldest step that was launched.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<(), RankError>;

    /// What follows the wanted rows of the step that was collected last, of the first rank.
    fn answers(&self) -> Vec<SampledRow<'_>>;
}
