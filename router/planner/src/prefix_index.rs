//! Which worker is believed to hold which prefix, learned from the requests sent there.
//!
//! This is a belief: workers evict blocks without a report. A wrong belief costs a recomputed prefix.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::Hash,
    sync::Arc,
};

use crate::WorkerKey;

/// Block hashes (`H`) and their holders, bounded. The least recently used hash is evicted first.
#[derive(Debug)]
pub struct PrefixIndex<H> {
    capacity: usize,
    entries: HashMap<H, Entry>,
    /// Uses, oldest first. Only an entry's newest use counts; the others are skipped.
    uses: VecDeque<(u64, H)>,
    now: u64,
    /// The holders' names, shared: each of a hundred thousand entries may have one.
    workers: HashSet<Arc<WorkerKey>>,
}

#[derive(Debug)]
struct Entry {
    used: u64,
    holders: Vec<Arc<WorkerKey>>,
}

impl<H: Copy + Eq + Hash> PrefixIndex<H> {
    /// Remembers at most `capacity` blocks.
    pub fn new(capacity: usize) -> PrefixIndex<H> {
        let (entries, uses, workers) = Default::default();
        PrefixIndex { capacity, entries, uses, now: 0, workers }
    }

    /// Notes that `worker` is going to hold the blocks of `hashes`.
    pub fn insert(&mut self, hashes: &[H], worker: &WorkerKey) {
        let worker = self.named(worker);
        // The last block first: a chain without its end is still usable.
        for hash in hashes.iter().take(self.capacity).rev() {
            self.now += 1;
            let entry = self.entries.entry(*hash).or_insert(Entry { used: 0, holders: Vec::new() });
            entry.used = self.now;
            // An earlier incarnation of the worker holds nothing any more.
            entry.holders.retain(|holder| holder.id != worker.id);
            entry.holders.push(Arc::clone(&worker));
            self.uses.push_back((self.now, *hash));
        }
        self.evict();
    }

    /// How many blocks from the front each worker holds; workers with none are left out.
    pub fn holders(&self, hashes: &[H]) -> Vec<(WorkerKey, usize)> {
        let mut found: Vec<(&Arc<WorkerKey>, usize)> = Vec::new();
        for (idx, hash) in hashes.iter().enumerate() {
            let Some(entry) = self.entries.get(hash) else { break };
            if idx == 0 {
                found = entry.holders.iter().map(|holder| (holder, 1)).collect();
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
        found.into_iter().map(|(holder, num_blocks)| (WorkerKey::clone(holder), num_blocks)).collect()
    }

    /// How many blocks are remembered.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn named(&mut self, worker: &WorkerKey) -> Arc<WorkerKey> {
        if let Some(known) = self.workers.get(worker) {
            return Arc::clone(known);
        }
        // Drops the names of workers without entries.
        self.workers.retain(|known| Arc::strong_count(known) > 1);
        let named = Arc::new(worker.clone());
        self.workers.insert(Arc::clone(&named));
        named
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

#[cfg(test)]
mod tests {
    use baton_kv_cache::HashRoot;

    use super::*;

    #[test]
    fn names_of_workers_that_are_gone_go_with_their_blocks() {
        let mut index = PrefixIndex::new(8);
        for incarnation in 0..1000 {
            let tokens: Vec<u32> = (incarnation..incarnation + 8).collect();
            let hashes: Vec<_> = HashRoot::new("m", "", "").block_hashes(&tokens, 4).collect();
            let worker = WorkerKey {
                id: format!("w{}", incarnation % 100).as_str().into(),
                incarnation: incarnation.into(),
            };
            index.insert(&hashes, &worker);
            assert!(index.workers.len() <= 8 + 1);
        }
    }
}
