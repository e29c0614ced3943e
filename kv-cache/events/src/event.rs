//! One event, a batch of them, and the events that are not numbered yet.

/// Names the content of a block: 64 bits of its hash, which also covers every block before it.
///
/// Two contents of one name cost a wrong belief about a cache, never a wrong token: workers share blocks by the whole hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u64);

/// A change of what a cache holds: the pool, and the tiers below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks of one sequence, in its order, are in the pool or in a tier.
    Stored {
        /// The block before the first one; `None`: they begin the sequence.
        parent: Option<BlockKey>,
        /// At least one.
        blocks: Vec<BlockKey>,
    },
    /// Blocks that are not cached any more, in any order.
    Removed {
        /// At least one.
        blocks: Vec<BlockKey>,
    },
    /// Stored blocks of one sequence, in its order, are in the pool. Only a cache with tiers tells this: without them the pool has
    /// all that is stored.
    Pooled {
        /// The block before the first one; `None`: they begin the sequence.
        parent: Option<BlockKey>,
        /// None in a dump of a cache whose pool is empty.
        blocks: Vec<BlockKey>,
    },
    /// Blocks that are not in the pool any more, in any order.
    Unpooled {
        /// At least one.
        blocks: Vec<BlockKey>,
    },
}

/// Events in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// The number of the first event. Of a dump: of the first event that it does not contain.
    pub first: u64,
    /// The events. Of a dump: blocks that are stored, and which of them are in the pool.
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
    /// Its blocks.
    pub fn blocks(&self) -> &[BlockKey] {
        match self {
            CacheEvent::Stored { blocks, .. }
            | CacheEvent::Removed { blocks }
            | CacheEvent::Pooled { blocks, .. }
            | CacheEvent::Unpooled { blocks } => blocks,
        }
    }

    /// What is told of the pool alone when there are tiers: the same of its blocks.
    pub(crate) fn of_pool(self) -> CacheEvent {
        match self {
            CacheEvent::Stored { parent, blocks } => CacheEvent::Pooled { parent, blocks },
            CacheEvent::Removed { blocks } => CacheEvent::Unpooled { blocks },
            pool => pool,
        }
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
        self.events.push(CacheEvent::Stored { parent, blocks: vec![block] });
    }

    /// A block was evicted.
    pub fn removed(&mut self, block: BlockKey) {
        if let Some(CacheEvent::Removed { blocks }) = self.events.last_mut() {
            blocks.push(block);
            return;
        }
        self.events.push(CacheEvent::Removed { blocks: vec![block] });
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
