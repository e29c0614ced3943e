//! The index that all sources share, and who its members are.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
};

use crate::{held::Held, run::MAX_MEMBERS, runs::Runs};

/// Which workers hold which blocks.
///
/// A worker is a *member* of the runs of blocks that it holds. Members are numbered densely. The number of a worker
/// that is gone means no worker from that moment on; its memberships are swept away little by little by those who write, and
/// then the number may be given to another worker.
#[derive(Debug)]
pub struct KvIndex {
    runs: Runs,
    /// Whose number each is, and above that, after how many joins it was given; 0: it means no worker.
    owners: Box<[AtomicU64]>,
    /// Counts joins.
    now: AtomicU32,
    numbers: Mutex<Numbers>,
    num_retired: AtomicUsize,
    num_held_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Numbers {
    /// Never given so far: this and all above.
    unused: u32,
    free: Vec<u32>,
    /// Gone, with what is left of their memberships.
    retired: VecDeque<(u32, Held)>,
}

/// A member's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberId(pub(crate) u32);

/// So many workers are there, or were a moment ago, that there is no number left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the index has no room for more than {max} workers")]
pub struct IndexFull {
    /// Numbers that there are.
    pub max: usize,
}

/// What an index holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexSize {
    /// Blocks that any worker holds, and up to as many that none does any more.
    pub num_blocks: u64,
    /// Pairs of a block and a worker that holds it, those included that are not swept away yet.
    pub num_memberships: u64,
    /// Memory of runs, their table, and what is noted of each worker.
    pub num_bytes: u64,
}

/// Memberships that a departure or an arrival sweeps at once.
const SWEEP: usize = 4096;

impl KvIndex {
    /// For at most so many workers at a time; those that left and are not swept away yet count, and a worker counts twice
    /// while its cache is dumped.
    pub fn new(max_members: usize) -> KvIndex {
        let max_members = max_members.clamp(1, MAX_MEMBERS as usize);
        KvIndex {
            runs: Runs::new(),
            owners: (0..max_members).map(|_| AtomicU64::new(0)).collect(),
            now: AtomicU32::new(0),
            numbers: Mutex::default(),
            num_retired: AtomicUsize::new(0),
            num_held_bytes: AtomicU64::new(0),
        }
    }

    /// What it holds.
    pub fn size(&self) -> IndexSize {
        let own = self.owners.len() * size_of::<AtomicU64>();
        IndexSize {
            num_blocks: self.runs.num_blocks(),
            num_memberships: self.runs.num_memberships(),
            num_bytes: self.runs.num_bytes() + own as u64 + self.num_held_bytes.load(Ordering::Relaxed),
        }
    }

    /// Gives a number to `owner`.
    pub(crate) fn join(&self, owner: u32) -> Result<MemberId, IndexFull> {
        self.sweep(SWEEP);
        let mut numbers = self.numbers();
        let max = self.owners.len();
        let id = match numbers.free.pop() {
            Some(id) => id,
            None if (numbers.unused as usize) < max => {
                numbers.unused += 1;
                numbers.unused - 1
            }
            None => {
                drop(numbers);
                // All numbers belong to workers that are there, or are about to be free.
                self.sweep(usize::MAX);
                self.numbers().free.pop().ok_or(IndexFull { max })?
            }
        };
        // Never 0, also when the count begins again.
        let since = self.now.fetch_add(1, Ordering::AcqRel).wrapping_add(1).max(1);
        self.owners[id as usize].store(u64::from(since) << 32 | u64::from(owner), Ordering::Release);
        Ok(MemberId(id))
    }

    /// The number means no worker from now on. What it held is swept away later.
    pub(crate) fn retire(&self, id: MemberId, held: Held) {
        self.owners[id.0 as usize].store(0, Ordering::Release);
        let mut numbers = self.numbers();
        numbers.retired.push_back((id.0, held));
        self.num_retired.fetch_add(1, Ordering::AcqRel);
    }

    /// Sweeps away at most so many memberships of workers that are gone.
    pub fn sweep(&self, max_memberships: usize) {
        let mut left = max_memberships;
        while left > 0 && !self.is_swept() {
            // Another thread sweeps the next one meanwhile.
            let Some((id, mut held)) = self.numbers().retired.pop_front() else { return };
            let before = held.num_bytes();
            let (num, is_done) = held.tear_down(&mut self.runs.change(), id, left.min(SWEEP));
            self.note_bytes(before, held.num_bytes());
            left = left.saturating_sub(num.max(1));
            let mut numbers = self.numbers();
            if is_done {
                numbers.free.push(id);
                self.num_retired.fetch_sub(1, Ordering::AcqRel);
            } else {
                numbers.retired.push_front((id, held));
            }
        }
    }

    /// Whether no memberships are left of workers that are gone.
    pub fn is_swept(&self) -> bool {
        self.num_retired.load(Ordering::Acquire) == 0
    }

    /// The memory of what is noted of a member has changed.
    pub(crate) fn note_bytes(&self, before: usize, after: usize) {
        if after >= before {
            self.num_held_bytes.fetch_add((after - before) as u64, Ordering::Relaxed);
        } else {
            self.num_held_bytes.fetch_sub((before - after) as u64, Ordering::Relaxed);
        }
    }

    pub(crate) fn max_members(&self) -> usize {
        self.owners.len()
    }

    pub(crate) fn runs(&self) -> &Runs {
        &self.runs
    }

    pub(crate) fn num_joins(&self) -> u32 {
        self.now.load(Ordering::Acquire)
    }

    /// Whose number it is, unless it means no worker or was given after that many joins.
    #[inline]
    pub(crate) fn owner(&self, id: u32, num_joins: u32) -> Option<u32> {
        let entry = self.owners.get(id as usize)?.load(Ordering::Acquire);
        // The count may begin again.
        let is_later = num_joins.wrapping_sub((entry >> 32) as u32) > u32::MAX / 2;
        (entry != 0 && !is_later).then_some(entry as u32)
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
