//! What the processes that share slots tell each other: words in memory that all of them have mapped.
//!
//! ```text
//! changes | zeros | changes of 64 slots each … | states … | uses … | how blocks are to be kept …
//! ```
//!
//! The state of a slot is the truth of it. It changes by compare-and-swap, so of two processes that want a slot one gets it, and
//! none waits for another, which may have been stopped or killed. The counts of changes only say where to look.

use std::{
    fs::File,
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use memmap2::{MmapOptions, MmapRaw};

/// Slots that share a count of changes.
const GROUP: usize = 64;
/// Words before the counts.
const HEADER: usize = 8;

/// What a slot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotUse {
    Free,
    /// The process of this number writes it.
    Writing(u16),
    Holds,
}

/// The state of a slot: what it is for, and in its upper bits how often it has changed. A new file has zeros, free slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotState(u64);

impl SlotState {
    const HOLDS: u64 = 1;
    const WRITING: u64 = 2;

    pub(super) fn slot_use(self) -> SlotUse {
        match self.0 & 3 {
            Self::HOLDS => SlotUse::Holds,
            Self::WRITING => SlotUse::Writing((self.0 >> 2) as u16),
            _ => SlotUse::Free,
        }
    }

    /// The state that follows.
    pub(super) fn then(self, slot_use: SlotUse) -> SlotState {
        let low = match slot_use {
            SlotUse::Free => 0,
            SlotUse::Writing(number) => Self::WRITING | u64::from(number) << 2,
            SlotUse::Holds => Self::HOLDS,
        };
        SlotState((self.0 >> 18).wrapping_add(1) << 18 | low)
    }
}

/// The words of all slots.
#[derive(Debug)]
pub(super) struct SlotWords {
    map: MmapRaw,
    num_slots: usize,
}

impl SlotWords {
    /// Bytes of the file for so many slots.
    pub(super) fn num_bytes(num_slots: u32) -> u64 {
        let num_slots = num_slots as usize;
        ((HEADER + num_slots.div_ceil(GROUP) + 3 * num_slots) * size_of::<u64>()) as u64
    }

    /// Of a file of [`num_bytes`](Self::num_bytes), which no process makes shorter while it is mapped.
    pub(super) fn map(file: &File, num_slots: u32) -> io::Result<SlotWords> {
        let len = SlotWords::num_bytes(num_slots) as usize;
        Ok(SlotWords { map: MmapOptions::new().len(len).map_raw(file)?, num_slots: num_slots as usize })
    }

    /// All changes.
    pub(super) fn changes(&self) -> &AtomicU64 {
        self.word(0)
    }

    pub(super) fn num_groups(&self) -> usize {
        self.num_slots.div_ceil(GROUP)
    }

    /// The slots of a group.
    pub(super) fn group(&self, group: usize) -> std::ops::Range<u32> {
        (group * GROUP) as u32..((group + 1) * GROUP).min(self.num_slots) as u32
    }

    /// Changes of the slots of a group.
    pub(super) fn group_changes(&self, group: usize) -> &AtomicU64 {
        self.word(HEADER + group)
    }

    pub(super) fn state(&self, slot: u32) -> SlotState {
        SlotState(self.of_slot(0, slot).load(Ordering::Acquire))
    }

    /// Changes the state of a slot, and says where to look; false if it is not `from` any more.
    pub(super) fn change(&self, slot: u32, from: SlotState, to: SlotState) -> bool {
        let state = self.of_slot(0, slot);
        let is_done = state.compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if is_done {
            self.group_changes(slot as usize / GROUP).fetch_add(1, Ordering::AcqRel);
            self.changes().fetch_add(1, Ordering::AcqRel);
        }
        is_done
    }

    /// As [`change`](Self::change), by a process that is stopped before it says where to look.
    #[cfg(test)]
    pub(super) fn change_untold(&self, slot: u32, to: SlotState) {
        self.of_slot(0, slot).store(to.0, Ordering::Release);
    }

    /// How often the block of a slot was used.
    pub(super) fn uses(&self, slot: u32) -> &AtomicU64 {
        self.of_slot(1, slot)
    }

    /// How the block of a slot is to be kept.
    pub(super) fn kept(&self, slot: u32) -> &AtomicU64 {
        self.of_slot(2, slot)
    }

    fn of_slot(&self, list: usize, slot: u32) -> &AtomicU64 {
        assert!((slot as usize) < self.num_slots, "slot {slot} of {}", self.num_slots);
        self.word(HEADER + self.num_groups() + list * self.num_slots + slot as usize)
    }

    fn word(&self, idx: usize) -> &AtomicU64 {
        let bytes = idx * size_of::<u64>();
        assert!(bytes < self.map.len());
        // SAFETY: the word is inside the mapping, which begins at a page, and lives as long as `self`. All processes use it as an
        // atomic word.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(bytes).cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_say_what_they_were_made_of_and_never_repeat() {
        let mut state = SlotState::default();
        assert_eq!(state.slot_use(), SlotUse::Free);
        let mut seen = vec![state];
        for slot_use in
            [SlotUse::Writing(0), SlotUse::Holds, SlotUse::Writing(u16::MAX), SlotUse::Free].repeat(3)
        {
            state = state.then(slot_use);
            assert_eq!(state.slot_use(), slot_use);
            assert!(!seen.contains(&state));
            seen.push(state);
        }
    }

    #[test]
    fn of_two_that_want_a_slot_one_gets_it() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(SlotWords::num_bytes(70)).expect("room");
        let (one, other) =
            (SlotWords::map(&file, 70).expect("mapped"), SlotWords::map(&file, 70).expect("mapped"));
        let free = one.state(69);
        assert!(one.change(69, free, free.then(SlotUse::Writing(1))));
        assert!(!other.change(69, free, free.then(SlotUse::Writing(2))));
        assert_eq!(other.state(69).slot_use(), SlotUse::Writing(1));
        let counts = [other.changes(), other.group_changes(0), other.group_changes(1)];
        assert_eq!(counts.map(|count| count.load(Ordering::Acquire)), [1, 0, 1]);
        assert_eq!((one.num_groups(), one.group(1)), (2, 64..70));
    }
}
