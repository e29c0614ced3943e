//! Compiled grammars, and those that do not compile. The least recently used leave first.

use std::collections::HashMap;

use baton_request::Grammar;
use llguidance::Matcher;

use crate::error::GrammarError;

/// A compiled grammar at its start, or the reason why there is none.
pub(crate) type Compiled = Result<Start, GrammarError>;

/// The start of a compiled grammar.
pub(crate) struct Start {
    pub(crate) matcher: Matcher,
    /// Whether a matcher can take tokens back: with rules that have `stop=` or `max_tokens=` it cannot.
    pub(crate) can_roll_back: bool,
}

pub(crate) struct Cache {
    entries: HashMap<Grammar, Entry>,
    max_entries: usize,
    /// Counts uses.
    now: u64,
}

struct Entry {
    compiled: Compiled,
    last_use: u64,
}

impl Start {
    /// A copy for a sequence. Sequences must not share the states that they find: their number is limited.
    pub(crate) fn deep_clone(&self) -> Start {
        Start { matcher: self.matcher.deep_clone(), can_roll_back: self.can_roll_back }
    }
}

impl Cache {
    pub(crate) fn new(max_entries: usize) -> Cache {
        Cache { entries: HashMap::new(), max_entries, now: 0 }
    }

    pub(crate) fn get(&mut self, grammar: &Grammar) -> Option<Compiled> {
        self.now += 1;
        let entry = self.entries.get_mut(grammar)?;
        entry.last_use = self.now;
        Some(entry.compiled.as_ref().map(Start::deep_clone).map_err(Clone::clone))
    }

    pub(crate) fn insert(&mut self, grammar: &Grammar, compiled: Compiled) {
        self.now += 1;
        self.entries.insert(grammar.clone(), Entry { compiled, last_use: self.now });
        while self.entries.len() > self.max_entries {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_use);
            let oldest = oldest.map(|(grammar, _)| grammar.clone()).expect("the cache is not empty");
            self.entries.remove(&oldest);
        }
    }
}
