//! The configuration of an engine.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_cost::StepLine;
use baton_grammar::GrammarCompiler;

/// Sizes and limits of one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Sequences that hold blocks at a time: running sequences and reservations.
    pub max_running: usize,
    /// Tokens computed in one step. Decodes come first. With a budget below `max_running` the youngest sequences wait
    /// until older ones end.
    pub token_budget: usize,
    /// Drafts, forced text included, are added to a step while it has fewer tokens than this. In a larger step arithmetic is the
    /// limit, and verifying a token costs as much as decoding one. Each drafted token has a row of logits.
    pub max_drafted_step_tokens: usize,
    /// Target time between two tokens of a sequence. Prompts that are computed beside decoding sequences come in
    /// chunks that keep it, according to measured step times. `None`: chunks fill the token budget.
    pub itl_target: Option<Duration>,
    /// Longest sequence, prompt and output together. The engine lowers it to what its pool can hold, so a request
    /// that could never finish is refused at submission, not when its last block is missing.
    pub context_length: usize,
    /// Requests that wait at a time. More are refused.
    pub max_waiting: usize,
    /// Whether requests of equal prefix share blocks.
    pub prefix_cache: bool,
    /// Identity of the weights: part of every block's hash.
    pub model_revision: String,
    /// What a step takes, before any was measured; `None`: the first step tells.
    pub step_prior: Option<StepLine>,
    /// Compiles the grammars of requests; `None`: a request with a grammar is refused.
    pub grammars: Option<Arc<GrammarCompiler>>,
    /// How prompts with passages are blended; `None`: they are computed in full.
    pub blending: Option<BlendConfig>,
    /// [`Instant::now`]. Measures steps and stamps events; tokens do not depend on it.
    pub clock: fn() -> Instant,
    /// How long the calling thread has waited for a processor since it began. The waits of the engine's thread are no part of
    /// what steps take.
    pub thread_waits: fn() -> Duration,
}

/// How an engine blends prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlendConfig {
    /// Bytes of KV of passages that are kept for later prompts. Those of one prompt may have four times as much while it is
    /// blended.
    pub max_store_bytes: usize,
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
    /// The memory for the blocks was refused.
    #[error("no memory for {num_blocks} KV blocks of {block_bytes} bytes")]
    Memory {
        /// Requested blocks.
        num_blocks: usize,
        /// Bytes of one block.
        block_bytes: usize,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The draft model has another vocabulary.
    #[error(
        "the draft model has {draft} tokens in its vocabulary, the model {target}; they must be the same"
    )]
    Vocabulary {
        /// Vocabulary of the draft model.
        draft: usize,
        /// Vocabulary of the target.
        target: usize,
    },
    /// The thread was refused.
    #[error("cannot start the engine thread")]
    Thread {
        /// The kernel's error.
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
