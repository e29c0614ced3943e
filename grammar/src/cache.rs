//! Compiled grammars, and those that do not compile. The least recently used leave first.

use std::collections::HashMap;

use baton_request::Grammar;
use llguidance::Matcher;

use crate::error::GrammarError;

/// A compiled grammar at its start, or the reason why there is none.
pub(crate) type Compiled = Result<Matcher, GrammarError>;

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

impl Cache {
    pub(crate) fn new(max_entries: usize) -> Cache {
        Cache { entries: HashMap::new(), max_entries, now: 0 }
    }

    pub(crate) fn get(&mut self, grammar: &Grammar) -> Option<Compiled> {
        self.now += 1;
        let entry = self.entries.get_mut(grammar)?;
        entry.last_use = self.now;
        Some(match &entry.compiled {
            // Sequences must not share the states that they find: their number is limited.
            Ok(matcher) => Ok(matcher.deep_clone()),
            Err(error) => Err(error.clone()),
        })
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
