//! What an engine is started with.

use std::time::{Duration, Instant};

/// Sizes and limits of one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Sequences that hold blocks at a time: running, or reserved for.
    pub max_running: usize,
    /// Tokens computed in one step. Decodes are served first: below `max_running`, the youngest
    /// sequences wait for older ones to end.
    pub token_budget: usize,
    /// Time between two tokens to aim at: prompts that are computed beside sequences that decode come in chunks
    /// that keep it, by what steps were measured to take. `None`: chunks of the token budget.
    pub itl_target: Option<Duration>,
    /// Longest sequence, prompt and output together. The engine serves no longer one than its pool can hold: what could
    /// never be computed is refused when it comes, and not when its last block is missing.
    pub context_length: usize,
    /// Requests that wait at a time; more are refused.
    pub max_waiting: usize,
    /// Whether blocks are shared between requests of equal prefix.
    pub prefix_cache: bool,
    /// Identity of the weights: part of every block's hash.
    pub model_revision: String,
    /// [`Instant::now`]. Tells what steps take; tokens do not depend on it.
    pub clock: fn() -> Instant,
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineStartError {
    /// A size or limit is 0.
    #[error("{field} must be at least 1")]
    Zero {
        /// Its name in [`EngineConfig`].
        field: &'static str,
    },
    /// No memory for the blocks.
    #[error("no memory for {num_blocks} KV blocks of {block_bytes} bytes")]
    Memory {
        /// Blocks asked for.
        num_blocks: usize,
        /// Size of one.
        block_bytes: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The draft model speaks of other tokens.
    #[error(
        "the draft model has {draft} tokens in its vocabulary, the model {target}; they must be the same"
    )]
    Vocabulary {
        /// Of the draft model.
        draft: usize,
        /// Of the model that is served.
        target: usize,
    },
    /// No thread.
    #[error("cannot start the engine thread")]
    Thread {
        /// What the kernel said.
        source: std::io::Error,
    },
}

impl EngineConfig {
    pub(crate) fn validate(&self) -> Result<(), EngineStartError> {
        let sizes = [
            ("num_blocks", self.num_blocks),
            ("max_running", self.max_running),
            ("token_budget", self.token_budget),
            ("context_length", self.context_length),
            ("max_waiting", self.max_waiting),
        ];
        match sizes.into_iter().find(|&(_, size)| size == 0) {
            Some((field, _)) => Err(EngineStartError::Zero { field }),
            None => Ok(()),
        }
    }
}
