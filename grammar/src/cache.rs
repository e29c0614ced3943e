//! Compiled grammars, and those that do not compile. The least recently used leave first.

use std::{
    collections::HashMap,
    hash::{Hash, Hasher},
    sync::Arc,
};

use baton_request::Grammar;
use llguidance::{CancellationHandle, Matcher};

use crate::error::GrammarError;

/// A compiled grammar at its start, or the reason why there is none.
pub(crate) type Compiled = Result<Arc<Start>, GrammarError>;

/// The start of a compiled grammar.
pub(crate) struct Start {
    pub(crate) matcher: Matcher,
    /// Whether a matcher can take tokens back: with rules that have `stop=` or `max_tokens=` it cannot.
    pub(crate) can_roll_back: bool,
}

/// A grammar with the hash of its text, which may be long: it is hashed once, by its caller, and not under a lock at each look.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Key {
    hash: u64,
    grammar: Grammar,
}

pub(crate) struct Cache {
    entries: HashMap<Key, Entry>,
    max_entries: usize,
    /// Counts uses.
    now: u64,
}

struct Entry {
    compiled: Compiled,
    last_use: u64,
}

impl Start {
    /// A copy for a sequence, and what cancels it. Sequences must not share the states that they find: their number is limited.
    pub(crate) fn copy(&self) -> (Matcher, CancellationHandle) {
        let matcher = self.matcher.deep_clone();
        let handle = matcher.cancellation_handle().expect("compiled grammars can be cancelled");
        (matcher, handle)
    }
}

impl Key {
    pub(crate) fn new(hash: u64, grammar: &Grammar) -> Key {
        Key { hash, grammar: grammar.clone() }
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Cache {
    pub(crate) fn new(max_entries: usize) -> Cache {
        Cache { entries: HashMap::new(), max_entries, now: 0 }
    }

    pub(crate) fn get(&mut self, key: &Key) -> Option<Compiled> {
        self.now += 1;
        let entry = self.entries.get_mut(key)?;
        entry.last_use = self.now;
        Some(entry.compiled.clone())
    }

    pub(crate) fn insert(&mut self, key: Key, compiled: Compiled) {
        self.now += 1;
        self.entries.insert(key, Entry { compiled, last_use: self.now });
        while self.entries.len() > self.max_entries {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_use);
            let oldest = oldest.map(|(key, _)| key.clone()).expect("the cache is not empty");
            self.entries.remove(&oldest);
        }
    }
}
