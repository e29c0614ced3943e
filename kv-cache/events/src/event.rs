//! One event, a batch of them, and the events that are not numbered yet.

/// Names the content of a block: 64 bits of its hash, which also covers every block before it.
///
/// Two contents of one name cost a wrong belief about a cache, never a wrong token: workers share blocks by the whole hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u64);

/// Tiers below a pool that tell what they hold, at most.
pub const MAX_TIERS: usize = 2;

/// What of a cache an event is about: the pool and all tiers below it, or the fastest part of them. A reader is told of each level that
/// differs from the others: of the first alone if there are no tiers, as the pool has all that is cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheLevel(pub u8);

impl CacheLevel {
    /// The pool and all tiers.
    pub const ALL: CacheLevel = CacheLevel(0);
    /// The pool alone.
    pub const POOL: CacheLevel = CacheLevel::above(0);

    /// The pool and the tiers that are faster than this one; tiers are numbered from the fastest, 0.
    pub const fn above(tier: usize) -> CacheLevel {
        assert!(tier < MAX_TIERS);
        CacheLevel(tier as u8 + 1)
    }

    /// The tier that it is [above](Self::above). `None`: it is all of the cache, or no level that there can be.
    pub fn tier(self) -> Option<usize> {
        usize::from(self.0).checked_sub(1).filter(|&tier| tier < MAX_TIERS)
    }

    /// All levels of a cache with so many tiers.
    pub fn all_of(num_tiers: usize) -> impl Iterator<Item = CacheLevel> {
        (0..=num_tiers as u8).map(CacheLevel)
    }
}

/// A change of what a cache holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks of one sequence, in its order, are at this level.
    Stored {
        /// Where they are.
        level: CacheLevel,
        /// The block before the first one; `None`: they begin the sequence.
        parent: Option<BlockKey>,
        /// None if nothing is at this level, when it is told of for the first time, or in a dump.
        blocks: Vec<BlockKey>,
    },
    /// Blocks that are not at this level any more, in any order.
    Removed {
        /// Where they were.
        level: CacheLevel,
        /// At least one.
        blocks: Vec<BlockKey>,
    },
}

/// Events in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// The number of the first event. Of a dump: of the first event that it does not contain.
    pub first: u64,
    /// The events. Of a dump: blocks that are stored, at each level.
    pub events: Vec<CacheEvent>,
    /// What the events are.
    pub kind: BatchKind,
}

/// What the events of a batch are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BatchKind {
    /// What happened.
    #[default]
    Events,
    /// A part of all that is cached. More parts follow, and nothing comes between them.
    DumpPart,
    /// The last part of all that is cached, or the only one.
    DumpEnd,
}

/// Events that are collected block by block.
#[derive(Debug, Default)]
pub struct PendingEvents {
    events: Vec<CacheEvent>,
}

impl CacheEvent {
    /// Blocks of all of a cache, or of one of its parts: see [`EventLog::append`](crate::EventLog::append).
    pub fn stored(parent: Option<BlockKey>, blocks: Vec<BlockKey>) -> CacheEvent {
        CacheEvent::Stored { level: CacheLevel::ALL, parent, blocks }
    }

    /// The same, of blocks that are not there any more.
    pub fn removed(blocks: Vec<BlockKey>) -> CacheEvent {
        CacheEvent::Removed { level: CacheLevel::ALL, blocks }
    }

    /// What it is about.
    pub fn level(&self) -> CacheLevel {
        let (CacheEvent::Stored { level, .. } | CacheEvent::Removed { level, .. }) = self;
        *level
    }

    /// Its blocks.
    pub fn blocks(&self) -> &[BlockKey] {
        let (CacheEvent::Stored { blocks, .. } | CacheEvent::Removed { blocks, .. }) = self;
        blocks
    }

    /// The same of another level.
    pub fn at(mut self, to: CacheLevel) -> CacheEvent {
        let (CacheEvent::Stored { level, .. } | CacheEvent::Removed { level, .. }) = &mut self;
        *level = to;
        self
    }
}

impl EventBatch {
    /// The number of the event after the last one.
    pub fn next(&self) -> u64 {
        match self.kind {
            BatchKind::Events => self.first.saturating_add(self.events.len() as u64),
            BatchKind::DumpPart | BatchKind::DumpEnd => self.first,
        }
    }
}

impl PendingEvents {
    /// A block was stored after `parent`.
    pub fn stored(&mut self, parent: Option<BlockKey>, block: BlockKey) {
        if let Some(CacheEvent::Stored { blocks, .. }) = self.events.last_mut()
            && blocks.last().copied() == parent
        {
            blocks.push(block);
            return;
        }
        self.events.push(CacheEvent::stored(parent, vec![block]));
    }

    /// A block was evicted.
    pub fn removed(&mut self, block: BlockKey) {
        if let Some(CacheEvent::Removed { blocks, .. }) = self.events.last_mut() {
            blocks.push(block);
            return;
        }
        self.events.push(CacheEvent::removed(vec![block]));
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Takes them, in their order.
    pub fn take(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }
}
