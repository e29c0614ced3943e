//! All runs, by number and by the blocks in them.
//!
//! One writer at a time changes them; readers never wait.

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

/// Runs of the first part; each further part has twice as many as the one before.
const FIRST_PART: u32 = 64;
const NUM_PARTS: usize = 25;
/// A few microseconds.
const NUM_SPINS: u32 = 100;

#[derive(Debug)]
pub(crate) struct Runs {
    parts: [OnceLock<Box<[ArcSwapOption<Run>]>>; NUM_PARTS],
    table: ArcSwap<Table>,
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

/// Runs that are being changed.
pub(crate) struct Change<'a> {
    shared: &'a Runs,
    writer: MutexGuard<'a, Writer>,
}

impl Runs {
    pub(crate) fn new() -> Runs {
        let table = Arc::new(Table::new(0));
        let (used, runs, free, hashes) = Default::default();
        let num_bytes = AtomicU64::new(table.num_bytes());
        Runs {
            parts: std::array::from_fn(|_| OnceLock::new()),
            table: ArcSwap::new(table.clone()),
            writer: Mutex::new(Writer {
                table,
                used,
                runs,
                free,
                serial: 0,
                num_memberships: 0,
                num_bytes: 0,
                hashes,
            }),
            num_blocks: AtomicU64::new(0),
            num_memberships: AtomicU64::new(0),
            num_bytes,
        }
    }

    /// The table as it is now.
    #[inline]
    pub(crate) fn table(&self) -> arc_swap::Guard<Arc<Table>> {
        self.table.load()
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
        self.num_blocks.load(Ordering::Relaxed)
    }

    pub(crate) fn num_memberships(&self) -> u64 {
        self.num_memberships.load(Ordering::Relaxed)
    }

    pub(crate) fn num_bytes(&self) -> u64 {
        self.num_bytes.load(Ordering::Relaxed)
    }

    /// Waits for other writers.
    pub(crate) fn change(&self) -> Change<'_> {
        // To sleep and to be woken takes longer than most changes.
        for turn in 0..NUM_SPINS {
            match self.writer.try_lock() {
                Ok(writer) => return Change { shared: self, writer },
                Err(TryLockError::Poisoned(_)) => break,
                Err(TryLockError::WouldBlock) => (0..=turn % 16).for_each(|_| std::hint::spin_loop()),
            }
        }
        // A writer does nothing that panics between two changes that belong together.
        Change { shared: self, writer: self.writer.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

#[inline]
fn part_of(run: u32) -> (usize, usize) {
    let shifted = run + FIRST_PART;
    let part = shifted.ilog2() - FIRST_PART.ilog2();
    (part as usize, (shifted - (FIRST_PART << part)) as usize)
}

impl Change<'_> {
    #[inline]
    pub(crate) fn run(&self, run: u32) -> &Run {
        self.writer.runs[run as usize].as_ref().expect("a node names a run that is there")
    }

    /// The first run and place of a block that `is_it` accepts.
    pub(crate) fn find<T>(&self, key: u64, mut is_it: impl FnMut(Spot, &Run) -> Option<T>) -> Option<T> {
        self.writer.table.find(key, |spot| {
            let run = self.run(spot.run());
            if run.key(spot.offset()) == key { is_it(spot, run) } else { None }
        })
    }

    /// The run that begins with a block, after a place.
    pub(crate) fn run_after(&self, after: Spot, key: u64) -> Option<u32> {
        self.find(key, |spot, run| (spot.offset() == 0 && run.after == after).then(|| spot.run()))
    }

    /// A run without members that begins after a place. `None`: there are too many.
    pub(crate) fn create(&mut self, after: Spot, keys: &[u64]) -> Option<u32> {
        let writer = &mut *self.writer;
        let run = match writer.free.pop() {
            Some(run) => run,
            None if writer.runs.len() >= MAX_RUNS => return None,
            None => {
                writer.runs.push(None);
                (writer.runs.len() - 1) as u32
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
        let part = self.shared.parts[part].get_or_init(|| {
            let size = (FIRST_PART as usize) << part;
            self.writer.num_bytes += (2 * size * size_of::<usize>()) as u64;
            (0..size).map(|_| ArcSwapOption::const_empty()).collect()
        });
        part[place].store(Some(new.clone()));
        if let Some(old) = self.writer.runs[run as usize].replace(new) {
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
        let new = runs[run as usize].as_ref().expect("it is there");
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
        for (number, run) in runs.iter().enumerate() {
            let Some(run) = run else { continue };
            touch(&new, hashes, run, 0);
            for (offset, &hash) in hashes.iter().enumerate() {
                new.add(used, hash, Spot::new(number as u32, offset));
            }
        }
        *table = Arc::new(new);
        self.shared.table.store(table.clone());
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
        let (part, place) = part_of(run);
        if let Some(part) = self.shared.parts[part].get() {
            part[place].store(None);
        }
        if let Some(old) = self.writer.runs[run as usize].take() {
            self.writer.num_bytes -= old.num_bytes();
        }
        self.writer.free.push(run);
        self.reserve(0);
    }

    /// Takes the blocks of a run from `from` on out of the table.
    fn cut(&mut self, run: u32, from: usize) {
        let Writer { table, used, runs, hashes, .. } = &mut *self.writer;
        let old = runs[run as usize].as_ref().expect("it is there");
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

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let Writer { table, used, num_memberships, num_bytes, .. } = &*self.writer;
        self.shared.num_memberships.store(*num_memberships, Ordering::Relaxed);
        self.shared.num_blocks.store(used.num_keys as u64, Ordering::Relaxed);
        self.shared.num_bytes.store(table.num_bytes() + num_bytes, Ordering::Relaxed);
    }
}
