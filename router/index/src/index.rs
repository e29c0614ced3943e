//! The index that all sources share, and who its members are.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
};

use baton_kv_events::BlockKey;

use crate::{
    chain::Chains,
    members::{CHUNK, MAX_MEMBERS, Some44},
    shard::{Change, Shard, Table},
};

/// Which workers hold which blocks.
///
/// A worker is a *member* of the set of holders of each of its blocks. Members are numbered densely. The number of a worker
/// that is gone means no worker from that moment on; its memberships are swept away little by little by those who write, and
/// then the number may be given to another worker.
#[derive(Debug)]
pub struct KvIndex {
    shards: Box<[Shard]>,
    /// The upper bits of a key choose the shard.
    shard_shift: u32,
    /// Those that are there, in the chunks of sets.
    live: Box<[AtomicU64]>,
    /// Whose number each is, and above that, after how many joins it was given.
    owners: Box<[AtomicU64]>,
    /// Counts joins.
    now: AtomicU32,
    numbers: Mutex<Numbers>,
    num_retired: AtomicUsize,
    num_chain_bytes: AtomicU64,
}

/// Tables that a reader holds.
pub(crate) struct Tables<'a> {
    index: &'a KvIndex,
    tables: [Option<arc_swap::Guard<Arc<Table>>>; NUM_SHARDS],
}

#[derive(Debug, Default)]
struct Numbers {
    /// Never given so far: this and all above.
    unused: u32,
    free: Vec<u32>,
    /// Gone, with what is left of their memberships.
    retired: VecDeque<(u32, Chains)>,
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
    /// Blocks that any worker holds.
    pub num_blocks: u64,
    /// Pairs of a block and a worker that holds it, those included that are not swept away yet.
    pub num_memberships: u64,
    /// Memory of tables, sets and the chains of all workers.
    pub num_bytes: u64,
}

/// Parts that can be changed at the same time.
const NUM_SHARDS: usize = 8;
/// Blocks whose memory is read at the same time.
const GROUP: usize = 64;

/// Memberships that a departure or an arrival sweeps at once.
const SWEEP: usize = 4096;

impl KvIndex {
    /// For at most so many workers at a time; those that left and are not swept away yet count, and a worker counts twice
    /// while its cache is dumped.
    pub fn new(max_members: usize) -> KvIndex {
        KvIndex::with_shards(max_members, NUM_SHARDS)
    }

    /// With so many parts that can be changed at the same time: a power of two, and at most eight.
    ///
    /// # Panics
    /// When it is none.
    pub fn with_shards(max_members: usize, num_shards: usize) -> KvIndex {
        assert!(num_shards.is_power_of_two() && num_shards <= NUM_SHARDS, "1, 2, 4 or 8 shards");
        let max_members = max_members.clamp(1, MAX_MEMBERS as usize);
        KvIndex {
            shards: (0..num_shards).map(|_| Shard::new()).collect(),
            shard_shift: u64::BITS - num_shards.ilog2(),
            live: (0..max_members.div_ceil(CHUNK as usize)).map(|_| AtomicU64::new(0)).collect(),
            owners: (0..max_members).map(|_| AtomicU64::new(0)).collect(),
            now: AtomicU32::new(0),
            numbers: Mutex::default(),
            num_retired: AtomicUsize::new(0),
            num_chain_bytes: AtomicU64::new(0),
        }
    }

    /// What it holds.
    pub fn size(&self) -> IndexSize {
        let sum = |of: fn(&Shard) -> u64| self.shards.iter().map(of).sum();
        let own = self.live.len() * size_of::<AtomicU64>() + self.owners.len() * size_of::<AtomicU64>();
        IndexSize {
            num_blocks: sum(Shard::num_blocks),
            num_memberships: sum(Shard::num_memberships),
            num_bytes: sum(Shard::num_bytes) + own as u64 + self.num_chain_bytes.load(Ordering::Relaxed),
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
        let since = self.now.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        self.owners[id as usize].store(u64::from(since) << 32 | u64::from(owner), Ordering::Release);
        self.live[(id / CHUNK) as usize].fetch_or(1 << (id % CHUNK), Ordering::AcqRel);
        Ok(MemberId(id))
    }

    /// The number means no worker from now on. What its chains published is swept away later.
    pub(crate) fn retire(&self, id: MemberId, chains: Chains) {
        self.live[(id.0 / CHUNK) as usize].fetch_and(!(1 << (id.0 % CHUNK)), Ordering::AcqRel);
        let mut numbers = self.numbers();
        numbers.retired.push_back((id.0, chains));
        self.num_retired.fetch_add(1, Ordering::AcqRel);
    }

    /// Sweeps away at most so many memberships of workers that are gone.
    pub fn sweep(&self, max_memberships: usize) {
        let mut left = max_memberships;
        while left > 0 && !self.is_swept() {
            // Another thread sweeps the next one meanwhile.
            let Some((id, mut chains)) = self.numbers().retired.pop_front() else { return };
            let mut keys = Vec::new();
            let before = chains.num_bytes();
            let is_done = chains.tear_down(left.min(SWEEP), &mut keys);
            self.note_bytes(before, if is_done { 0 } else { chains.num_bytes() });
            left = left.saturating_sub(keys.len().max(1));
            self.remove(MemberId(id), &keys);
            let mut numbers = self.numbers();
            if is_done {
                numbers.free.push(id);
                self.num_retired.fetch_sub(1, Ordering::AcqRel);
            } else {
                numbers.retired.push_front((id, chains));
            }
        }
    }

    /// Whether no memberships are left of workers that are gone.
    pub fn is_swept(&self) -> bool {
        self.num_retired.load(Ordering::Acquire) == 0
    }

    /// A member holds these blocks, each after the one before it.
    pub(crate) fn add(&self, id: MemberId, keys: &[BlockKey]) {
        self.change(keys, |change, key| change.add(key, id.0));
    }

    /// A member does not hold these blocks any more. No block comes after one that it follows.
    pub(crate) fn remove(&self, id: MemberId, keys: &[BlockKey]) {
        self.change(keys, |change, key| change.remove(key, id.0));
    }

    fn change(&self, keys: &[BlockKey], mut one: impl FnMut(&mut Change<'_>, u64) -> bool) {
        for keys in keys.chunks(GROUP) {
            let mut group = [(0, 0_u64); GROUP];
            let group = &mut group[..keys.len()];
            for (place, &key) in group.iter_mut().zip(keys) {
                let key = spread(key);
                *place = (self.shard_idx(key), key);
            }
            if keys.len() > 4 {
                self.touch(group);
                group.sort_by_key(|&(shard, _)| shard);
            }
            for of_shard in group.chunk_by(|a, b| a.0 == b.0) {
                let mut change = self.shards[of_shard[0].0].change();
                for &(_, key) in of_shard {
                    one(&mut change, key);
                }
            }
        }
    }

    /// Reads what is about to be changed: the processor waits for all of it at the same time.
    fn touch(&self, group: &[(usize, u64)]) {
        let mut tables: [Option<arc_swap::Guard<Arc<Table>>>; NUM_SHARDS] = Default::default();
        let mut words = [0; GROUP];
        for (word, &(shard, key)) in words.iter_mut().zip(group) {
            let table = tables[shard % NUM_SHARDS].get_or_insert_with(|| self.shards[shard].read());
            *word = table.peek(key);
        }
        let mut sum = 0;
        for (&word, &(shard, key)) in words.iter().zip(group) {
            let Some(table) = &tables[shard % NUM_SHARDS] else { continue };
            sum ^= table.arena().peek(table.peek_word(key, word));
        }
        std::hint::black_box(sum);
    }

    /// The memory of a member's chains has changed.
    pub(crate) fn note_bytes(&self, before: usize, after: usize) {
        if after >= before {
            self.num_chain_bytes.fetch_add((after - before) as u64, Ordering::Relaxed);
        } else {
            self.num_chain_bytes.fetch_sub((before - after) as u64, Ordering::Relaxed);
        }
    }

    /// The tables as they are now, each from its first use on.
    pub(crate) fn read(&self) -> Tables<'_> {
        Tables { index: self, tables: Default::default() }
    }

    pub(crate) fn num_joins(&self) -> u32 {
        self.now.load(Ordering::Acquire)
    }

    /// Those of the members that are there.
    pub(crate) fn living(&self, some: Some44) -> u64 {
        self.live.get(some.chunk as usize).map_or(0, |live| live.load(Ordering::Acquire)) & some.mask
    }

    /// Whose number it is, unless it was given after that many joins.
    pub(crate) fn owner(&self, id: u32, num_joins: u32) -> Option<u32> {
        let entry = self.owners.get(id as usize)?.load(Ordering::Acquire);
        // The count may begin again at 0.
        let is_later = num_joins.wrapping_sub((entry >> 32) as u32) > u32::MAX / 2;
        (!is_later).then_some(entry as u32)
    }

    fn shard_idx(&self, key: u64) -> usize {
        // A shift by all bits is none: there is one shard then.
        key.checked_shr(self.shard_shift).unwrap_or(0) as usize
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables<'_> {
    /// The table that a block is in, and the block's key there.
    pub(crate) fn table(&mut self, key: BlockKey) -> (&Table, u64) {
        let key = spread(key);
        let shard = self.index.shard_idx(key);
        (self.tables[shard % NUM_SHARDS].get_or_insert_with(|| self.index.shards[shard].read()), key)
    }
}

/// Keys are hashes. This spreads those that are not, and leaves 0 for none (the finaliser of splitmix64; Steele, Lea, Flood
/// 2014).
fn spread(key: BlockKey) -> u64 {
    let mut z = key.0;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)).max(1)
}
