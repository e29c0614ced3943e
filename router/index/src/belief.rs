//! Blocks that a worker is believed to hold because prompts were sent to it. Nothing confirms it.
//!
//! Threads that serve requests add prompts, which may have thousands of blocks. So a belief is one of blocks that follow each
//! other: it is divided only where a prompt leaves it.

use std::{
    cmp::Reverse,
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
    /// By the first block of each.
    believed: HashMap<BlockKey, Belief>,
    /// The same first blocks, in the order in which beliefs go.
    by_time: BTreeMap<Until, BlockKey>,
    /// Prompts that were added.
    num_added: u64,
}

/// What is believed of blocks that follow each other.
#[derive(Debug)]
struct Belief {
    /// At least one.
    blocks: Vec<BlockKey>,
    until: Until,
    /// Prompts with them that were sent, and have not finished as far as it is known.
    num_sent: u32,
}

/// The end of a belief.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Until {
    time: u64,
    /// The newest prompt with the blocks.
    prompt: u64,
    /// Where they begin in it.
    place: Reverse<usize>,
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
        Ok(Beliefs { member, capacity, believed, by_time, num_added: 0 })
    }

    pub(crate) fn num_held(&self) -> usize {
        self.member.num_held()
    }

    /// Believes in the beginning of a prompt until `time`. Blocks that were believed in before get the new time; an earlier one not
    /// while other prompts with them are on their way.
    pub(crate) fn add(&mut self, chain: impl Iterator<Item = BlockKey>, time: u64, reason: Reason) {
        let chain: Vec<BlockKey> = chain.take(self.capacity).collect();
        self.num_added += 1;
        let prompt = self.num_added;
        let (mut added, mut place, mut num_new) = (Vec::new(), 0, 0);
        while place < chain.len() {
            let left = &chain[place..];
            let mut belief = self.take(left).unwrap_or_else(|| {
                // What follows may be believed, although its beginning is not any more.
                let is_new = |block: &&BlockKey| !self.believed.contains_key(*block);
                let num = 1 + left[1..].iter().take_while(is_new).count();
                num_new += num;
                let until = Until { time, prompt, place: Reverse(place) };
                Belief { blocks: left[..num].to_vec(), until, num_sent: 0 }
            });
            belief.num_sent = match reason {
                Reason::Sent => belief.num_sent.saturating_add(1),
                Reason::Finished => belief.num_sent.saturating_sub(1),
            };
            if time > belief.until.time || belief.num_sent == 0 {
                belief.until.time = time;
            }
            belief.until.prompt = prompt;
            place += belief.blocks.len();
            added.push(belief);
        }
        // What is taken out does not go: what the chain shares with others does not make room for the rest of it.
        self.evict(self.capacity - num_new);
        let mut num_stored = chain.len() - self.member.store(None, &chain);
        if num_stored < chain.len() {
            self.member.remove(&chain[num_stored..]);
        }
        for mut belief in added {
            belief.blocks.truncate(num_stored);
            num_stored -= belief.blocks.len();
            if !belief.blocks.is_empty() {
                self.put(belief);
            }
        }
    }

    /// Forgets what was believed in until before `time`.
    pub(crate) fn expire(&mut self, time: u64) {
        while self.by_time.first_key_value().is_some_and(|(until, _)| until.time < time) {
            if let Some(belief) = self.take_first() {
                self.remove(belief.blocks);
            }
        }
    }

    /// Until at most so many blocks are held.
    fn evict(&mut self, num_held: usize) {
        while self.member.num_held() > num_held {
            let Some(mut belief) = self.take_first() else { return };
            let num_more = self.member.num_held() - num_held;
            let end = belief.blocks.split_off(belief.blocks.len().saturating_sub(num_more));
            self.remove(end);
            if !belief.blocks.is_empty() {
                self.put(belief);
            }
        }
    }

    /// Takes out the belief that a chain begins with, as far as its blocks are the chain's.
    fn take(&mut self, chain: &[BlockKey]) -> Option<Belief> {
        let mut belief = self.believed.remove(chain.first()?)?;
        self.by_time.remove(&belief.until);
        let num_same = belief.blocks.iter().zip(chain).take_while(|(own, block)| own == block).count();
        if num_same < belief.blocks.len() {
            let blocks = belief.blocks.split_off(num_same);
            belief.blocks.shrink_to_fit();
            let until = Until { place: Reverse(belief.until.place.0 + num_same), ..belief.until };
            self.put(Belief { blocks, until, num_sent: belief.num_sent });
        }
        Some(belief)
    }

    /// Takes out the belief that goes first.
    fn take_first(&mut self) -> Option<Belief> {
        while let Some((_, first)) = self.by_time.pop_first() {
            // It is gone where the first block of another belief has the same name.
            let belief = self.believed.remove(&first);
            if belief.is_some() {
                return belief;
            }
        }
        None
    }

    fn put(&mut self, belief: Belief) {
        let first = belief.blocks[0];
        self.by_time.insert(belief.until, first);
        self.believed.insert(first, belief);
    }

    /// From behind.
    fn remove(&mut self, mut blocks: Vec<BlockKey>) {
        blocks.reverse();
        self.member.remove(&blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(prompt: u64, num_blocks: u64) -> impl Iterator<Item = BlockKey> {
        (0..num_blocks).map(move |place| BlockKey(prompt << 32 | place))
    }

    #[test]
    fn a_prompt_is_one_belief_but_where_others_leave_it() {
        let index = Arc::new(KvIndex::new(4));
        let mut beliefs = Beliefs::new(&index, 1, 20_000).expect("there is room");
        let size = |beliefs: &Beliefs| {
            assert_eq!(beliefs.believed.len(), beliefs.by_time.len());
            (beliefs.believed.len(), beliefs.num_held())
        };
        for _ in 0..3 {
            beliefs.add(chain(1, 8192), 64, Reason::Sent);
            assert_eq!(size(&beliefs), (1, 8192));
        }
        beliefs.add(chain(1, 100).chain(chain(2, 900)), 64, Reason::Sent);
        assert_eq!(size(&beliefs), (3, 9092), "both, and what they share");
        for _ in 0..3 {
            beliefs.add(chain(1, 8192).chain(chain(3, 10)), 2, Reason::Finished);
            assert_eq!(size(&beliefs), (4, 9102), "its answer");
        }
        beliefs.expire(3);
        assert_eq!(size(&beliefs), (2, 1000), "the other prompt");
        beliefs.expire(65);
        assert_eq!(size(&beliefs), (0, 0));
    }
}
