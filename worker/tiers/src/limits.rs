//! How long a worker waits for KV that it could compute.

use std::time::Duration;

use baton_cost::{PromptWork, StepWork, worth_bringing};
use baton_engine::EngineHandle;

/// Estimated prefill time before this worker has computed anything.
const DEFAULT_PREFILL_TIME: Duration = Duration::from_secs(1);

/// How long KV from other places is waited for, by what computing it takes.
#[derive(Clone, Debug)]
pub struct FetchLimits {
    /// The engine that would compute it.
    pub engine: EngineHandle,
    /// In place of what its steps take.
    pub fetch_deadline: Option<Duration>,
    /// No longer than this in any case.
    pub handoff_deadline: Duration,
}

impl FetchLimits {
    /// What is brought of a prompt of `num_tokens` tokens, from tiers and from another worker together, may take as long as the prefill
    /// that it saves, by the steps of this engine. So slow or silent sources at most double the TTFT.
    pub fn deadline(&self, num_tokens: usize) -> Duration {
        // A few tokens take a whole step, which their share of a full one does not count.
        let measured = || Some(self.engine.prefill_time(num_tokens)?.max(self.compute_time(num_tokens, 0)));
        let deadline = self.fetch_deadline.or_else(measured).unwrap_or(DEFAULT_PREFILL_TIME);
        deadline.min(self.handoff_deadline)
    }

    /// How long this engine takes to compute a prompt of `num_tokens` tokens of which it has `num_cached`: by its steps, and before
    /// the first one by what its device should take.
    fn compute_time(&self, num_tokens: usize, num_cached: usize) -> Duration {
        let seconds = self.engine.pace().step.map(|step| {
            let prompt = PromptWork::new(num_tokens, num_cached);
            step.prompt_seconds(&prompt, &StepWork::default(), self.engine.token_budget() as f64)
        });
        let seconds = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        self.fetch_deadline.or(seconds).unwrap_or(DEFAULT_PREFILL_TIME)
    }

    /// How long `num_blocks` blocks after the first `num_before` of a prompt take to compute.
    pub(crate) fn compute_blocks(&self, num_before: usize, num_blocks: usize) -> Duration {
        let block_size = self.engine.storage().layout().block_size;
        self.compute_time((num_before + num_blocks) * block_size, num_before * block_size)
    }

    /// How many blocks at the end of `num_blocks`, which follow `num_before`, are brought in while those before them are computed, if so
    /// many take `bring` seconds. `None`: it is so fast that all of them are waited for. 0: it is not worth it.
    pub fn meeting(
        &self,
        num_before: usize,
        num_blocks: usize,
        bring: impl Fn(usize) -> f64,
    ) -> Option<usize> {
        let block_size = self.engine.storage().layout().block_size;
        let compute = |num_blocks| self.compute_blocks(num_before, num_blocks).as_secs_f64();
        worth_bringing(num_blocks, block_size, bring, compute)
    }
}
