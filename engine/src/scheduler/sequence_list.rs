//! Sequences in the order of their ids, which is the order of their arrival.

use std::{
    collections::VecDeque,
    ops::{Index, IndexMut},
};

use crate::sequence::{Sequence, SequenceId};

/// Sequences, oldest first.
#[derive(Debug, Default)]
pub(super) struct SequenceList(VecDeque<Sequence>);

impl SequenceList {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.0.iter_mut()
    }

    pub(super) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.idx(id).map(|idx| &self.0[idx])
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.idx(id).map(|idx| &mut self.0[idx])
    }

    /// Index of the youngest sequence for which `is_wanted` holds.
    pub(super) fn youngest(&self, is_wanted: impl Fn(&Sequence) -> bool) -> Option<usize> {
        self.0.iter().rposition(is_wanted)
    }

    pub(super) fn insert(&mut self, sequence: Sequence) {
        let idx = self.0.partition_point(|other| other.id < sequence.id);
        self.0.insert(idx, sequence);
    }

    pub(super) fn remove(&mut self, idx: usize) -> Sequence {
        self.0.remove(idx).expect("the index is below the length")
    }

    /// Removes the sequence of this id, if it is here.
    pub(super) fn take(&mut self, id: SequenceId) -> Option<Sequence> {
        self.idx(id).map(|idx| self.remove(idx))
    }

    fn idx(&self, id: SequenceId) -> Option<usize> {
        self.0.binary_search_by_key(&id, |sequence| sequence.id).ok()
    }
}

impl Index<usize> for SequenceList {
    type Output = Sequence;

    fn index(&self, idx: usize) -> &Sequence {
        &self.0[idx]
    }
}

impl IndexMut<usize> for SequenceList {
    fn index_mut(&mut self, idx: usize) -> &mut Sequence {
        &mut self.0[idx]
    }
}
