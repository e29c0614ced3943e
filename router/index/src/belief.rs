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
    believed: HashMap<BlockKey, Belief>,
    /// The same by time, in the order of a prompt; a block with another time by now is skipped.
    by_time: BTreeMap<u64, Vec<BlockKey>>,
    /// Of `by_time`, those skipped included.
    num_entries: usize,
}

/// What is believed of a block.
#[derive(Clone, Copy, Debug)]
struct Belief {
    until: u64,
    /// Prompts with it that were sent, and have not finished as far as it is known.
    num_sent: u32,
}

/// Why a worker is believed to hold a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// It was sent there.
    Sent,
    /// It has finished there.
    Finished,
}

impl Beliefs {
    /// At most `capacity` blocks of `owner`.
    pub(crate) fn new(index: &Arc<KvIndex>, owner: u32, capacity: usize) -> Result<Beliefs, IndexFull> {
        let member = Member::join(index, owner, capacity)?;
        let (believed, by_time) = Default::default();
        Ok(Beliefs { member, capacity, believed, by_time, num_entries: 0 })
    }

    pub(crate) fn num_held(&self) -> usize {
        self.member.num_held()
    }

    /// Believes in the beginning of a prompt until `time`. Blocks that were believed in before get the new time; an earlier one not
    /// while other prompts with them are on their way.
    pub(crate) fn add(&mut self, chain: impl Iterator<Item = BlockKey>, time: u64, reason: Reason) {
        let chain: Vec<BlockKey> = chain.take(self.capacity).collect();
        let mut num_new = 0;
        let at_time = self.by_time.entry(time).or_default();
        for &block in &chain {
            let belief = self.believed.entry(block).or_insert_with(|| {
                num_new += 1;
                Belief { until: time, num_sent: 0 }
            });
            belief.num_sent = match reason {
                Reason::Sent => belief.num_sent.saturating_add(1),
                Reason::Finished => belief.num_sent.saturating_sub(1),
            };
            if time > belief.until || belief.num_sent == 0 {
                belief.until = time;
            }
            if belief.until == time {
                at_time.push(block);
                self.num_entries += 1;
            }
        }
        if at_time.is_empty() {
            self.by_time.remove(&time);
        }
        self.evict(self.capacity - num_new.min(self.capacity));
        self.member.store(None, &chain);
        if self.num_entries > 2 * self.believed.len() + 64 {
            self.compact();
        }
    }

    /// Forgets what was believed in until before `time`.
    pub(crate) fn expire(&mut self, time: u64) {
        while let Some(first) = self.by_time.first_entry().filter(|first| *first.key() < time) {
            let (at, mut blocks) = first.remove_entry();
            self.num_entries -= blocks.len();
            blocks.reverse();
            blocks.retain(|block| self.believed.get(block).is_some_and(|belief| belief.until == at));
            for block in &blocks {
                self.believed.remove(block);
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
            let is_current = self.believed.get(&block).is_some_and(|belief| belief.until == at);
            if is_current && self.member.holds(block) {
                self.believed.remove(&block);
                self.member.remove(&[block]);
            }
        }
    }

    fn compact(&mut self) {
        for (at, blocks) in &mut self.by_time {
            blocks.retain(|block| self.believed.get(block).is_some_and(|belief| belief.until == *at));
        }
        self.by_time.retain(|_, blocks| !blocks.is_empty());
        self.num_entries = self.by_time.values().map(Vec::len).sum();
    }
}
