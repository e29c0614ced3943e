//! All runs, by number and by the blocks in them.
//!
//! Runs are divided into shards by their first block. One writer at a time changes a shard, and locks no second one meanwhile;
//! readers never wait.
//!
//! That suffices: one thread at a time changes a member, and while the member holds blocks of a run, that run stays, and others
//! take away only what is behind those blocks. A run grows while it has a single member, so that no other one is at its end.

use std::{
    hint::black_box,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::{ArcSwap, ArcSwapOption};

use crate::{
    run::{Holding, MAX_RUN, MAX_RUNS, Run, Spot},
    table::{KeyHash, Table, TableUse},
};

const NUM_SHARDS: usize = 8;
/// Runs of the first part; each further part has twice as many as the one before.
const FIRST_PART: u32 = 64;
const NUM_PARTS: usize = 25;
/// A few microseconds.
const NUM_SPINS: u32 = 100;

#[derive(Debug)]
pub(crate) struct Runs {
    /// Shards take turns: the remainder of a run's number is its shard.
    parts: [OnceLock<Box<[ArcSwapOption<Run>]>>; NUM_PARTS],
    tables: ArcSwap<Tables>,
    shards: [Shard; NUM_SHARDS],
}

/// Of each shard.
pub(crate) type Tables = [Arc<Table>; NUM_SHARDS];

/// The runs that begin with certain blocks. It shares no line of the processor's cache with another shard.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    writer: Mutex<Writer>,
    /// For readers of statistics.
    num_blocks: AtomicU64,
    num_memberships: AtomicU64,
    num_bytes: AtomicU64,
}

#[derive(Debug)]
struct Writer {
    table: Arc<Table>,
    used: TableUse,
    runs: Vec<Option<Arc<Run>>>,
    /// Numbers without a run.
    free: Vec<u32>,
    serial: u64,
    num_memberships: u64,
    /// Of runs.
    num_bytes: u64,
    /// Reused.
    hashes: Vec<KeyHash>,
}

/// Runs that are being changed, one shard after the other.
pub(crate) struct Change<'a> {
    runs: &'a Runs,
    locked: Option<Locked<'a>>,
}

/// A shard that is being changed.
pub(crate) struct Locked<'a> {
    runs: &'a Runs,
    shard: usize,
    writer: MutexGuard<'a, Writer>,
}

impl Runs {
    pub(crate) fn new() -> Runs {
        let tables: Tables = std::array::from_fn(|_| Arc::new(Table::new(0)));
        Runs {
            parts: std::array::from_fn(|_| OnceLock::new()),
            shards: std::array::from_fn(|shard| Shard::new(tables[shard].clone())),
            tables: ArcSwap::from_pointee(tables),
        }
    }

    /// The tables as they are now.
    #[inline]
    pub(crate) fn tables(&self) -> arc_swap::Guard<Arc<Tables>> {
        self.tables.load()
    }

    /// A run, unless there is none of that number.
    #[inline]
    pub(crate) fn run(&self, run: u32) -> Option<arc_swap::Guard<Option<Arc<Run>>>> {
        Some(self.slot(run)?.load()).filter(|run| run.is_some())
    }

    #[inline]
    fn slot(&self, run: u32) -> Option<&ArcSwapOption<Run>> {
        let (part, place) = part_of(run);
        self.parts.get(part)?.get()?.get(place)
    }

    /// Blocks in runs.
    pub(crate) fn num_blocks(&self) -> u64 {
        self.sum(|shard| &shard.num_blocks)
    }

    pub(crate) fn num_memberships(&self) -> u64 {
        self.sum(|shard| &shard.num_memberships)
    }

    pub(crate) fn num_bytes(&self) -> u64 {
        self.sum(|shard| &shard.num_bytes)
    }

    fn sum(&self, num: impl Fn(&Shard) -> &AtomicU64) -> u64 {
        self.shards.iter().map(|shard| num(shard).load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn change(&self) -> Change<'_> {
        Change { runs: self, locked: None }
    }
}

impl Shard {
    fn new(table: Arc<Table>) -> Shard {
        let (used, runs, free, hashes) = Default::default();
        let num_bytes = AtomicU64::new(table.num_bytes());
        let writer = Writer { table, used, runs, free, serial: 0, num_memberships: 0, num_bytes: 0, hashes };
        Shard {
            writer: Mutex::new(writer),
            num_blocks: AtomicU64::new(0),
            num_memberships: AtomicU64::new(0),
            num_bytes,
        }
    }

    /// Waits for another writer.
    fn lock(&self) -> MutexGuard<'_, Writer> {
        // To sleep and to be woken takes longer than most changes.
        for turn in 0..NUM_SPINS {
            match self.writer.try_lock() {
                Ok(writer) => return writer,
                Err(TryLockError::Poisoned(_)) => break,
                Err(TryLockError::WouldBlock) => (0..=turn % 16).for_each(|_| std::hint::spin_loop()),
            }
        }
        // A writer does nothing that panics between two changes that belong together.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The shard of runs that begin with a block.
#[inline]
pub(crate) fn shard_of(hash: KeyHash) -> usize {
    hash.part(NUM_SHARDS)
}

#[inline]
fn part_of(run: u32) -> (usize, usize) {
    let shifted = run + FIRST_PART;
    let part = shifted.ilog2() - FIRST_PART.ilog2();
    (part as usize, (shifted - (FIRST_PART << part)) as usize)
}

impl<'a> Change<'a> {
    /// A run that there is, as readers see it.
    #[inline]
    pub(crate) fn read<T>(&self, run: u32, read: impl FnOnce(&Run) -> T) -> T {
        let found = self.runs.run(run);
        read(found.as_ref().and_then(|found| found.as_ref()).expect("a node names a run that is there"))
    }

    /// The first run and place of a block that `is_it` accepts, as readers see them.
    pub(crate) fn find<T>(&self, key: u64, is_it: impl Fn(Spot, &Run) -> Option<T>) -> Option<T> {
        let (tables, hash) = (self.runs.tables(), KeyHash::of(key));
        black_box(tables.iter().fold(0, |sum, table| sum ^ table.peek(hash)));
        tables.iter().find_map(|table| {
            table.find(hash, |spot| {
                let run = self.runs.run(spot.run())?;
                let run = run.as_ref()?;
                // What is found may be gone by now.
                if run.get(spot.offset()) == Some(key) { is_it(spot, run) } else { None }
            })
        })
    }

    /// The shard of a run.
    #[inline]
    pub(crate) fn of(&mut self, run: u32) -> &mut Locked<'a> {
        self.lock(run as usize % NUM_SHARDS)
    }

    /// The shard of runs that begin with a block.
    #[inline]
    pub(crate) fn beginning_with(&mut self, key: u64) -> &mut Locked<'a> {
        self.lock(shard_of(KeyHash::of(key)))
    }

    fn lock(&mut self, shard: usize) -> &mut Locked<'a> {
        // First the other one is unlocked.
        self.locked.take_if(|locked| locked.shard != shard);
        if cfg!(test) {
            // What others may do meanwhile is likely to happen.
            (0..30).for_each(|_| std::hint::spin_loop());
        }
        let runs = self.runs;
        self.locked.get_or_insert_with(|| Locked { runs, shard, writer: runs.shards[shard].lock() })
    }
}

impl Locked<'_> {
    #[inline]
    pub(crate) fn run(&self, run: u32) -> &Run {
        self.writer.runs[run as usize / NUM_SHARDS].as_ref().expect("a node names a run that is there")
    }

    /// The run that begins with a block, after a place.
    pub(crate) fn run_after(&self, after: Spot, key: u64) -> Option<u32> {
        self.writer.table.find(KeyHash::of(key), |spot| {
            let run = self.run(spot.run());
            (spot.offset() == 0 && run.key(0) == key && run.after == after).then(|| spot.run())
        })
    }

    /// A run without members that begins after a place. `None`: there are too many.
    pub(crate) fn create(&mut self, after: Spot, keys: &[u64]) -> Option<u32> {
        let writer = &mut *self.writer;
        let run = match writer.free.pop() {
            Some(run) => run,
            None if writer.runs.len() >= MAX_RUNS / NUM_SHARDS => return None,
            None => {
                writer.runs.push(None);
                ((writer.runs.len() - 1) * NUM_SHARDS + self.shard) as u32
            }
        };
        writer.serial += 1;
        let serial = writer.serial;
        // More is likely to follow.
        self.put(run, Run::new(serial, after, (keys.len() * 2).min(MAX_RUN)));
        self.fill(run, keys);
        Some(run)
    }

    fn put(&mut self, run: u32, new: Run) {
        let new = Arc::new(new);
        self.writer.num_bytes += new.num_bytes();
        let (part, place) = part_of(run);
        let part = self.runs.parts[part].get_or_init(|| {
            let size = (FIRST_PART as usize) << part;
            self.writer.num_bytes += (2 * size * size_of::<usize>()) as u64;
            (0..size).map(|_| ArcSwapOption::const_empty()).collect()
        });
        part[place].store(Some(new.clone()));
        if let Some(old) = self.writer.runs[run as usize / NUM_SHARDS].replace(new) {
            self.writer.num_bytes -= old.num_bytes();
        }
    }

    /// Makes a run longer, for a member that holds all of it and is alone. No reader looks for more than it holds.
    pub(crate) fn append(&mut self, run: u32, keys: &[u64]) {
        let (len, capacity) = (self.run(run).len(), self.run(run).capacity());
        if len + keys.len() > capacity {
            let capacity = ((len + keys.len()) * 2).min(MAX_RUN);
            let grown = self.run(run).grown(capacity);
            self.put(run, grown);
        }
        self.fill(run, keys);
    }

    fn fill(&mut self, run: u32, keys: &[u64]) {
        self.reserve(keys.len());
        let Writer { table, used, runs, hashes, .. } = &mut *self.writer;
        let new = runs[run as usize / NUM_SHARDS].as_ref().expect("it is there");
        let from = new.len();
        keys.iter().for_each(|&key| new.push(key));
        touch(table, hashes, new, from);
        for (offset, &hash) in (from..).zip(&*hashes) {
            table.add(used, hash, Spot::new(run, offset));
        }
    }

    fn reserve(&mut self, num_keys: usize) {
        let Writer { table, used, runs, hashes, .. } = &mut *self.writer;
        if !table.is_unfit(used, num_keys) {
            return;
        }
        let new = Table::new(used.num_keys + num_keys);
        *used = TableUse::default();
        for (idx, run) in runs.iter().enumerate() {
            let Some(run) = run else { continue };
            touch(&new, hashes, run, 0);
            for (offset, &hash) in hashes.iter().enumerate() {
                new.add(used, hash, Spot::new((idx * NUM_SHARDS + self.shard) as u32, offset));
            }
        }
        *table = Arc::new(new);
        let table = &*table;
        self.runs.tables.rcu(|tables| {
            let mut tables = Tables::clone(tables);
            tables[self.shard] = table.clone();
            tables
        });
    }

    /// A member holds the front of a run from now on. Where it is in the run.
    pub(crate) fn join(&mut self, run: u32, holding: Holding) -> u32 {
        self.writer.num_memberships += holding.num_blocks() as u64;
        let (place, num_bytes) = self.run(run).join(holding);
        self.writer.num_bytes += num_bytes;
        place
    }

    /// A member holds more of a run, or less, than `before`.
    pub(crate) fn update(&mut self, run: u32, hint: u32, holding: Holding, before: usize) -> u32 {
        let num = holding.num_blocks();
        self.writer.num_memberships = self.writer.num_memberships + num as u64 - before as u64;
        let changed = self.run(run);
        let place = changed.update(hint, holding);
        let limit = changed.len() / 2;
        if num <= limit && before > limit && limit > 8 {
            let longest = changed.longest();
            if longest <= limit {
                self.cut(run, longest);
                self.run(run).truncate(longest);
            }
        }
        place
    }

    /// A member that held `before` blocks of a run holds none from now on. A run without members is gone.
    pub(crate) fn leave(&mut self, run: u32, member: u32, hint: u32, before: usize) {
        self.writer.num_memberships -= before as u64;
        if self.run(run).mark().count() > 1 {
            let num_bytes = self.run(run).leave(member, hint);
            self.writer.num_bytes -= num_bytes;
            return;
        }
        self.cut(run, 0);
        if let Some(slot) = self.runs.slot(run) {
            slot.store(None);
        }
        if let Some(old) = self.writer.runs[run as usize / NUM_SHARDS].take() {
            self.writer.num_bytes -= old.num_bytes();
        }
        self.writer.free.push(run);
        self.reserve(0);
    }

    /// Takes the blocks of a run from `from` on out of the table.
    fn cut(&mut self, run: u32, from: usize) {
        let Writer { table, used, runs, hashes, .. } = &mut *self.writer;
        let old = runs[run as usize / NUM_SHARDS].as_ref().expect("it is there");
        touch(table, hashes, old, from);
        for (offset, &hash) in (from..).zip(&*hashes) {
            table.remove(used, hash, Spot::new(run, offset));
        }
    }
}

/// Hashes the blocks of a run from `from` on, and reads the memory where they are expected: the processor waits for all of it
/// at the same time.
fn touch(table: &Table, hashes: &mut Vec<KeyHash>, run: &Run, from: usize) {
    hashes.clear();
    hashes.extend(run.keys_from(from).map(KeyHash::of));
    black_box(hashes.iter().fold(0, |sum, &hash| sum ^ table.peek(hash)));
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let Writer { table, used, num_memberships, num_bytes, .. } = &*self.writer;
        let shard = &self.runs.shards[self.shard];
        shard.num_memberships.store(*num_memberships, Ordering::Relaxed);
        shard.num_blocks.store(used.num_keys as u64, Ordering::Relaxed);
        shard.num_bytes.store(table.num_bytes() + num_bytes, Ordering::Relaxed);
    }
}
