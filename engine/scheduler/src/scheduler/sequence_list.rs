//! Sequences in the order of their ids: of priority, then of arrival.

use std::{
    cell::Cell,
    collections::VecDeque,
    ops::{Index, IndexMut},
};

use crate::sequence::{Sequence, SequenceId};

/// Sequences, oldest first.
#[derive(Debug, Default)]
pub(super) struct SequenceList {
    sequences: VecDeque<Sequence>,
    /// Where the newest look-up ended. A step looks for sequences in their order: most are there, or next to it.
    newest_idx: Cell<usize>,
}

impl SequenceList {
    pub(super) fn len(&self) -> usize {
        self.sequences.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.sequences.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.sequences.iter_mut()
    }

    pub(super) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.idx(id).map(|idx| &self.sequences[idx])
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.idx(id).map(|idx| &mut self.sequences[idx])
    }

    /// Index of the youngest sequence for which `is_wanted` holds.
    pub(super) fn youngest(&self, is_wanted: impl Fn(&Sequence) -> bool) -> Option<usize> {
        self.sequences.iter().rposition(is_wanted)
    }

    pub(super) fn insert(&mut self, sequence: Sequence) {
        let idx = self.sequences.partition_point(|other| other.id < sequence.id);
        self.sequences.insert(idx, sequence);
    }

    pub(super) fn remove(&mut self, idx: usize) -> Sequence {
        self.sequences.remove(idx).expect("the index is below the length")
    }

    /// Removes the sequence of this id, if it is here.
    pub(super) fn take(&mut self, id: SequenceId) -> Option<Sequence> {
        self.idx(id).map(|idx| self.remove(idx))
    }

    fn idx(&self, id: SequenceId) -> Option<usize> {
        let newest_idx = self.newest_idx.get();
        let is_at = |idx: &usize| self.sequences.get(*idx).is_some_and(|sequence| sequence.id == id);
        let near = [newest_idx, newest_idx + 1].into_iter().find(is_at);
        let found = near.or_else(|| self.sequences.binary_search_by_key(&id, |sequence| sequence.id).ok())?;
        self.newest_idx.set(found);
        Some(found)
    }
}

impl Index<usize> for SequenceList {
    type Output = Sequence;

    fn index(&self, idx: usize) -> &Sequence {
        &self.sequences[idx]
    }
}

impl IndexMut<usize> for SequenceList {
    fn index_mut(&mut self, idx: usize) -> &mut Sequence {
        &mut self.sequences[idx]
    }
}
