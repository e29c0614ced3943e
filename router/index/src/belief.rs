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

/// Believed blocks, each until a time. Those with the earliest time go first, of those the older prompt's, and the end of a chain
/// before its beginning.
#[derive(Debug)]
pub(crate) struct Beliefs {
    member: Member,
    capacity: usize,
    believed: HashMap<BlockKey, Belief>,
    /// The same by time, in the order of a prompt; a block with another time or a newer prompt by now is skipped. Else there is one entry
    /// of each.
    by_time: BTreeMap<Until, Vec<BlockKey>>,
    /// Of `by_time`, those skipped included.
    num_entries: usize,
    /// Prompts that were added.
    num_added: u64,
}

/// What is believed of a block.
#[derive(Clone, Copy, Debug)]
struct Belief {
    until: Until,
    /// Prompts with it that were sent, and have not finished as far as it is known.
    num_sent: u32,
}

/// The end of a belief.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Until {
    time: u64,
    /// The newest prompt with the block.
    prompt: u64,
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
        Ok(Beliefs { member, capacity, believed, by_time, num_entries: 0, num_added: 0 })
    }

    pub(crate) fn num_held(&self) -> usize {
        self.member.num_held()
    }

    /// Believes in the beginning of a prompt until `time`. Blocks that were believed in before get the new time; an earlier one not
    /// while other prompts with them are on their way.
    pub(crate) fn add(&mut self, chain: impl Iterator<Item = BlockKey>, time: u64, reason: Reason) {
        let chain: Vec<BlockKey> = chain.take(self.capacity).collect();
        self.num_added += 1;
        let (prompt, mut num_new) = (self.num_added, 0);
        let mut untils = Vec::with_capacity(chain.len());
        for &block in &chain {
            let belief = self.believed.entry(block).or_insert_with(|| {
                num_new += 1;
                Belief { until: Until { time, prompt }, num_sent: 0 }
            });
            belief.num_sent = match reason {
                Reason::Sent => belief.num_sent.saturating_add(1),
                Reason::Finished => belief.num_sent.saturating_sub(1),
            };
            if time > belief.until.time || belief.num_sent == 0 {
                belief.until.time = time;
            }
            belief.until.prompt = prompt;
            untils.push(belief.until);
        }
        // The chain has no entries yet: what it shares with others does not make room for the rest of it.
        self.evict(self.capacity - num_new);
        let num_stored = chain.len() - self.member.store(None, &chain);
        let (mut stored, refused) = chain.split_at(num_stored);
        if !refused.is_empty() {
            for block in refused {
                self.believed.remove(block);
            }
            self.member.remove(refused);
        }
        self.num_entries += num_stored;
        for same in untils[..num_stored].chunk_by(|a, b| a == b) {
            let (blocks, rest) = stored.split_at(same.len());
            self.by_time.entry(same[0]).or_default().extend_from_slice(blocks);
            stored = rest;
        }
        if self.num_entries > 2 * self.believed.len() + 64 {
            self.compact();
        }
    }

    /// Forgets what was believed in until before `time`.
    pub(crate) fn expire(&mut self, time: u64) {
        while let Some(first) = self.by_time.first_entry().filter(|first| first.key().time < time) {
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
            if self.believed.get(&block).is_some_and(|belief| belief.until == at) {
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
