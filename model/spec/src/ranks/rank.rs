//! The traits of one rank: how it computes its part of a step and how it samples.
//!
//! A rank does not know threads.

use baton_kv_cache::{BlockStorage, KvLayout};

use crate::executor::{Batch, ExecuteError};
use crate::sampling::{SampledRow, TokenSampling};

/// One rank: its compute backend and its connection to the other ranks.
pub trait RankExecutor: Send + 'static {
    /// Whether ranks synchronise before one reports a layer, so that all have written it then. Otherwise each reports
    /// the layers that it has written itself.
    const MEETS_FOR_LAYERS: bool;

    /// The device's name, for error messages.
    fn device(&self) -> &str;

    /// As [`Executor::kv_layout`](crate::Executor::kv_layout): of the whole model.
    fn kv_layout(&self) -> KvLayout;

    /// As [`Executor::vocab_size`](crate::Executor::vocab_size).
    fn vocab_size(&self) -> usize;

    /// As [`Executor::attach_thread`](crate::Executor::attach_thread).
    fn attach_thread(&mut self) -> Result<(), ExecuteError>;

    /// Computes this rank's part of a step. Returns the number of logits, which is 0 for all ranks but the first.
    ///
    /// # Errors
    /// When this rank fails, or another rank is lost.
    ///
    /// # Safety
    /// As for [`Executor::execute`](crate::Executor::execute); all ranks compute the same batch on the same storage.
    unsafe fn compute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<usize, RankError>;

    /// The first `num_logits` logits of the last step.
    fn logits(&self, num_logits: usize) -> &[f32];

    /// This rank as one that samples; `None` if logits are in host memory.
    fn sampling(&mut self) -> Option<&mut dyn SamplingRank> {
        None
    }

    /// Leaves the group: operations in which other ranks wait for this one fail, now and later. The rank is not used
    /// afterwards.
    fn leave(&mut self);
}

/// Why a rank has not computed its part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankError {
    /// Another rank is lost; this one is intact.
    Missed(String),
    /// This rank's device failed.
    Failed(String),
}

/// A rank that can sample on its device. All ranks launch and collect the same steps.
pub trait SamplingRank {
    /// This rank's part of [`SamplingExecutor::launch`](crate::SamplingExecutor::launch). The first rank returns
    /// whether it samples every row.
    ///
    /// # Errors
    /// When this rank fails, or another rank is lost.
    ///
    /// # Safety
    /// As for [`SamplingExecutor::launch`](crate::SamplingExecutor::launch).
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, RankError>;

    /// As [`SamplingExecutor::mask`](crate::SamplingExecutor::mask). Called on the first rank only.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    fn mask(&mut self, masks: &[u32]) -> Result<(), RankError>;

    /// Waits for this rank's part of the oldest launched step.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<(), RankError>;

    /// The results for the requested rows of the step collected last. Called on the first rank only.
    fn answers(&self) -> Vec<SampledRow<'_>>;
}
