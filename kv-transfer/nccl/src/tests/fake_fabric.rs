//! A fake of NCCL: communicators of two ranks in one process, with a thread for each pair that copies.
//!
//! It has the properties that make NCCL hard to use. Sends match receives only by their order. Joining and posting complete
//! later. A group whose other half is never posted never ends. A rank that aborts does not tell its peer. It also has the
//! property that the fence needs: after an abort, nothing is copied to or from the places of that rank.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use baton_kv_cache::BlockStorage;

use crate::fabric::{
    Fabric, FabricError, NcclCommunicator, NcclRank, Place, ReachableMemory, TransferDirection, UniqueId,
};

/// A fabric over memory that the process can address.
#[derive(Debug, Default)]
pub(crate) struct MemoryFabric {
    /// Aborts of its communicators fail.
    pub(crate) is_stuck: AtomicBool,
    /// Each rank joins without the other.
    pub(crate) joins_alone: bool,
}

/// Ranks find each other by the unique id.
static PAIRS: LazyLock<Mutex<HashMap<UniqueId, Arc<Pair>>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Pair {
    state: Mutex<PairState>,
    changed: Condvar,
}

#[derive(Default)]
struct PairState {
    ends: [End; 2],
    has_mismatch: bool,
}

#[derive(Default)]
struct End {
    has_joined: bool,
    is_aborted: bool,
    /// Posted places with their groups, by direction.
    posted: [VecDeque<(u64, Place)>; 2],
    /// For each group, oldest first: places that are not copied yet.
    groups: VecDeque<usize>,
    num_posted: u64,
    num_done: u64,
}

impl Pair {
    fn state(&self) -> MutexGuard<'_, PairState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Plays the device: copies each matching send and receive, until a rank aborts.
    fn run(&self) {
        let mut state = self.state();
        while !state.ends.iter().any(|end| end.is_aborted) && !state.has_mismatch {
            let has_moved = (0..2).any(|from| state.copy_one(from));
            if !has_moved {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl PairState {
    /// Copies the oldest place that `from` sends to the oldest that the other rank receives. Returns whether there was one.
    fn copy_one(&mut self, from: usize) -> bool {
        let to = 1 - from;
        let source = self.ends[from].posted[TransferDirection::Send as usize].front().copied();
        let target = self.ends[to].posted[TransferDirection::Receive as usize].front().copied();
        let (Some((sent, source)), Some((received, target))) = (source, target) else { return false };
        if source.len != target.len {
            self.has_mismatch = true;
            return false;
        }
        // SAFETY: each rank keeps posted memory until the group is done or it has aborted. An abort needs the lock that is
        // held here.
        unsafe {
            std::ptr::copy_nonoverlapping(source.address as *const u8, target.address as *mut u8, source.len);
        }
        self.ends[from].copied(TransferDirection::Send, sent);
        self.ends[to].copied(TransferDirection::Receive, received);
        true
    }
}

impl End {
    fn copied(&mut self, direction: TransferDirection, group: u64) {
        self.posted[direction as usize].pop_front();
        self.groups[(group - self.num_done) as usize] -= 1;
        while self.groups.front() == Some(&0) {
            self.groups.pop_front();
            self.num_done += 1;
        }
    }
}

impl Fabric for MemoryFabric {
    fn reach(&self, memory: &Arc<BlockStorage>) -> Result<ReachableMemory, FabricError> {
        Ok(ReachableMemory::new(memory, memory.address(), None))
    }

    fn unique_id(&self) -> Result<UniqueId, FabricError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut id = UniqueId([0; UniqueId::BYTES]);
        id.0[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(id)
    }

    fn join(&self, id: &UniqueId, rank: NcclRank) -> Result<Box<dyn NcclCommunicator>, FabricError> {
        let is_stuck = self.is_stuck.load(Ordering::SeqCst);
        if self.joins_alone {
            let pair = Arc::new(Pair::default());
            pair.state().ends.iter_mut().for_each(|end| end.has_joined = true);
            return Ok(Box::new(MemoryCommunicator { pair, rank, num_polls: 0, is_stuck }));
        }
        let mut pairs = PAIRS.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = Arc::clone(pairs.entry(*id).or_default());
        drop(pairs);
        let mut state = pair.state();
        if std::mem::replace(&mut state.ends[rank as usize].has_joined, true) {
            return Err(failed("join", "the rank has joined before"));
        }
        let is_whole = state.ends.iter().all(|end| end.has_joined);
        drop(state);
        if is_whole {
            PAIRS.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
            let pair = Arc::clone(&pair);
            thread::spawn(move || pair.run());
        }
        Ok(Box::new(MemoryCommunicator { pair, rank, num_polls: 0, is_stuck }))
    }
}

struct MemoryCommunicator {
    pair: Arc<Pair>,
    rank: NcclRank,
    /// Polls until the last operation takes effect.
    num_polls: usize,
    is_stuck: bool,
}

impl NcclCommunicator for MemoryCommunicator {
    fn is_ready(&mut self) -> Result<bool, FabricError> {
        if self.num_polls > 0 {
            self.num_polls -= 1;
            return Ok(false);
        }
        Ok(self.pair.state().ends.iter().all(|end| end.has_joined))
    }

    unsafe fn post(&mut self, direction: TransferDirection, places: &[Place]) -> Result<(), FabricError> {
        if !self.is_ready()? {
            return Err(failed("post", "in progress"));
        }
        let mut state = self.pair.state();
        let end = &mut state.ends[self.rank as usize];
        let group = end.num_posted;
        end.num_posted += 1;
        end.groups.push_back(places.len());
        end.posted[direction as usize].extend(places.iter().map(|&place| (group, place)));
        drop(state);
        self.pair.changed.notify_all();
        self.num_polls = 2;
        Ok(())
    }

    fn num_done(&mut self) -> Result<u64, FabricError> {
        let state = self.pair.state();
        match state.has_mismatch {
            true => Err(failed("group", "a send met a receive of another size")),
            false => Ok(state.ends[self.rank as usize].num_done),
        }
    }

    fn abort(&mut self) -> Result<(), FabricError> {
        if self.is_stuck {
            return Err(failed("abort", "stuck"));
        }
        self.pair.state().ends[self.rank as usize].is_aborted = true;
        self.pair.changed.notify_all();
        Ok(())
    }
}

impl Drop for MemoryCommunicator {
    fn drop(&mut self) {
        if !self.is_stuck {
            let _ = self.abort();
        }
    }
}

fn failed(call: &'static str, why: &str) -> FabricError {
    FabricError::Failed { call, why: why.to_owned() }
}
