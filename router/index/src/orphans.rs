//! Blocks that a worker holds and cannot use: what comes before them is missing.
//!
//! ```text
//!   a -- b -- c -- d        removed b: c and d are orphans, and b is known to be missing before c
//!                           stored b:  all of it can be reached again
//! ```

/// The orphans of one worker, each with what it follows.
#[derive(Debug)]
pub(crate) struct Orphans {
    nodes: Vec<Node>,
    /// Where a key's node is, by open addressing: the upper half of its hash and the node plus one; 0 is free.
    places: Box<[u64]>,
    /// The first unused node.
    free: u32,
    num_held: usize,
    num_nodes: usize,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    key: u64,
    /// The node before, or one of the marks below; and whether it is held.
    parent: u32,
    first_child: u32,
    /// Another child of the same parent; of an unused node, the next unused one.
    next: u32,
    previous: u32,
}

const HELD: u32 = 1 << 31;
const PARENT: u32 = HELD - 1;
/// It is missing, and what comes before it is not known.
const UNKNOWN: u32 = PARENT - 1;
/// The node is not in use.
const UNUSED: u32 = PARENT - 2;
const NONE: u32 = u32::MAX;

impl Node {
    fn is_held(&self) -> bool {
        self.parent & HELD != 0
    }

    fn before(&self) -> u32 {
        self.parent & PARENT
    }

    fn parent_node(&self) -> Option<u32> {
        Some(self.before()).filter(|&parent| parent < UNUSED)
    }
}

impl Default for Orphans {
    fn default() -> Orphans {
        Orphans { nodes: Vec::new(), places: Box::default(), free: NONE, num_held: 0, num_nodes: 0 }
    }
}

impl Orphans {
    /// Blocks that are held.
    pub(crate) fn num_held(&self) -> usize {
        self.num_held
    }

    /// Those, and the missing ones that they follow.
    pub(crate) fn num_nodes(&self) -> usize {
        self.num_nodes
    }

    /// Memory.
    pub(crate) fn num_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.places.len() * size_of::<u64>()
    }

    /// Whether a block is one of them.
    pub(crate) fn holds(&self, block: u64) -> bool {
        self.num_held > 0 && self.find(block).is_some_and(|node| self.node(node).is_held())
    }

    /// A block is stored after `parent`, which cannot be reached. False: it would follow itself, or is held already.
    pub(crate) fn store(&mut self, parent: u64, block: u64) -> bool {
        let before = self.find(parent).unwrap_or_else(|| self.create(parent));
        let node = match self.find(block) {
            Some(node) if self.node(node).is_held() || self.is_before(node, before) => {
                self.drop_if_needless(before);
                return false;
            }
            Some(node) => node,
            None => self.create(block),
        };
        self.link(node, before);
        self.nodes[node as usize].parent |= HELD;
        self.num_held += 1;
        true
    }

    /// A block is not held any more, if it was.
    pub(crate) fn remove(&mut self, block: u64) {
        let Some(node) = self.find(block).filter(|&node| self.node(node).is_held()) else { return };
        self.num_held -= 1;
        let before = self.node(node).parent_node();
        self.unlink(node);
        self.nodes[node as usize].parent = UNKNOWN;
        self.drop_if_needless(node);
        if let Some(before) = before {
            self.drop_if_needless(before);
        }
        self.give_back();
    }

    /// Takes out all that follows a block that can be reached now: each block with the place in this list, plus one, of the
    /// block that it follows, or 0. What comes before others is before them in the list.
    pub(crate) fn take_after(&mut self, block: u64) -> Vec<(usize, u64)> {
        let mut taken = Vec::new();
        let Some(top) = self.find(block) else { return taken };
        let mut nodes = Vec::new();
        let mut stack = vec![(0, self.node(top).first_child)];
        while let Some((parent, mut child)) = stack.pop() {
            while child != NONE {
                let entry = *self.node(child);
                taken.push((parent, entry.key));
                nodes.push(child);
                stack.push((taken.len(), entry.first_child));
                child = entry.next;
            }
        }
        for &node in nodes.iter().rev() {
            self.num_held -= 1;
            self.unlink(node);
            self.nodes[node as usize].parent = UNKNOWN;
            self.drop_if_needless(node);
        }
        self.drop_if_needless(top);
        self.give_back();
        taken
    }

    /// Orphans are rare: their memory does not stay.
    fn give_back(&mut self) {
        if self.num_nodes == 0 {
            *self = Orphans::default();
        }
    }

    fn node(&self, node: u32) -> &Node {
        &self.nodes[node as usize]
    }

    /// Whether `node` is `later`, or comes before it.
    fn is_before(&self, node: u32, later: u32) -> bool {
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
    fn create(&mut self, key: u64) -> u32 {
        let node = Node { key, parent: UNKNOWN, first_child: NONE, next: NONE, previous: NONE };
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

    fn find(&self, key: u64) -> Option<u32> {
        if self.places.is_empty() {
            return None;
        }
        let tag = tag(key);
        let mut place = self.home(tag);
        loop {
            let entry = self.places[place];
            if entry == 0 {
                return None;
            }
            let node = entry as u32 - 1;
            if (entry >> 32) as u32 == tag && self.node(node).key == key {
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
            debug_assert!(self.places[hole] != 0, "a node that is in use can be found");
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
