//! Starts an engine: its memory, its thread, and the handle to it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
        mpsc,
    },
    thread::JoinHandle,
};

use baton_grammar::MASK_STACK_BYTES;
use baton_kv_cache::BlockStorage;
use baton_model_spec::Executor;
use tokio::sync::watch;

use crate::{
    blending::{BlendCounters, Blender},
    cache_log::CacheLog,
    config::{EngineConfig, EngineStartError},
    events::EngineError,
    handle::{EngineHandle, HandleState},
    live::LiveRequests,
    speculation::{Speculation, Speculator},
    status::{DraftCounters, EngineLoad, Progress},
    step_loop::StepLoop,
};

/// The engine's thread.
#[derive(Debug)]
pub struct EngineThread {
    thread: Option<JoinHandle<Result<(), EngineError>>>,
    handle: EngineHandle,
}

/// Starts an engine on a thread of its own. The engine ends with [`EngineHandle::shutdown`], when its
/// [`EngineThread`] is dropped, or when an executor fails.
///
/// # Errors
/// When the configuration is invalid, a draft model does not fit, or memory or a thread is refused.
///
/// # Panics
/// When the blocks of a draft model do not have the size of the executor's.
pub fn start(
    executor: Box<dyn Executor>,
    speculation: Option<Speculation>,
    config: EngineConfig,
) -> Result<(EngineHandle, EngineThread), EngineStartError> {
    config.validate()?;
    let layout = executor.kv_layout();
    let storage = BlockStorage::new(layout, config.num_blocks).map_err(|source| {
        EngineStartError::Memory { num_blocks: config.num_blocks, block_bytes: layout.block_bytes(), source }
    })?;
    start_over(storage, executor, speculation, config)
}

/// [`start`] over existing blocks, such as those of a device.
///
/// # Errors
/// So many times the store's size the passages of a prompt may have while it is blended.
const MAX_HELD: usize = 4;

/// As [`start`].
///
/// # Panics
/// As [`start`], and when `storage` does not have the blocks of `config` in the layout of `executor`.
pub fn start_over(
    storage: BlockStorage,
    mut executor: Box<dyn Executor>,
    speculation: Option<Speculation>,
    mut config: EngineConfig,
) -> Result<(EngineHandle, EngineThread), EngineStartError> {
    config.validate()?;
    let layout = executor.kv_layout();
    assert_eq!((storage.num_blocks(), *storage.layout()), (config.num_blocks, layout), "blocks of an engine");
    config.context_length = config.context_length.min(config.num_blocks.saturating_mul(layout.block_size));
    let (mut max_blended_tokens, mut max_passage_tokens) = (0, 0);
    if let Some(blend) = config.blending {
        match executor.blending() {
            Ok(blender) => {
                max_blended_tokens = blender.max_blended_tokens();
                max_passage_tokens = MAX_HELD * (blend.max_store_bytes / blender.passage_token_bytes());
            }
            Err(reason) => {
                tracing::warn!(%reason, "prompts are not blended; they are computed in full");
                config.blending = None;
            }
        }
    }
    let blend_counters = Arc::new(BlendCounters::default());
    let blender = config.blending.map(|blend| {
        Blender::new(blend.max_store_bytes, config.model_revision.clone(), blend_counters.clone())
    });
    let storage = Arc::new(storage);
    let (commands, inbox) = mpsc::channel();
    let draft_counters = Arc::new(DraftCounters::default());
    let progress = Arc::new(Progress::default());
    let cache_log = CacheLog::new(config.num_blocks);
    let drafter = speculation.as_ref().map(|speculation| speculation.drafter.name());
    let speculator = match speculation {
        Some(speculation) => {
            Some(Speculator::new(speculation, &config, executor.vocab_size(), layout.block_size)?)
        }
        None => None,
    };
    let (load_sender, load) = watch::channel(EngineLoad::idle(config.num_blocks));
    let handle = EngineHandle {
        state: Arc::new(HandleState {
            storage: storage.clone(),
            vocab_size: executor.vocab_size(),
            commands,
            next_id: AtomicU64::new(0),
            num_waiting: Arc::new(AtomicUsize::new(0)),
            is_closing: AtomicBool::new(false),
            load,
            drafter,
            draft_counters: draft_counters.clone(),
            blend_counters,
            max_blended_tokens,
            max_passage_tokens,
            progress: progress.clone(),
            cache_log: cache_log.clone(),
            config: config.clone(),
        }),
    };
    let live = LiveRequests::new(&config, &layout, draft_counters);
    progress.set_pace(live.pace(), None);
    let EngineConfig { token_budget, clock, thread_waits, .. } = config;
    let step_loop = StepLoop::new(
        executor,
        speculator,
        blender,
        storage,
        live,
        inbox,
        load_sender,
        progress,
        cache_log,
        token_budget,
        clock,
        thread_waits,
    )
    .map_err(|source| EngineStartError::Thread { source })?;
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .stack_size(MASK_STACK_BYTES)
        .spawn(|| step_loop.run())
        .map_err(|source| EngineStartError::Thread { source })?;
    Ok((handle.clone(), EngineThread { thread: Some(thread), handle }))
}

impl EngineThread {
    /// Waits for the engine to end. Blocks the calling thread.
    ///
    /// # Errors
    /// What ended the engine, if it was not a shutdown.
    pub fn join(mut self) -> Result<(), EngineError> {
        let thread = self.thread.take().expect("only join takes it");
        thread.join().unwrap_or_else(|panic| Err(EngineError::from_panic(&*panic)))
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.handle.shutdown();
        }
    }
}
