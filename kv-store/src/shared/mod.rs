//! Slots that all workers of a machine have: files in memory (`/dev/shm`), which outlive every worker.
//!
//! ```text
//! lock       locked by all that use the directory; by one alone while it is made or removed. Its time: when it was used
//! worker-N   locked by the worker that has the number N: what a dead one was writing is free
//! words      the state of each slot, see [`words`]
//! index, slabs   as on disk
//! ```
//!
//! No worker is the owner, and none waits for another. Each decides by its own [`Directory`](crate::Directory) which block makes room,
//! claims that slot and tells of it; the others learn of it before they next look ([`changes`](Sharing::changes)). What a reader
//! finds is verified as on disk (invariant 4): a record that was replaced meanwhile does not fit its head.
//!
//! A use by another worker does not change the order at once. A block that would make room, but was used by others since, is spared,
//! and counts as used now (the second chance of the clock algorithm, Corbató 1968).

mod files;
#[cfg(test)]
mod tests;
#[allow(unsafe_code)] // atomic words in a mapped file
mod words;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use baton_kv_cache::{BlockHash, BlockStorage, HostBlocks};
use baton_kv_events::Keep;
use baton_tier_policy::SlotChange;

pub(crate) use self::words::SlotState;
use self::{
    files::{Numbers, SharedFiles},
    words::{SlotUse, SlotWords},
};
use crate::{
    buffer::PAGE,
    disk::{DirLock, DiskSlots, StoreOpenError, files::failed, kept},
    record::{BodyShape, Record, RecordName, RecordShape},
    slots::{ReadError, Sharing, Slots},
};

/// Records in memory that processes share.
#[derive(Debug)]
pub(crate) struct SharedSlots {
    dir: PathBuf,
    slots: DiskSlots,
    body: BodyShape,
    /// The bodies, if the pool or its device reads them itself.
    reached: Option<Arc<HostBlocks>>,
    words: SlotWords,
    seen: Mutex<Seen>,
    /// This process among those that use the directory.
    number: u16,
    found: Vec<(u32, RecordName, Keep)>,
    num_damaged: usize,
    _number_lock: DirLock,
    lock: DirLock,
}

/// What this process has seen of the words.
#[derive(Debug)]
struct Seen {
    changes: u64,
    groups: Vec<u64>,
    states: Vec<SlotState>,
    uses: Vec<u64>,
}

impl SharedSlots {
    /// Opens the slots of this format and size below `base`, and makes them if no other process uses them. Removes those of other formats and
    /// sizes that no process has used for a while.
    ///
    /// # Errors
    /// When `base` is not in memory, or the file system refuses.
    pub(crate) fn open(
        base: &Path,
        max_bytes: u64,
        shape: RecordShape,
    ) -> Result<SharedSlots, StoreOpenError> {
        let body = shape.body;
        let SharedFiles { dir, index, slabs, words, num_slots, lock } =
            SharedFiles::open(base, max_bytes, &shape)?;
        let failed = |file| failed(&dir.join(file), "cannot read");
        let words = SlotWords::map(&words, num_slots).map_err(failed("words"))?;
        let numbers = Numbers(&dir);
        let (number, number_lock) = numbers.take()?;
        for slot in 0..num_slots {
            let state = words.state(slot);
            if let SlotUse::Writing(other) = state.slot_use()
                && (other == number || numbers.is_free(other))
            {
                words.change(slot, state, state.then(SlotUse::Free));
            }
        }
        // Before the heads are read: what changes meanwhile is seen again. All groups are looked at once more, for what is not found below
        // and what others are writing.
        let load = |word: &AtomicU64| word.load(Ordering::Acquire);
        let changes = load(words.changes()).wrapping_sub(1);
        let groups = 0..words.num_groups();
        let groups = groups.map(|group| load(words.group_changes(group)).wrapping_sub(1)).collect();
        let held: Vec<SlotState> = (0..num_slots).map(|slot| words.state(slot)).collect();
        let uses = (0..num_slots).map(|slot| load(words.uses(slot))).collect();
        let mut slots = DiskSlots::over(index, slabs, num_slots, shape).map_err(failed("index"))?;
        let now = SystemTime::now();
        let mut found = slots.take_found();
        let is_held = |slot: u32| held[slot as usize].slot_use() == SlotUse::Holds;
        found.retain(|&(slot, ..)| is_held(slot));
        found.iter_mut().for_each(|(slot, _, keep)| *keep = kept::keep(load(words.kept(*slot)), now));
        let mut states = vec![SlotState::default(); num_slots as usize];
        found.iter().for_each(|&(slot, ..)| states[slot as usize] = held[slot as usize]);
        let is_damaged = |&slot: &u32| {
            is_held(slot)
                && states[slot as usize] != held[slot as usize]
                && words.state(slot) == held[slot as usize]
        };
        let num_damaged = (0..num_slots).filter(is_damaged).count();
        let seen = Mutex::new(Seen { changes, groups, states, uses });
        Ok(SharedSlots {
            dir,
            slots,
            body,
            reached: None,
            words,
            seen,
            number,
            found,
            num_damaged,
            _number_lock: number_lock,
            lock,
        })
    }

    /// As [`open`](Self::open). `None` when slots of another format or size, which other workers use, leave no room. These workers may leave only
    /// when this one serves, so it does not wait for their room.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_beside_others(
        base: &Path,
        max_bytes: u64,
        shape: RecordShape,
    ) -> Result<Option<SharedSlots>, StoreOpenError> {
        match SharedSlots::open(base, max_bytes, shape) {
            Err(StoreOpenError::Full { dir, bytes }) if files::is_other_used(base, &dir) => {
                tracing::warn!(
                    dir = %base.display(),
                    bytes,
                    "no room for the host tier beside those of other formats or sizes that workers use: this worker serves without it; \
                     make the file system larger, or start this worker again when they have ended"
                );
                Ok(None)
            }
            opened => opened.map(Some),
        }
    }

    /// Has this pool, or its device, read the records itself. Returns whether it can.
    ///
    /// # Errors
    /// When the driver refuses.
    pub(crate) fn reach(&mut self, pool: &BlockStorage) -> io::Result<bool> {
        // Bodies are in whole pages, blocks one after the other.
        if self.body.bytes.is_multiple_of(PAGE) {
            self.reached = HostBlocks::in_file(pool, self.slots.slabs(), self.num_slots() as usize)?;
        }
        Ok(self.reached.is_some())
    }

    /// Slots that were said to hold a record when the directory was opened, and did not.
    pub(crate) fn num_damaged(&self) -> usize {
        self.num_damaged
    }

    fn keep_of(&self, slot: u32) -> Keep {
        kept::keep(self.words.kept(slot).load(Ordering::Acquire), SystemTime::now())
    }

    fn is_own(&self, slot_use: SlotUse) -> bool {
        slot_use == SlotUse::Writing(self.number)
    }

    /// Changes the state of a slot if nothing else did since this process saw it, and what it saw is such a one.
    fn change(&self, slot: u32, is_such: impl Fn(SlotUse) -> bool, slot_use: SlotUse) -> bool {
        let mut seen = self.seen();
        let seen = &mut seen.states[slot as usize];
        let then = seen.then(slot_use);
        let is_done = is_such(seen.slot_use()) && self.words.change(slot, *seen, then);
        if is_done {
            *seen = then;
        }
        is_done
    }

    /// No other code runs under the lock, so a poisoned one holds whole data.
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slots for SharedSlots {
    fn name(&self) -> &'static str {
        "host"
    }

    fn is_memory(&self) -> bool {
        true
    }

    fn num_slots(&self) -> u32 {
        self.slots.num_slots()
    }

    fn record_bytes(&self) -> usize {
        self.slots.record_bytes()
    }

    fn write(&self, slot: u32, record: &Arc<Record>) -> io::Result<()> {
        self.words.kept(slot).store(kept::word(Keep::Normal, SystemTime::now()), Ordering::Release);
        self.slots.write(slot, record)?;
        match self.change(slot, |before| self.is_own(before), SlotUse::Holds) {
            true => Ok(()),
            false => Err(io::Error::other("another process took the slot for one of a dead process")),
        }
    }

    fn read(&self, wanted: &[(u32, BlockHash)]) -> Vec<Result<Arc<Record>, ReadError>> {
        let Some(reached) = &self.reached else { return self.slots.read(wanted) };
        let to_verify = |&(slot, hash): &(u32, BlockHash)| {
            // Before the head: whatever is written later changes it.
            let state = self.words.state(slot);
            let head = self.slots.head(slot)?.filter(|head| head.name.hash == hash);
            let head = head.ok_or(ReadError::Damaged)?;
            Ok(Arc::new(Record::to_verify(head, self.body, reached.at(slot), state)))
        };
        wanted.iter().map(to_verify).collect()
    }

    fn keep(&self, slot: u32, keep: Keep) -> io::Result<()> {
        self.words.kept(slot).store(kept::word(keep, SystemTime::now()), Ordering::Release);
        self.note_used(&[slot]);
        Ok(())
    }

    fn take_found(&mut self) -> Vec<(u32, RecordName, Keep)> {
        std::mem::take(&mut self.found)
    }

    fn shared(&self) -> Option<&dyn Sharing> {
        Some(self)
    }
}

impl Sharing for SharedSlots {
    fn changes(&self) -> Vec<(u32, SlotChange)> {
        let mut seen = self.seen();
        let changes = self.words.changes().load(Ordering::Acquire);
        if changes == seen.changes {
            return Vec::new();
        }
        seen.changes = changes;
        let mut found = Vec::new();
        for group in 0..self.words.num_groups() {
            let changes = self.words.group_changes(group).load(Ordering::Acquire);
            if changes == seen.groups[group] {
                continue;
            }
            seen.groups[group] = changes;
            for slot in self.words.group(group) {
                let state = self.words.state(slot);
                if state == seen.states[slot as usize] {
                    continue;
                }
                seen.states[slot as usize] = state;
                let change = match state.slot_use() {
                    SlotUse::Free => SlotChange::Free,
                    SlotUse::Writing(_) => SlotChange::Taken,
                    SlotUse::Holds => {
                        seen.uses[slot as usize] = self.words.uses(slot).load(Ordering::Acquire);
                        let keep = self.keep_of(slot);
                        // If it does not fit, the slot has changed again, which is seen next time.
                        let head = self.slots.head(slot).ok().flatten();
                        let holds = |name: RecordName| SlotChange::Holds {
                            hash: name.hash,
                            before: name.block_before(),
                            keep,
                        };
                        head.map_or(SlotChange::Free, |head| holds(head.name))
                    }
                };
                found.push((slot, change));
            }
        }
        found
    }

    fn claim(&self, slot: u32) -> bool {
        self.change(slot, |before| !matches!(before, SlotUse::Writing(_)), SlotUse::Writing(self.number))
    }

    fn release(&self, slot: u32) {
        self.change(slot, |before| self.is_own(before), SlotUse::Free);
    }

    fn give_up(&self, slot: u32) {
        self.change(slot, |before| before == SlotUse::Holds, SlotUse::Free);
    }

    fn note_used(&self, slots: &[u32]) {
        let mut seen = self.seen();
        for &slot in slots {
            let before = self.words.uses(slot).fetch_add(1, Ordering::AcqRel);
            let seen = &mut seen.uses[slot as usize];
            if *seen == before {
                *seen = before + 1;
            }
        }
    }

    fn used_by_others(&self, slot: u32) -> Option<Keep> {
        let uses = self.words.uses(slot).load(Ordering::Acquire);
        let before = std::mem::replace(&mut self.seen().uses[slot as usize], uses);
        (before != uses).then(|| self.keep_of(slot))
    }

    fn has_replaced(&self, record: &Record) -> bool {
        record.shared_slot().is_some_and(|(slot, state)| self.words.state(slot) != state)
    }

    fn tidy(&self) {
        if let Some(base) = self.dir.parent() {
            files::tidy(base, &self.dir, &self.lock);
        }
    }
}
