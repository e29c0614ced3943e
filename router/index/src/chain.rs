//! What one worker holds, as chains of blocks: which of its blocks can be reached from the beginning of a sequence.
//!
//! A cache may evict a block and keep those that follow it. A prompt cannot use them until the block is stored again. So a
//! block is *published* while it and all before it are held, and the published blocks of a worker have no gaps.
//!
//! ```text
//!   (beginning) -- a -- b -- c -- d         published: a b c d
//!                            removed c:     published: a b; d is held, and c is known to be missing before it
//!                            stored c:      published: a b c d
//! ```

use baton_kv_events::BlockKey;

/// The held blocks of one worker.
#[derive(Debug)]
pub(crate) struct Chains {
    nodes: Vec<Node>,
    /// Where a key's node is, by open addressing: the upper half of its hash and the node plus one; 0 is free.
    places: Box<[u64]>,
    /// The first unused node.
    free: u32,
    num_held: usize,
    num_nodes: usize,
    /// Where tearing down goes on.
    at: u32,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    key: u64,
    /// The node before, or one of the marks below; and the flags.
    parent: u32,
    first_child: u32,
    /// Another child of the same parent; of an unused node, the next unused one.
    next: u32,
    previous: u32,
}

const HELD: u32 = 1 << 31;
const PUBLISHED: u32 = 1 << 30;
const PARENT: u32 = PUBLISHED - 1;
/// It begins a sequence.
const ROOT: u32 = PARENT;
/// It is missing, and what comes before it is not known.
const UNKNOWN: u32 = PARENT - 1;
/// The node is not in use.
const UNUSED: u32 = PARENT - 2;
/// Nodes that there may be.
const MAX_NODES: usize = (PARENT - 3) as usize;
const NONE: u32 = u32::MAX;

impl Node {
    fn is_held(&self) -> bool {
        self.parent & HELD != 0
    }

    fn is_published(&self) -> bool {
        self.parent & PUBLISHED != 0
    }

    fn before(&self) -> u32 {
        self.parent & PARENT
    }

    fn parent_node(&self) -> Option<u32> {
        Some(self.before()).filter(|&parent| parent < UNUSED)
    }
}

impl Default for Chains {
    fn default() -> Chains {
        Chains { nodes: Vec::new(), places: Box::default(), free: NONE, num_held: 0, num_nodes: 0, at: 0 }
    }
}

impl Chains {
    /// Blocks that are held.
    pub(crate) fn num_held(&self) -> usize {
        self.num_held
    }

    /// Memory.
    pub(crate) fn num_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.places.len() * size_of::<u64>()
    }

    /// Blocks that follow each other are stored, the first one after `parent`. Adds to `published` what is published by that,
    /// parents first. At most `max_held` blocks are held: how many were refused.
    pub(crate) fn store(
        &mut self,
        parent: Option<BlockKey>,
        blocks: &[BlockKey],
        max_held: usize,
        published: &mut Vec<BlockKey>,
    ) -> usize {
        let max_held = max_held.min(MAX_NODES / 2);
        if blocks.is_empty() {
            return 0;
        }
        let mut num_refused = 0;
        let start = match parent {
            None => ROOT,
            Some(parent) => self.find(parent).unwrap_or_else(|| self.create(parent)),
        };
        let mut before = start;
        self.touch(blocks);
        for (idx, &block) in blocks.iter().enumerate() {
            let known = self.find(block);
            if known.is_none_or(|node| !self.node(node).is_held()) && self.num_held >= max_held {
                num_refused = blocks.len() - idx;
                break;
            }
            let node = match known {
                // What it was first stored after is what its hash covers.
                Some(node) if self.node(node).is_held() => {
                    before = node;
                    continue;
                }
                Some(node) => {
                    if self.is_before(node, before) {
                        // It cannot follow itself.
                        num_refused = blocks.len() - idx;
                        break;
                    }
                    node
                }
                None => self.create(block),
            };
            self.link(node, before);
            self.num_held += 1;
            let is_reached = before == ROOT || self.node(before).is_published();
            let entry = &mut self.nodes[node as usize];
            entry.parent |= HELD;
            if is_reached {
                entry.parent |= PUBLISHED;
                published.push(block);
                if entry.first_child != NONE {
                    self.publish_below(node, published);
                }
            }
            before = node;
        }
        if start < UNUSED {
            // It was missing, and nothing was stored after it.
            self.drop_if_needless(start);
        }
        num_refused
    }

    /// Blocks are not held any more. Adds to `hidden` what is not published any more by that, children first.
    pub(crate) fn remove(&mut self, blocks: &[BlockKey], hidden: &mut Vec<BlockKey>) {
        self.touch(blocks);
        for &block in blocks {
            let Some(node) = self.find(block).filter(|&node| self.node(node).is_held()) else { continue };
            self.num_held -= 1;
            if self.node(node).is_published() {
                let from = hidden.len();
                hidden.push(block);
                self.nodes[node as usize].parent &= !PUBLISHED;
                if self.node(node).first_child != NONE {
                    self.hide_below(node, hidden);
                    hidden[from..].reverse();
                }
            }
            let before = self.node(node).parent_node();
            self.unlink(node);
            self.nodes[node as usize].parent = UNKNOWN;
            self.drop_if_needless(node);
            if let Some(before) = before {
                self.drop_if_needless(before);
            }
        }
    }

    /// Whether a block is held.
    pub(crate) fn holds(&self, block: BlockKey) -> bool {
        self.find(block).is_some_and(|node| self.node(node).is_held())
    }

    /// Takes nodes away for good, children first, and adds those that were published to `hidden`, at most `max`. True when
    /// nothing is left. Nothing else may be called afterwards.
    pub(crate) fn tear_down(&mut self, max: usize, hidden: &mut Vec<BlockKey>) -> bool {
        self.places = Box::default();
        let mut num_left = max;
        while num_left > 0 {
            let Some(mut node) = self.nodes.get(self.at as usize).map(|_| self.at) else {
                self.nodes = Vec::new();
                return true;
            };
            if self.node(node).before() == UNUSED {
                self.at += 1;
                continue;
            }
            while self.node(node).first_child != NONE {
                node = self.node(node).first_child;
            }
            // Up as far as there are no other children.
            loop {
                let entry = self.nodes[node as usize];
                if entry.is_published() {
                    hidden.push(BlockKey(entry.key));
                }
                num_left -= 1;
                self.unlink(node);
                self.nodes[node as usize].parent = UNUSED;
                match entry.parent_node() {
                    Some(parent) if num_left > 0 && self.node(parent).first_child == NONE => node = parent,
                    _ => break,
                }
            }
        }
        false
    }

    /// Reads where the blocks are: the processor waits for all of that at the same time.
    fn touch(&self, blocks: &[BlockKey]) {
        if self.places.is_empty() || blocks.len() < 4 {
            return;
        }
        let mut sum = 0;
        for blocks in blocks.chunks(64) {
            let mut found = [0; 64];
            for (found, block) in found.iter_mut().zip(blocks) {
                *found = self.places[self.home(tag(block.0))];
            }
            for &found in found.iter().filter(|&&found| found != 0) {
                sum ^= self.node(found as u32 - 1).key;
            }
        }
        std::hint::black_box(sum);
    }

    fn node(&self, node: u32) -> &Node {
        &self.nodes[node as usize]
    }

    /// Whether `node` is `later`, or comes before it.
    fn is_before(&self, node: u32, later: u32) -> bool {
        if later >= UNUSED || self.node(later).is_published() || self.node(node).first_child == NONE {
            // Nothing that follows a missing block is published.
            return node == later;
        }
        let mut at = Some(later);
        while let Some(place) = at {
            if place == node {
                return true;
            }
            at = self.node(place).parent_node();
        }
        false
    }

    fn link(&mut self, node: u32, parent: u32) {
        let flags = self.node(node).parent & !PARENT;
        let mut next = NONE;
        if parent < UNUSED {
            next = std::mem::replace(&mut self.nodes[parent as usize].first_child, node);
            if next != NONE {
                self.nodes[next as usize].previous = node;
            }
        }
        let entry = &mut self.nodes[node as usize];
        (entry.parent, entry.next, entry.previous) = (flags | parent, next, NONE);
    }

    fn unlink(&mut self, node: u32) {
        let Node { next, previous, .. } = *self.node(node);
        if previous != NONE {
            self.nodes[previous as usize].next = next;
        } else if let Some(parent) = self.node(node).parent_node() {
            self.nodes[parent as usize].first_child = next;
        }
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        let entry = &mut self.nodes[node as usize];
        (entry.next, entry.previous) = (NONE, NONE);
    }

    /// Publishes what follows a published node.
    fn publish_below(&mut self, node: u32, published: &mut Vec<BlockKey>) {
        let mut stack = vec![self.node(node).first_child];
        while let Some(mut child) = stack.pop() {
            while child != NONE {
                let entry = &mut self.nodes[child as usize];
                debug_assert!(entry.is_held(), "what a missing block follows is not known");
                entry.parent |= PUBLISHED;
                published.push(BlockKey(entry.key));
                if entry.first_child != NONE {
                    stack.push(entry.first_child);
                }
                child = entry.next;
            }
        }
    }

    /// Hides what follows a node that is not published any more, parents first.
    fn hide_below(&mut self, node: u32, hidden: &mut Vec<BlockKey>) {
        let mut stack = vec![self.node(node).first_child];
        while let Some(mut child) = stack.pop() {
            while child != NONE {
                let entry = &mut self.nodes[child as usize];
                entry.parent &= !PUBLISHED;
                hidden.push(BlockKey(entry.key));
                if entry.first_child != NONE {
                    stack.push(entry.first_child);
                }
                child = entry.next;
            }
        }
    }

    /// A missing block without children is forgotten.
    fn drop_if_needless(&mut self, node: u32) {
        let entry = *self.node(node);
        if entry.is_held() || entry.first_child != NONE || entry.before() == UNUSED {
            return;
        }
        debug_assert_eq!(entry.before(), UNKNOWN);
        self.forget(node);
        let entry = &mut self.nodes[node as usize];
        entry.parent = UNUSED;
        entry.next = std::mem::replace(&mut self.free, node);
        self.num_nodes -= 1;
    }

    /// A missing block.
    fn create(&mut self, key: BlockKey) -> u32 {
        let node = Node { key: key.0, parent: UNKNOWN, first_child: NONE, next: NONE, previous: NONE };
        let place = if self.free != NONE {
            let place = self.free;
            self.free = self.node(place).next;
            self.nodes[place as usize] = node;
            place
        } else {
            if self.nodes.len() == self.nodes.capacity() {
                // Less than twice as much: there are many workers.
                self.nodes.reserve_exact(self.nodes.len() / 4 + 64);
            }
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        };
        self.num_nodes += 1;
        self.remember(place);
        place
    }

    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.places.len() as u64) >> 32) as usize
    }

    fn find(&self, key: BlockKey) -> Option<u32> {
        if self.places.is_empty() {
            return None;
        }
        let tag = tag(key.0);
        let mut place = self.home(tag);
        loop {
            let entry = self.places[place];
            if entry == 0 {
                return None;
            }
            let node = entry as u32 - 1;
            if (entry >> 32) as u32 == tag && self.node(node).key == key.0 {
                return Some(node);
            }
            place = if place + 1 == self.places.len() { 0 } else { place + 1 };
        }
    }

    fn remember(&mut self, node: u32) {
        if self.num_nodes * 10 > self.places.len() * 7 {
            let size = (self.num_nodes * 2).max(64);
            let old = std::mem::replace(&mut self.places, vec![0; size].into());
            old.iter().filter(|&&entry| entry != 0).for_each(|&entry| self.put(entry));
        }
        self.put(u64::from(tag(self.node(node).key)) << 32 | u64::from(node + 1));
    }

    fn put(&mut self, entry: u64) {
        let mut place = self.home((entry >> 32) as u32);
        while self.places[place] != 0 {
            place = if place + 1 == self.places.len() { 0 } else { place + 1 };
        }
        self.places[place] = entry;
    }

    fn forget(&mut self, node: u32) {
        let size = self.places.len();
        let mut hole = self.home(tag(self.node(node).key));
        while self.places[hole] as u32 != node + 1 {
            hole = if hole + 1 == size { 0 } else { hole + 1 };
        }
        // Moves up what is behind it (Knuth 6.4, algorithm R).
        let mut place = hole;
        loop {
            place = if place + 1 == size { 0 } else { place + 1 };
            let entry = self.places[place];
            if entry == 0 {
                break;
            }
            let home = self.home((entry >> 32) as u32);
            let distance = |from: usize, to: usize| if to >= from { to - from } else { to + size - from };
            if distance(home, place) >= distance(hole, place) {
                self.places[hole] = entry;
                hole = place;
            }
        }
        self.places[hole] = 0;
    }
}

/// The upper half of a hash of the key.
fn tag(key: u64) -> u32 {
    ((key ^ (key >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}
