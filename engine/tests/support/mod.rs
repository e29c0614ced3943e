//! A started engine with a fake model, and short ways to use it.
#![allow(dead_code)] // each test file uses a part of it

pub mod handoff;
pub mod kinds;

use std::{
    ops::Deref,
    sync::{Arc, LazyLock, atomic::AtomicUsize},
    time::Instant,
};

use baton_engine::{
    Drafter, EngineConfig, EngineError, EngineHandle, EngineThread, FinishReason, PoolReport, Request,
    SamplingParams, Speculation, TokenEvent, TokenStream,
};
use baton_engine_testing::FakeModel;
use baton_grammar::{GrammarCompiler, GrammarLimits, Vocabulary, VocabularyToken};
use baton_model_spec::{Batch, ExecuteError, Executor};

pub const BLOCK_SIZE: usize = 4;
/// The token that ends a text of a grammar.
pub const END: u32 = 2;
/// Limit on the tokens of a step with drafts.
pub const MAX_STEP_TOKENS: usize = 40;

/// Plenty of room.
pub fn config() -> EngineConfig {
    EngineConfig {
        num_blocks: 256,
        max_running: 16,
        token_budget: 64,
        max_drafted_step_tokens: MAX_STEP_TOKENS,
        itl_target: None,
        context_length: 512,
        max_waiting: 1024,
        prefix_cache: true,
        model_revision: "fake".into(),
        step_prior: None,
        grammars: Some(grammars()),
        blending: None,
        clock: standing_clock,
        thread_waits: || std::time::Duration::ZERO,
    }
}

/// Grammars over three tokens: `a`, `b`, and the end.
pub fn grammars() -> Arc<GrammarCompiler> {
    static COMPILER: LazyLock<Arc<GrammarCompiler>> = LazyLock::new(|| {
        let load = || {
            let token = |text: &str, is_special| VocabularyToken { bytes: text.into(), is_special };
            let tokens = [token("a", false), token("b", false), token("<end>", true)];
            let encode = |text: &str| text.bytes().map(|byte| u32::from(byte - b'a')).collect();
            Vocabulary::new(tokens, &[END], Box::new(encode))
        };
        Arc::new(GrammarCompiler::new(load, GrammarLimits::default()))
    });
    COMPILER.clone()
}

/// Greedy, `max_tokens` long.
pub fn request(prompt: &[u32], max_tokens: u32) -> Request {
    Request {
        id: "test".into(),
        prompt: prompt.into(),
        sampling: SamplingParams { max_tokens, ..SamplingParams::default() },
        ..Request::default()
    }
}

/// Tokens and their end: finish reason and cached tokens, or an error.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub tokens: Vec<u32>,
    pub end: Result<(FinishReason, usize), EngineError>,
}

/// A running engine; it is shut down when dropped.
pub struct TestEngine {
    handle: EngineHandle,
    pub thread: EngineThread,
}

impl Deref for TestEngine {
    type Target = EngineHandle;

    fn deref(&self) -> &EngineHandle {
        &self.handle
    }
}

pub fn engine(config: EngineConfig) -> (FakeModel, TestEngine) {
    engine_with_hook(config, |_| Ok(()))
}

pub fn engine_with_hook(
    config: EngineConfig,
    hook: impl FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send + 'static,
) -> (FakeModel, TestEngine) {
    engine_of(FakeModel::new(BLOCK_SIZE), config, hook)
}

pub fn engine_of(
    model: FakeModel,
    config: EngineConfig,
    hook: impl FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send + 'static,
) -> (FakeModel, TestEngine) {
    let (handle, thread) =
        baton_engine::start(model.executor_with_hook(hook), None, config).expect("a test engine starts");
    (model, TestEngine { handle, thread })
}

/// An engine whose executor samples, perhaps with a drafter, and the number of steps that it launched ahead.
pub fn sampling_engine(
    model: FakeModel,
    drafter: Option<Drafter>,
    config: EngineConfig,
    hook: impl FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send + 'static,
) -> (TestEngine, Arc<AtomicUsize>) {
    let num_ahead = Arc::new(AtomicUsize::new(0));
    let executor = model.sampling_executor_with_hook(num_ahead.clone(), hook);
    let speculation = |drafter| Speculation { drafter, max_draft_tokens: 5 };
    let (handle, thread) =
        baton_engine::start(executor, drafter.map(speculation), config).expect("a test engine starts");
    (TestEngine { handle, thread }, num_ahead)
}

/// An engine with a drafter, for drafts of up to five tokens.
pub fn speculating(model: FakeModel, drafter: Drafter, config: EngineConfig) -> TestEngine {
    speculating_with_hook(model, drafter, config, |_| Ok(()))
}

pub fn speculating_with_hook(
    model: FakeModel,
    drafter: Drafter,
    config: EngineConfig,
    hook: impl FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send + 'static,
) -> TestEngine {
    let speculation = Speculation { drafter, max_draft_tokens: 5 };
    let (handle, thread) = baton_engine::start(model.executor_with_hook(hook), Some(speculation), config)
        .expect("a test engine starts");
    TestEngine { handle, thread }
}

/// A clock that stands still: nothing is measured, so drafts have their guessed cost on any machine.
pub fn standing_clock() -> Instant {
    static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);
    *NOW
}

/// A draft model.
pub fn draft(model: FakeModel) -> Drafter {
    draft_with_hook(model, |_| Ok(()))
}

pub fn draft_with_hook(
    model: FakeModel,
    hook: impl FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send + 'static,
) -> Drafter {
    Drafter::Model { executor: model.executor_with_hook(hook), storage: None, cost: 0.2 }
}

/// A draft model that samples, and the number of steps that it launched ahead.
pub fn sampling_draft(model: FakeModel) -> (Drafter, Arc<AtomicUsize>) {
    sampling_draft_of_cost(model, 0.2)
}

/// The same. A drafted token costs `cost` steps of the target.
pub fn sampling_draft_of_cost(model: FakeModel, cost: f64) -> (Drafter, Arc<AtomicUsize>) {
    let num_ahead = Arc::new(AtomicUsize::new(0));
    let executor = model.sampling_executor_with_hook(num_ahead.clone(), |_| Ok(()));
    (Drafter::Model { executor, storage: None, cost }, num_ahead)
}

impl TestEngine {
    pub fn of(executor: Box<dyn Executor>) -> TestEngine {
        let (handle, thread) = baton_engine::start(executor, None, config()).expect("a test engine starts");
        TestEngine { handle, thread }
    }

    pub fn clone_handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    pub async fn generate_all(&self, request: Request) -> Output {
        collect(self.generate(request).expect("accepted")).await
    }

    /// Checks that everything was returned and the accounting is right.
    pub async fn check_whole(&self) -> PoolReport {
        let report = self.check_idle_integrity().await.expect("idle and whole");
        assert_eq!(report.num_owned, 0);
        report
    }

    /// Shuts down and waits for the thread.
    pub fn stop(self) -> Result<(), EngineError> {
        self.handle.shutdown();
        self.thread.join()
    }
}

/// Reads a stream to its end, which must be exactly one terminal event.
pub async fn collect(mut stream: TokenStream) -> Output {
    let (mut tokens, mut cached_tokens) = (Vec::new(), 0);
    loop {
        let end = match stream.next().await.expect("a terminal event comes first") {
            TokenEvent::Started { cached_tokens: num } => {
                assert!(tokens.is_empty(), "said before the first token");
                cached_tokens = num;
                continue;
            }
            TokenEvent::Adopted { cached_tokens: num } => {
                assert!(tokens.is_empty(), "said before the first token");
                cached_tokens += num;
                continue;
            }
            TokenEvent::Verified(_) | TokenEvent::Blended { .. } | TokenEvent::Scored { .. } => continue,
            TokenEvent::Token(token) => {
                tokens.push(token.id);
                continue;
            }
            TokenEvent::Finished(reason) => Ok((reason, cached_tokens)),
            TokenEvent::Failed(error) => Err(error),
        };
        assert_eq!(stream.next().await, None, "nothing follows a terminal event");
        return Output { tokens, end };
    }
}

/// Drives all of them at once.
pub async fn join_all(futures: Vec<impl Future<Output = ()>>) {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    std::future::poll_fn(|cx| {
        futures.retain_mut(|future| future.as_mut().poll(cx).is_pending());
        if futures.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}
