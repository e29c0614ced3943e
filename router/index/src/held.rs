//! What one worker holds: prefixes of runs, as a tree, and blocks that cannot be reached from the beginning of a sequence.
//!
//! A cache may evict a block and keep those that follow it. A prompt cannot use them until the block is stored again. So the
//! blocks of a worker in runs have no gaps, and what follows a missing block is among its `Orphans`.

use baton_kv_events::BlockKey;

use crate::{
    orphans::Orphans,
    run::{Holding, MAX_RUN, Run, Spot},
    runs::Change,
};

#[derive(Debug)]
pub(crate) struct Held {
    nodes: Vec<Node>,
    /// The first unused node.
    free: u32,
    /// Blocks in runs.
    num_reached: usize,
    orphans: Orphans,
    /// Where tearing down goes on.
    at: u32,
    /// The node that was changed last.
    recent: u32,
    /// Reused.
    keys: Vec<u64>,
}

/// The front of a run that the worker holds.
#[derive(Clone, Copy, Debug)]
struct Node {
    run: u32,
    /// Where it was in the run.
    place: u32,
    /// Whose run this one begins in, and the place there.
    parent: u32,
    at: u16,
    /// Blocks; 0: the node is not in use.
    len: u16,
    first_child: u32,
    /// Another child of the same parent; of an unused node, the next unused one.
    next: u32,
    previous: u32,
}

const NONE: u32 = u32::MAX;

/// What a block follows.
#[derive(Clone, Copy, Debug)]
enum Before {
    Beginning,
    /// A block of a node.
    Reached(u32, usize),
    /// A block that is missing, or that follows a missing one.
    Orphan(u64),
}

impl Default for Held {
    fn default() -> Held {
        let (nodes, keys, orphans) = Default::default();
        Held { nodes, free: NONE, num_reached: 0, orphans, at: 0, recent: NONE, keys }
    }
}

impl Held {
    /// Blocks that are held.
    pub(crate) fn num_held(&self) -> usize {
        self.num_reached + self.orphans.num_held()
    }

    /// Memory.
    pub(crate) fn num_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.orphans.num_bytes()
    }

    /// Blocks that follow each other are stored, the first one after `parent`. At most `max_held` blocks are held: how many
    /// were refused.
    pub(crate) fn store(
        &mut self,
        runs: &mut Change<'_>,
        member: u32,
        parent: Option<BlockKey>,
        blocks: &[BlockKey],
        max_held: usize,
    ) -> usize {
        let mut before = match parent {
            None => Before::Beginning,
            Some(BlockKey(parent)) => match self.find(runs, member, parent) {
                Some((node, offset)) => Before::Reached(node, offset),
                None => Before::Orphan(parent),
            },
        };
        let mut left = blocks;
        while let [first, ..] = left {
            let room = max_held.saturating_sub(self.num_held());
            let (num, next) = match before {
                // One after the other: any of them may be what an orphan waits for.
                _ if self.orphans.num_nodes() > 0 => self.store_one(runs, member, before, first.0, room),
                Before::Orphan(_) => self.store_one(runs, member, before, first.0, room),
                Before::Beginning => self.store_after(runs, member, NONE, 0, left, room),
                Before::Reached(node, offset) => {
                    match self.store_along(runs, member, node, offset, left, room) {
                        0 => self.store_after(runs, member, node, offset, left, room),
                        num => (num, Before::Reached(node, offset + num)),
                    }
                }
            };
            if num == 0 {
                break;
            }
            left = &left[num..];
            before = next;
        }
        left.len()
    }

    /// One block, while some are held that cannot be reached. How many were taken, and what comes before the next one.
    fn store_one(
        &mut self,
        runs: &mut Change<'_>,
        member: u32,
        before: Before,
        block: u64,
        room: usize,
    ) -> (usize, Before) {
        if self.orphans.holds(block) {
            // What it was first stored after is what its hash covers.
            return (1, Before::Orphan(block));
        }
        let blocks = [BlockKey(block)];
        let (num, next) = match before {
            Before::Orphan(parent) => match self.find(runs, member, block) {
                Some((node, offset)) => return (1, Before::Reached(node, offset)),
                None if room > 0 && self.orphans.store(parent, block) => return (1, Before::Orphan(block)),
                None => return (0, before),
            },
            Before::Beginning => self.store_after(runs, member, NONE, 0, &blocks, room),
            Before::Reached(node, offset) => {
                match self.store_along(runs, member, node, offset, &blocks, room) {
                    0 => self.store_after(runs, member, node, offset, &blocks, room),
                    num => (num, Before::Reached(node, offset + num)),
                }
            }
        };
        if num > 0
            && let Before::Reached(node, offset) = next
        {
            self.adopt(runs, member, node, offset, block);
        }
        (num, next)
    }

    /// Orphans that waited for a block that can be reached now.
    fn adopt(&mut self, runs: &mut Change<'_>, member: u32, node: u32, offset: usize, block: u64) {
        let mut reached = vec![(node, offset)];
        for (parent, key) in self.orphans.take_after(block) {
            // Parents come first. The numbers are those of the list, 0 is the block.
            let (node, offset) = reached[parent];
            let blocks = [BlockKey(key)];
            let place = match self.store_along(runs, member, node, offset, &blocks, 1) {
                0 => match self.store_after(runs, member, node, offset, &blocks, 1) {
                    (1, Before::Reached(node, offset)) => (node, offset),
                    // There are too many runs: it is lost, and a lost block is no wrong one.
                    _ => (node, offset),
                },
                _ => (node, offset + 1),
            };
            reached.push(place);
        }
    }

    /// The blocks of a node's run after `offset`, as far as they are those. How many.
    fn store_along(
        &mut self,
        runs: &mut Change<'_>,
        member: u32,
        node: u32,
        offset: usize,
        blocks: &[BlockKey],
        room: usize,
    ) -> usize {
        let own = self.nodes[node as usize];
        let len = usize::from(own.len);
        let same = |run: &Run| run.num_same(offset + 1, blocks.iter().map(|block| block.0));
        // No other worker makes it longer meanwhile; what this one does not hold may be cut off.
        let num = match runs.read(own.run, same) {
            num if offset + 1 + num <= len => num,
            _ => same(runs.of(own.run).run(own.run)),
        };
        let num = num.min((len + room).saturating_sub(offset + 1));
        if offset + 1 + num > len {
            self.resize(runs, member, node, offset + 1 + num);
        }
        num
    }

    /// Blocks that do not follow in the run of a node, but in another one, in a new one, or at the end of it.
    fn store_after(
        &mut self,
        runs: &mut Change<'_>,
        member: u32,
        parent: u32,
        offset: usize,
        blocks: &[BlockKey],
        room: usize,
    ) -> (usize, Before) {
        let after = match parent {
            NONE => Spot::default(),
            parent => Spot::new(self.nodes[parent as usize].run, offset),
        };
        let num = blocks.len().min(room).min(MAX_RUN);
        if parent != NONE && num > 0 {
            let num = self.append(runs, member, parent, offset, &blocks[..num]);
            if num > 0 {
                return (num, Before::Reached(parent, offset + num));
            }
        }
        let shard = runs.beginning_with(blocks[0].0);
        if let Some(run) = shard.run_after(after, blocks[0].0) {
            if let Some(holding) = shard.run(run).holding(member) {
                return (1, Before::Reached(holding.node(), 0));
            }
            let num = shard.run(run).num_same(0, blocks.iter().map(|block| block.0)).min(room);
            if num == 0 {
                return (0, Before::Beginning);
            }
            let node = self.add_node(runs, member, run, parent, offset, num);
            return (num, Before::Reached(node, num - 1));
        }
        if num == 0 {
            return (0, Before::Beginning);
        }
        self.keys.clear();
        self.keys.extend(blocks[..num].iter().map(|block| block.0));
        let Some(run) = shard.create(after, &self.keys) else { return (0, Before::Beginning) };
        let node = self.add_node(runs, member, run, parent, offset, num);
        (num, Before::Reached(node, num - 1))
    }

    /// Blocks at the end of a run, if the worker is alone in it and nothing follows yet. How many.
    fn append(
        &mut self,
        runs: &mut Change<'_>,
        member: u32,
        node: u32,
        offset: usize,
        blocks: &[BlockKey],
    ) -> usize {
        let own = self.nodes[node as usize];
        let len = usize::from(own.len);
        let is_at_end = |run: &Run| offset + 1 == len && len == run.len() && run.mark().count() == 1;
        if len == MAX_RUN || !runs.read(own.run, is_at_end) {
            return 0;
        }
        // What begins there is this worker's own: no other one is in the run.
        let after = Spot::new(own.run, offset);
        if own.first_child != NONE && runs.beginning_with(blocks[0].0).run_after(after, blocks[0].0).is_some()
        {
            return 0;
        }
        let shard = runs.of(own.run);
        if !is_at_end(shard.run(own.run)) {
            return 0;
        }
        let num = blocks.len().min(MAX_RUN - len);
        self.keys.clear();
        self.keys.extend(blocks[..num].iter().map(|block| block.0));
        shard.append(own.run, &self.keys);
        self.resize(runs, member, node, len + num);
        num
    }

    /// Blocks are not held any more.
    pub(crate) fn remove(&mut self, runs: &mut Change<'_>, member: u32, blocks: &[BlockKey]) {
        let mut left = blocks;
        while let [BlockKey(block), ..] = left {
            let Some((node, offset)) = self.find(runs, member, *block) else {
                self.orphans.remove(*block);
                left = &left[1..];
                continue;
            };
            let own = self.nodes[node as usize];
            if offset + 1 < usize::from(own.len) || own.first_child != NONE {
                self.orphan(runs, member, node, offset);
                left = &left[1..];
            }
            // The end of a run goes block by block from behind.
            let num_more = match own.first_child {
                NONE if offset + 1 == usize::from(own.len) => runs.read(own.run, |run| {
                    let before = (0..=offset).rev().map(|offset| run.key(offset));
                    before.zip(left).take_while(|(own, removed)| *own == removed.0).count()
                }),
                _ => 0,
            };
            left = &left[num_more..];
            let len = if num_more > 0 { offset + 1 - num_more } else { offset };
            if len > 0 {
                self.resize(runs, member, node, len);
            } else {
                self.leave(runs, member, node);
            }
        }
    }

    /// What follows a place cannot be reached any more, because the block there is missing.
    fn orphan(&mut self, runs: &mut Change<'_>, member: u32, node: u32, offset: usize) {
        let mut gone = Vec::new();
        let mut stack = vec![(node, offset + 1)];
        while let Some((node, from)) = stack.pop() {
            let own = self.nodes[node as usize];
            let mut before = match from {
                0 => runs.read(self.nodes[own.parent as usize].run, |run| run.key(usize::from(own.at))),
                _ => runs.read(own.run, |run| run.key(from - 1)),
            };
            runs.read(own.run, |run| {
                for key in (from..usize::from(own.len)).map(|offset| run.key(offset)) {
                    self.orphans.store(before, key);
                    before = key;
                }
            });
            let mut child = own.first_child;
            while child != NONE {
                let entry = &self.nodes[child as usize];
                if usize::from(entry.at) + 1 >= from {
                    stack.push((child, 0));
                    gone.push(child);
                }
                child = entry.next;
            }
        }
        for &child in gone.iter().rev() {
            self.leave(runs, member, child);
        }
    }

    /// Takes nodes away for good, those that others begin after last, at most `max` blocks and one run more. How many, and
    /// whether nothing is left. Nothing else may be called afterwards.
    pub(crate) fn tear_down(&mut self, runs: &mut Change<'_>, member: u32, max: usize) -> (usize, bool) {
        self.orphans = Orphans::default();
        let mut num = 0;
        while num < max {
            let Some(mut node) = self.nodes.get(self.at as usize).map(|_| self.at) else {
                self.nodes = Vec::new();
                return (num, true);
            };
            if self.nodes[node as usize].len == 0 {
                self.at += 1;
                continue;
            }
            while self.nodes[node as usize].first_child != NONE {
                node = self.nodes[node as usize].first_child;
            }
            num += usize::from(self.nodes[node as usize].len);
            self.leave(runs, member, node);
        }
        (num, false)
    }

    /// The node and the place of a block that can be reached.
    fn find(&self, runs: &Change<'_>, member: u32, key: u64) -> Option<(u32, usize)> {
        if let Some(recent) = self.nodes.get(self.recent as usize).filter(|recent| recent.len > 0) {
            let last = usize::from(recent.len) - 1;
            if runs.read(recent.run, |run| run.key(last)) == key {
                return Some((self.recent, last));
            }
        }
        runs.find(key, |spot, run| {
            let holding = run.holding(member)?;
            (holding.num_blocks() > spot.offset()).then(|| (holding.node(), spot.offset()))
        })
    }

    fn add_node(
        &mut self,
        runs: &mut Change<'_>,
        member: u32,
        run: u32,
        parent: u32,
        offset: usize,
        len: usize,
    ) -> u32 {
        let node = match self.free {
            NONE => {
                if self.nodes.len() == self.nodes.capacity() {
                    // Less than twice as much: there are many workers.
                    self.nodes.reserve_exact(self.nodes.len() / 4 + 8);
                }
                self.nodes.push(Node {
                    run: 0,
                    place: 0,
                    parent: NONE,
                    at: 0,
                    len: 0,
                    first_child: NONE,
                    next: NONE,
                    previous: NONE,
                });
                (self.nodes.len() - 1) as u32
            }
            free => {
                self.free = self.nodes[free as usize].next;
                free
            }
        };
        let place = runs.of(run).join(run, Holding::new(member, len, node));
        let mut next = NONE;
        if parent != NONE {
            next = std::mem::replace(&mut self.nodes[parent as usize].first_child, node);
            if next != NONE {
                self.nodes[next as usize].previous = node;
            }
        }
        self.nodes[node as usize] = Node {
            run,
            place,
            parent,
            at: offset as u16,
            len: len as u16,
            first_child: NONE,
            next,
            previous: NONE,
        };
        self.num_reached += len;
        self.recent = node;
        node
    }

    /// Not to 0.
    fn resize(&mut self, runs: &mut Change<'_>, member: u32, node: u32, len: usize) {
        let own = &mut self.nodes[node as usize];
        let before = usize::from(std::mem::replace(&mut own.len, len as u16));
        own.place = runs.of(own.run).update(own.run, own.place, Holding::new(member, len, node), before);
        self.num_reached = self.num_reached + len - before;
        self.recent = node;
    }

    /// A node without children is gone.
    fn leave(&mut self, runs: &mut Change<'_>, member: u32, node: u32) {
        let Node { run, place, parent, len, next, previous, .. } = self.nodes[node as usize];
        runs.of(run).leave(run, member, place, usize::from(len));
        if previous != NONE {
            self.nodes[previous as usize].next = next;
        } else if parent != NONE {
            self.nodes[parent as usize].first_child = next;
        }
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        self.num_reached -= usize::from(len);
        let entry = &mut self.nodes[node as usize];
        (entry.len, entry.next) = (0, std::mem::replace(&mut self.free, node));
        // What is removed next is likely to be what it began after.
        self.recent = parent;
    }
}
