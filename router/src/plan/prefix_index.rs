//! Which worker is believed to hold which prefix, learned from what was sent there.
//!
//! A belief, not a fact: workers evict without saying so. A wrong one costs a recomputed prefix.

use std::collections::{HashMap, VecDeque};

use baton_kv_cache::BlockHash;

use super::WorkerKey;

/// Block hashes and their holders, bounded; what was used longest ago goes first.
#[derive(Debug)]
pub struct PrefixIndex {
    capacity: usize,
    entries: HashMap<BlockHash, Entry>,
    /// Uses, oldest first. Only an entry's newest use counts; the others are skipped.
    uses: VecDeque<(u64, BlockHash)>,
    now: u64,
}

#[derive(Debug)]
struct Entry {
    used: u64,
    holders: Vec<WorkerKey>,
}

impl PrefixIndex {
    /// Remembers at most `capacity` blocks.
    pub fn new(capacity: usize) -> PrefixIndex {
        PrefixIndex { capacity, entries: HashMap::new(), uses: VecDeque::new(), now: 0 }
    }

    /// Notes that `worker` is going to hold the blocks of `hashes`.
    pub fn insert(&mut self, hashes: &[BlockHash], worker: &WorkerKey) {
        // The last block first: evicting the end of a chain leaves a usable beginning.
        for hash in hashes.iter().rev().take(self.capacity) {
            self.now += 1;
            let entry = self.entries.entry(*hash).or_insert(Entry { used: 0, holders: Vec::new() });
            entry.used = self.now;
            // Another incarnation of the same worker has forgotten everything.
            entry.holders.retain(|holder| holder.id != worker.id);
            entry.holders.push(worker.clone());
            self.uses.push_back((self.now, *hash));
        }
        self.evict();
    }

    /// How many blocks from the front each worker holds; workers with none are left out.
    pub fn holders(&self, hashes: &[BlockHash]) -> Vec<(WorkerKey, usize)> {
        let mut found: Vec<(WorkerKey, usize)> = Vec::new();
        for (idx, hash) in hashes.iter().enumerate() {
            let Some(entry) = self.entries.get(hash) else { break };
            if idx == 0 {
                found = entry.holders.iter().map(|holder| (holder.clone(), 1)).collect();
                continue;
            }
            let mut any = false;
            for (holder, num_blocks) in &mut found {
                if *num_blocks == idx && entry.holders.contains(holder) {
                    *num_blocks += 1;
                    any = true;
                }
            }
            if !any {
                break;
            }
        }
        found
    }

    /// How many blocks are remembered.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn evict(&mut self) {
        while self.entries.len() > self.capacity {
            let Some((used, hash)) = self.uses.pop_front() else { return };
            if self.entries.get(&hash).is_some_and(|entry| entry.used == used) {
                self.entries.remove(&hash);
            }
        }
        // Stale uses go when they outnumber the entries, so each costs a constant.
        if self.uses.len() > 2 * self.capacity.max(8) {
            self.uses.retain(|(used, hash)| self.entries.get(hash).is_some_and(|entry| entry.used == *used));
        }
    }
}
