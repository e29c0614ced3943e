//! The grammars that are being compiled, and those that were. Each is compiled once at a time. How many are at a time is bounded,
//! and how many callers wait, also for the vocabulary. It does not know how a grammar is compiled.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Instant,
};

use baton_request::Grammar;

use crate::{
    cache::{Cache, Compiled, Key},
    error::GrammarError,
    limits::GrammarLimits,
};

/// The grammars of one compiler.
pub(crate) struct Compilations {
    limits: GrammarLimits,
    hasher: RandomState,
    state: Mutex<State>,
    /// Told when a compilation has ended, or the load.
    has_ended: Condvar,
}

struct State {
    cache: Cache,
    /// At most `max_compiling`, each once, and since when.
    compiling: Vec<(Key, Instant)>,
    /// Whether a caller loads the vocabulary.
    is_loading: bool,
    /// Callers that wait until one of these has ended.
    num_waiting: usize,
}

/// A grammar that a caller needs.
pub(crate) enum Needed {
    /// It was compiled, or cannot be.
    Compiled(Compiled),
    /// The caller must compile it.
    Uncompiled(Compilation),
}

/// The vocabulary is being loaded, until this is dropped. Others that need it wait meanwhile.
struct Loading<'a> {
    all: &'a Compilations,
}

/// A grammar that is being compiled, until this is dropped. Others that need it wait meanwhile.
pub(crate) struct Compilation {
    all: Arc<Compilations>,
    key: Key,
}

impl Compilations {
    pub(crate) fn new(limits: GrammarLimits) -> Arc<Compilations> {
        let cache = Cache::new(limits.max_cached);
        let state = State { cache, compiling: Vec::new(), is_loading: false, num_waiting: 0 };
        let (hasher, state) = (RandomState::new(), Mutex::new(state));
        Arc::new(Compilations { limits, hasher, state, has_ended: Condvar::new() })
    }

    /// What is in `loaded`: all grammars need it. One caller loads it with `load`, and others wait meanwhile, at most for
    /// `compile_time`.
    ///
    /// # Errors
    /// [`Busy`](GrammarError::Busy) when the caller has waited that long, or too many wait.
    pub(crate) fn load<'a, T>(
        &self,
        loaded: &'a OnceLock<T>,
        load: impl FnOnce() -> T,
    ) -> Result<&'a T, GrammarError> {
        let until = Instant::now() + self.limits.compile_time;
        let mut state = self.state();
        loop {
            if let Some(loaded) = loaded.get() {
                return Ok(loaded);
            }
            if !state.is_loading {
                break;
            }
            state = self.wait(state, until)?;
        }
        state.is_loading = true;
        drop(state);
        let _loading = Loading { all: self };
        Ok(loaded.get_or_init(load))
    }

    /// What the caller needs. Waits at most for `compile_time` while the grammar is being compiled, or as many others as may be.
    ///
    /// # Errors
    /// [`TooSlow`](GrammarError::TooSlow) when the grammar has been compiled for that long, also if the caller came later;
    /// [`Busy`](GrammarError::Busy) when the caller has waited that long otherwise, or too many wait.
    pub(crate) fn get(self: &Arc<Self>, grammar: &Grammar) -> Result<Needed, GrammarError> {
        let GrammarLimits { compile_time, max_compiling, .. } = self.limits;
        let until = Instant::now() + compile_time;
        let key = self.key(grammar);
        let mut state = self.state();
        loop {
            if let Some(compiled) = state.cache.get(&key) {
                return Ok(Needed::Compiled(compiled));
            }
            let since = state.compiling.iter().find(|(other, _)| *other == key).map(|&(_, since)| since);
            if since.is_none() && state.compiling.len() < max_compiling {
                state.compiling.push((key.clone(), Instant::now()));
                return Ok(Needed::Uncompiled(Compilation { all: self.clone(), key }));
            }
            if since.is_some_and(|since| since.elapsed() >= compile_time) {
                return Err(GrammarError::TooSlow { kind: grammar.kind, limit: compile_time });
            }
            state = self.wait(state, since.map_or(until, |since| until.min(since + compile_time)))?;
        }
    }

    /// Waits until a compilation or the load has ended, at most until `until`.
    ///
    /// # Errors
    /// [`Busy`](GrammarError::Busy) when it is later, or too many wait.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        until: Instant,
    ) -> Result<MutexGuard<'a, State>, GrammarError> {
        let GrammarLimits { max_compiling, max_waiting, .. } = self.limits;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || state.num_waiting >= max_waiting {
            return Err(GrammarError::Busy { max_compiling });
        }
        state.num_waiting += 1;
        let waited = self.has_ended.wait_timeout(state, left);
        (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.num_waiting -= 1;
        Ok(state)
    }

    /// Keeps what came of compiling the grammar.
    pub(crate) fn keep(&self, grammar: &Grammar, compiled: Compiled) {
        let key = self.key(grammar);
        self.state().cache.insert(key, compiled);
    }

    /// Hashes the grammar.
    fn key(&self, grammar: &Grammar) -> Key {
        Key::new(self.hasher.hash_one(grammar), grammar)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // It is changed by single operations, so a panic leaves it whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.all.state().is_loading = false;
        self.all.has_ended.notify_all();
    }
}

impl Drop for Compilation {
    fn drop(&mut self) {
        self.all.state().compiling.retain(|(key, _)| *key != self.key);
        // Callers that need this grammar, and one that needs its place.
        self.all.has_ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use baton_request::GrammarKind;

    use super::*;

    /// Longer than a test takes.
    const LONG: Duration = Duration::from_secs(60);

    fn compilations(compile_time: Duration, max_compiling: usize, max_waiting: usize) -> Arc<Compilations> {
        let limits = GrammarLimits { compile_time, max_compiling, max_waiting, ..GrammarLimits::default() };
        Compilations::new(limits)
    }

    fn grammar(text: &str) -> Grammar {
        Grammar::new(GrammarKind::Regex, text)
    }

    fn begin(all: &Arc<Compilations>, text: &str) -> Compilation {
        match all.get(&grammar(text)) {
            Ok(Needed::Uncompiled(compilation)) => compilation,
            Ok(Needed::Compiled(_)) => panic!("{text} was compiled"),
            Err(error) => panic!("{text}: {error}"),
        }
    }

    /// Waits until so many callers wait.
    fn await_waiting(all: &Compilations, num_waiting: usize) {
        let started = Instant::now();
        while all.state().num_waiting < num_waiting {
            assert!(started.elapsed() < LONG, "fewer than {num_waiting} wait");
            thread::yield_now();
        }
    }

    #[test]
    fn more_callers_than_may_wait_are_refused_at_once() {
        let all = compilations(LONG, 1, 1);
        let first = begin(&all, "a");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| all.get(&grammar("b")));
            await_waiting(&all, 1);
            let started = Instant::now();
            for text in ["a", "b", "c"] {
                let refused = all.get(&grammar(text)).err();
                assert_eq!(refused, Some(GrammarError::Busy { max_compiling: 1 }), "{text}");
            }
            assert!(started.elapsed() < LONG, "they waited");
            drop(first);
            let needed = waiting.join().expect("no panic");
            assert!(matches!(needed, Ok(Needed::Uncompiled(_))), "it has the place");
        });
    }

    #[test]
    fn a_grammar_that_many_need_at_once_is_compiled_once() {
        let all = compilations(LONG, 4, 8);
        let first = begin(&all, "a");
        thread::scope(|scope| {
            let waiting = [(); 3].map(|()| scope.spawn(|| all.get(&grammar("a"))));
            await_waiting(&all, 3);
            // Another one has a place.
            drop(begin(&all, "b"));
            all.keep(&grammar("a"), Err(GrammarError::vocabulary("as compiled")));
            drop(first);
            for caller in waiting {
                let needed = caller.join().expect("no panic");
                assert!(matches!(needed, Ok(Needed::Compiled(Err(GrammarError::Vocabulary { .. })))));
            }
        });
    }

    #[test]
    fn a_wait_that_is_too_long_says_what_was_waited_for() {
        let all = compilations(Duration::ZERO, 1, 8);
        let _first = begin(&all, "a");
        let error = |text: &str| all.get(&grammar(text)).err().expect("it is not compiled");
        assert!(matches!(error("a"), GrammarError::TooSlow { .. }));
        assert!(matches!(error("b"), GrammarError::Busy { .. }));
    }

    #[test]
    fn a_grammar_that_has_just_begun_is_not_too_slow_for_a_caller_that_waited_for_a_place() {
        let all = compilations(Duration::from_millis(200), 1, 8);
        let _first = begin(&all, "a");
        thread::scope(|scope| {
            let caller = scope.spawn(|| all.get(&grammar("b")));
            while all.state().num_waiting == 0 && !caller.is_finished() {
                thread::yield_now();
            }
            // Another caller has got the place for the same grammar. No time passes for it, however slow this test is.
            all.state().compiling = vec![(all.key(&grammar("b")), Instant::now() + LONG)];
            all.has_ended.notify_all();
            let refused = caller.join().expect("no panic").err();
            assert_eq!(refused, Some(GrammarError::Busy { max_compiling: 1 }));
        });
    }

    #[test]
    fn callers_that_wait_for_the_vocabulary_are_counted() {
        let (all, loaded) = (compilations(LONG, 4, 1), OnceLock::new());
        let (all, loaded) = (&all, &loaded);
        thread::scope(|scope| {
            let (let_go, gate) = mpsc::channel::<()>();
            let load = move || {
                // An error: it may go on.
                let _ = gate.recv();
                7
            };
            let loading = scope.spawn(move || all.load(loaded, load));
            while !all.state().is_loading {
                thread::yield_now();
            }
            let waiting = scope.spawn(move || all.load(loaded, || panic!("it is loaded once")));
            await_waiting(all, 1);
            let refused = all.load(loaded, || panic!("it is loaded once"));
            assert_eq!(refused, Err(GrammarError::Busy { max_compiling: 4 }));
            drop(let_go);
            for caller in [loading, waiting] {
                assert_eq!(caller.join().expect("no panic"), Ok(&7));
            }
        });
    }
}
