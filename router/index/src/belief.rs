//! Blocks that a worker is believed to hold because prompts were sent to it. Nothing confirms it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use baton_kv_events::BlockKey;

use crate::{
    index::{IndexFull, KvIndex},
    member::Member,
};

/// Believed blocks, each until a time. Those with the earliest time go first, and the end of a chain before its beginning.
#[derive(Debug)]
pub(crate) struct Beliefs {
    member: Member,
    capacity: usize,
    /// The time of each block.
    until: HashMap<BlockKey, u64>,
    /// The same by time, in the order of a prompt; a block with another time by now is skipped.
    by_time: BTreeMap<u64, Vec<BlockKey>>,
    /// Of `by_time`, those skipped included.
    num_entries: usize,
}

impl Beliefs {
    /// At most `capacity` blocks of `owner`.
    pub(crate) fn new(index: &Arc<KvIndex>, owner: u32, capacity: usize) -> Result<Beliefs, IndexFull> {
        let member = Member::join(index, owner, capacity)?;
        let (until, by_time) = Default::default();
        Ok(Beliefs { member, capacity, until, by_time, num_entries: 0 })
    }

    pub(crate) fn num_held(&self) -> usize {
        self.member.num_held()
    }

    /// Believes in the beginning of a prompt until `time`; blocks that were believed in before get the new time.
    pub(crate) fn add(&mut self, chain: impl Iterator<Item = BlockKey>, time: u64) {
        let chain: Vec<BlockKey> = chain.take(self.capacity).collect();
        let mut num_new = 0;
        for &block in &chain {
            num_new += usize::from(self.until.insert(block, time).is_none());
        }
        self.num_entries += chain.len();
        self.by_time.entry(time).or_default().extend(&chain);
        self.evict(self.capacity - num_new.min(self.capacity));
        self.member.store(None, &chain);
        if self.num_entries > 2 * self.until.len() + 64 {
            self.compact();
        }
    }

    /// Forgets what was believed in until before `time`.
    pub(crate) fn expire(&mut self, time: u64) {
        while let Some(first) = self.by_time.first_entry().filter(|first| *first.key() < time) {
            let (at, mut blocks) = first.remove_entry();
            self.num_entries -= blocks.len();
            blocks.reverse();
            blocks.retain(|block| self.until.get(block) == Some(&at));
            for block in &blocks {
                self.until.remove(block);
            }
            self.member.remove(&blocks);
        }
    }

    /// Until at most so many blocks are held.
    fn evict(&mut self, num_held: usize) {
        while self.member.num_held() > num_held {
            let Some(mut first) = self.by_time.first_entry() else { return };
            let at = *first.key();
            let Some(block) = first.get_mut().pop() else {
                first.remove();
                continue;
            };
            self.num_entries -= 1;
            if self.until.get(&block) == Some(&at) && self.member.holds(block) {
                self.until.remove(&block);
                self.member.remove(&[block]);
            }
        }
    }

    fn compact(&mut self) {
        for (at, blocks) in &mut self.by_time {
            blocks.retain(|block| self.until.get(block) == Some(at));
        }
        self.by_time.retain(|_, blocks| !blocks.is_empty());
        self.num_entries = self.by_time.values().map(Vec::len).sum();
    }
}
