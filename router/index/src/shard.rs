//! A part of the index: a hash table from a block's key to a word that names its holders.
//!
//! One writer at a time changes it. Readers take the table as it is and never wait: a key stays where it was written once,
//! its word is one atomic, and a table that is replaced lives on until its last reader has left it.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use arc_swap::ArcSwap;

use crate::members::{Arena, ArenaUse};

/// Keys of the table that are not in use any more are dropped when all together fill so much of it.
const FULL: (usize, usize) = (3, 4);
/// A new table has room for so many times its keys, in tenths.
const ROOM: usize = 21;
const SMALLEST: usize = 16;

/// One hash table and its writer.
#[derive(Debug)]
pub(crate) struct Shard {
    table: ArcSwap<Table>,
    writer: Mutex<Writer>,
    /// For readers of statistics.
    num_memberships: AtomicU64,
    num_blocks: AtomicU64,
    num_bytes: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Table {
    slots: Box<[Slot]>,
    arena: Arena,
}

#[derive(Debug, Default)]
struct Slot {
    /// 0: free, and no key is behind it. Written once.
    key: AtomicU64,
    word: AtomicU64,
}

#[derive(Debug)]
struct Writer {
    table: Arc<Table>,
    /// Slots with a key.
    num_keys: usize,
    /// Slots with a holder.
    num_blocks: usize,
    num_memberships: u64,
    arena: ArenaUse,
}

/// A shard that is being changed.
pub(crate) struct Change<'a> {
    shard: &'a Shard,
    writer: MutexGuard<'a, Writer>,
}

impl Table {
    fn new(num_slots: usize) -> Table {
        Table { slots: (0..num_slots).map(|_| Slot::default()).collect(), arena: Arena::default() }
    }

    fn home(&self, key: u64) -> usize {
        // The upper bits choose the shard.
        ((key as u32 as u64 * self.slots.len() as u64) >> 32) as usize
    }

    /// The slot of a key, or the free one where it would be.
    fn slot(&self, key: u64) -> (&Slot, bool) {
        let mut place = self.home(key);
        loop {
            let slot = &self.slots[place];
            match slot.key.load(Ordering::Acquire) {
                0 => return (slot, false),
                found if found == key => return (slot, true),
                // There is always a free one.
                _ => place = if place + 1 == self.slots.len() { 0 } else { place + 1 },
            }
        }
    }

    /// Names the holders of a block, in this table's arena.
    pub(crate) fn word(&self, key: u64) -> u64 {
        match self.slot(key) {
            (slot, true) => slot.word.load(Ordering::Acquire),
            (_, false) => 0,
        }
    }

    /// Reads the memory where a key is expected.
    pub(crate) fn peek(&self, key: u64) -> u64 {
        self.slots[self.home(key)].key.load(Ordering::Relaxed)
    }

    /// The word of a key, if `found` says that the key is where it is expected.
    pub(crate) fn peek_word(&self, key: u64, found: u64) -> u64 {
        if found == key { self.slots[self.home(key)].word.load(Ordering::Relaxed) } else { self.word(key) }
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    fn num_bytes(&self, arena: &ArenaUse) -> u64 {
        (self.slots.len() * size_of::<Slot>() + arena.num_words as usize * size_of::<u64>()) as u64
    }
}

impl Shard {
    pub(crate) fn new() -> Shard {
        let table = Arc::new(Table::new(SMALLEST));
        let (num_keys, num_blocks, num_memberships, arena) = (0, 0, 0, ArenaUse::default());
        let num_bytes = AtomicU64::new(table.num_bytes(&arena));
        Shard {
            table: ArcSwap::new(table.clone()),
            writer: Mutex::new(Writer { table, num_keys, num_blocks, num_memberships, arena }),
            num_memberships: AtomicU64::new(0),
            num_blocks: AtomicU64::new(0),
            num_bytes,
        }
    }

    /// The table as it is now.
    pub(crate) fn read(&self) -> arc_swap::Guard<Arc<Table>> {
        self.table.load()
    }

    pub(crate) fn num_memberships(&self) -> u64 {
        self.num_memberships.load(Ordering::Relaxed)
    }

    pub(crate) fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }

    pub(crate) fn num_bytes(&self) -> u64 {
        self.num_bytes.load(Ordering::Relaxed)
    }

    /// Waits for other writers.
    pub(crate) fn change(&self) -> Change<'_> {
        // A writer does nothing that panics between two changes that belong together.
        Change { shard: self, writer: self.writer.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

impl Change<'_> {
    /// Adds a holder. False: it is one already.
    pub(crate) fn add(&mut self, key: u64, id: u32) -> bool {
        let Writer { table, num_keys, num_blocks, num_memberships, arena } = &mut *self.writer;
        let (slot, is_known) = table.slot(key);
        let before = if is_known { slot.word.load(Ordering::Relaxed) } else { 0 };
        let Some(word) = table.arena.with(arena, before, id) else { return false };
        slot.word.store(word, Ordering::Release);
        if !is_known {
            slot.key.store(key, Ordering::Release);
            *num_keys += 1;
        }
        *num_blocks += usize::from(before == 0);
        *num_memberships += 1;
        if *num_keys * FULL.1 >= table.slots.len() * FULL.0 || is_wasteful(arena) {
            self.copy();
        }
        true
    }

    /// Removes a holder. False: it was none.
    pub(crate) fn remove(&mut self, key: u64, id: u32) -> bool {
        let Writer { table, num_blocks, num_memberships, arena, .. } = &mut *self.writer;
        let (slot, is_known) = table.slot(key);
        if !is_known {
            return false;
        }
        let before = slot.word.load(Ordering::Relaxed);
        let Some(word) = table.arena.without(arena, before, id) else { return false };
        slot.word.store(word, Ordering::Release);
        *num_blocks -= usize::from(word == 0);
        *num_memberships -= 1;
        if is_wasteful(arena) || *num_blocks * 16 + 1024 < table.slots.len() {
            self.copy();
        }
        true
    }

    /// Replaces the table by one without waste.
    fn copy(&mut self) {
        let writer = &mut *self.writer;
        let new = Table::new((writer.num_blocks * ROOM / 10).max(SMALLEST));
        let mut arena = ArenaUse::default();
        for slot in &writer.table.slots {
            let word = slot.word.load(Ordering::Relaxed);
            if word != 0 {
                let key = slot.key.load(Ordering::Relaxed);
                let (free, _) = new.slot(key);
                free.key.store(key, Ordering::Relaxed);
                free.word.store(writer.table.arena.copy(word, &new.arena, &mut arena), Ordering::Relaxed);
            }
        }
        writer.num_keys = writer.num_blocks;
        writer.arena = arena;
        writer.table = Arc::new(new);
        self.shard.table.store(writer.table.clone());
        self.shard.num_bytes.store(writer.table.num_bytes(&arena), Ordering::Relaxed);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let Writer { table, num_blocks, num_memberships, arena, .. } = &*self.writer;
        self.shard.num_memberships.store(*num_memberships, Ordering::Relaxed);
        self.shard.num_blocks.store(*num_blocks as u64, Ordering::Relaxed);
        self.shard.num_bytes.store(table.num_bytes(arena), Ordering::Relaxed);
    }
}

/// Half of the arena is not reachable.
fn is_wasteful(arena: &ArenaUse) -> bool {
    arena.num_garbage > arena.num_used / 2 + 256
}
