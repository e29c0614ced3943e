//! Compiles grammars within limits, and keeps what it compiled.

use std::{
    fmt,
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use baton_request::Grammar;
use llguidance::{Matcher, ParserFactory, api::ParserLimits};

use crate::{
    cache::{Compiled, Start},
    compilations::{Compilation, Compilations, Needed},
    error::GrammarError,
    limits::GrammarLimits,
    matcher::TokenMatcher,
    source,
    vocabulary::{Lexicon, Vocabulary},
    watch::{GrammarTime, Watch},
};

/// The compiler recurses into what is nested and through the references of a schema, each of which it follows once. Ten bytes
/// of text are a level at least, and a level takes up to 4 KB: 100 MiB for [`MAX_GRAMMAR_BYTES`](baton_request::MAX_GRAMMAR_BYTES).
const STACK_BYTES: usize = 160 << 20;

/// Compiles grammars for one vocabulary. Used from many threads. The vocabulary is loaded for the first grammar.
pub struct GrammarCompiler {
    load: Box<dyn Fn() -> Result<Vocabulary, GrammarError> + Send + Sync>,
    target: OnceLock<Result<Target, GrammarError>>,
    limits: GrammarLimits,
    compilations: Arc<Compilations>,
    watch: OnceLock<Arc<Watch>>,
}

/// What grammars are compiled against.
struct Target {
    factory: Arc<ParserFactory>,
    lexicon: Arc<Lexicon>,
}

impl GrammarCompiler {
    /// A compiler for the vocabulary that `load` loads.
    pub fn new(
        load: impl Fn() -> Result<Vocabulary, GrammarError> + Send + Sync + 'static,
        limits: GrammarLimits,
    ) -> GrammarCompiler {
        GrammarCompiler {
            load: Box::new(load),
            target: OnceLock::new(),
            limits,
            compilations: Compilations::new(limits),
            watch: OnceLock::new(),
        }
    }

    /// A matcher for a sequence whose output begins with `output`. Compiles the grammar unless that was done before:
    /// that blocks the caller, the first
    /// time until the vocabulary is loaded, and then at most for [`GrammarLimits::compile_time`].
    ///
    /// # Errors
    /// When the vocabulary cannot be constrained, the grammar does not compile within the limits, or does not allow `output`.
    pub fn matcher(&self, grammar: &Grammar, output: &[u32]) -> Result<TokenMatcher, GrammarError> {
        let target = self.compilations.load(&self.target, || Target::new(&(self.load)()?))?;
        let target = target.as_ref().map_err(Clone::clone)?;
        let start = match self.compilations.get(grammar)? {
            Needed::Compiled(compiled) => compiled?,
            Needed::Uncompiled(compilation) => self.compile(&target.factory, grammar, compilation)?,
        };
        let mut matcher = TokenMatcher::new(start, target.lexicon.clone(), self.watch()?, self.limits.time);
        output.iter().try_for_each(|&token| matcher.accept(token))?;
        Ok(matcher)
    }

    fn compile(&self, factory: &Arc<ParserFactory>, grammar: &Grammar, compilation: Compilation) -> Compiled {
        let (kind, limit) = (grammar.kind, self.limits.compile_time);
        let (done, compiled) = mpsc::sync_channel(1);
        let (factory, source, watch) = (factory.clone(), grammar.clone(), self.watch()?.clone());
        let (all, begun) = (self.compilations.clone(), Instant::now());
        let work = move || {
            let compiled = compile(&factory, &source, &watch, limit);
            // What comes late is refused and not kept: a busy machine may be the reason.
            if begun.elapsed() < limit {
                all.keep(&source, compiled.clone());
            }
            drop(compilation);
            // A caller that no longer waits has refused the grammar.
            let _ = done.send(compiled);
        };
        thread::Builder::new()
            .name("grammar".into())
            .stack_size(STACK_BYTES)
            .spawn(work)
            .map_err(|error| GrammarError::exhausted(format!("no thread: {error}")))?;
        match compiled.recv_timeout(limit) {
            Ok(compiled) => compiled,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(GrammarError::TooSlow { kind, limit }),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let broken: Compiled = Err(GrammarError::invalid(kind, "the compiler broke"));
                self.compilations.keep(grammar, broken.clone());
                broken
            }
        }
    }

    fn watch(&self) -> Result<&Arc<Watch>, GrammarError> {
        if let Some(watch) = self.watch.get() {
            return Ok(watch);
        }
        // Of two that start at once, one ends again.
        let watch = Watch::start().map_err(|error| GrammarError::exhausted(format!("no thread: {error}")))?;
        Ok(self.watch.get_or_init(|| Arc::new(watch)))
    }
}

impl Target {
    fn new(vocabulary: &Vocabulary) -> Result<Target, GrammarError> {
        let mut factory = ParserFactory::new_simple(&vocabulary.lexicon.env)
            .map_err(|error| GrammarError::vocabulary(error.to_string()))?;
        factory.quiet();
        // The other limits are llguidance's. They bound the size of a step; [`Watch`] bounds its time.
        *factory.limits_mut() = ParserLimits { verbose_errors: false, ..ParserLimits::default() };
        Ok(Target { factory: Arc::new(factory), lexicon: vocabulary.lexicon.clone() })
    }
}

/// The start of the grammar, whose matcher has found its first tokens once, within `limit`.
fn compile(factory: &ParserFactory, grammar: &Grammar, watch: &Watch, limit: Duration) -> Compiled {
    let kind = grammar.kind;
    let invalid = |reason: String| GrammarError::invalid(kind, reason);
    let parsed = source::parse(grammar)?;
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let parser = factory.create_parser(parsed);
        let can_roll_back =
            parser.as_ref().is_ok_and(|parser| parser.parser.grammar().lexer_spec().can_rollback());
        let mut matcher = Matcher::new(parser).into_cancellable();
        let handle = matcher.cancellation_handle().expect("it can be cancelled");
        let meter = watch.meter(GrammarTime { ahead: limit, per_token: Duration::ZERO }, handle);
        let _running = meter.begin();
        let mask = match matcher.get_error() {
            Some(reason) => return Err(invalid(reason)),
            None => matcher.compute_mask_or_eos(),
        };
        if meter.has_run_out() {
            return Err(GrammarError::TooSlow { kind, limit });
        }
        let mask = mask.map_err(|error| invalid(error.to_string()))?;
        if mask.is_zero() {
            return Err(invalid("no text matches it".into()));
        }
        Ok(Arc::new(Start { matcher, can_roll_back }))
    }));
    caught.unwrap_or_else(|_| Err(invalid("the compiler panicked".into())))
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("limits", &self.limits).finish_non_exhaustive()
    }
}
