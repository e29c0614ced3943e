//! The block tables of sequences. They stay on the device, and a step uploads only what has changed since the steps
//! before. So the size of a table does not matter for a step, nor for the graphs that contain its address.
//!
//! ```text
//! slots 0 .. num_decoded          decoded sequences. Each keeps its slot from step to step
//! slots num_decoded .. num_slots  the other sequences of the step, in their order
//! ```
//!
//! This module knows what the device holds. It does not know the device.

use std::collections::HashMap;

use baton_cuda_kernels::blocks::ByteRun;
use baton_kv_cache::BlockId;

use crate::limits::{BatchLimits, padded};

/// An entry that no step has written.
const UNKNOWN: u32 = u32::MAX;

/// The tables as the device holds them, `[slots][max_blocks]`.
#[derive(Debug)]
pub struct BlockTables {
    /// Blocks of a table: enough for the longest sequence.
    pub max_blocks: usize,
    /// Blocks that a sequence can write in a step.
    max_written: usize,
    held: Vec<u32>,
    /// The slot of the sequence that last wrote its KV to a block. Only one sequence writes to a block, so this finds
    /// the sequence again.
    slots: HashMap<BlockId, usize>,
    /// The block under which each slot is found.
    found_by: Vec<Option<BlockId>>,
    changes: TableChanges,
}

/// Parts of tables to write: entry ranges of all tables, as bytes.
#[derive(Debug, Default)]
pub struct TableChanges {
    pub runs: Vec<ByteRun>,
    /// The new entries, run after run.
    pub entries: Vec<u32>,
}

/// A sequence of a step.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    /// The blocks that it uses so far.
    pub blocks: &'a [BlockId],
    /// The place in `blocks` of the step's first token.
    pub first_written: usize,
}

impl BlockTables {
    /// Tables for steps within `limits`.
    pub fn new(limits: &BatchLimits, block_size: usize) -> BlockTables {
        let (max_blocks, num_slots) = (limits.context_length.div_ceil(block_size), Self::num_slots(limits));
        BlockTables {
            max_blocks,
            max_written: limits.num_rows / block_size + 1,
            held: vec![UNKNOWN; num_slots * max_blocks],
            slots: HashMap::new(),
            found_by: vec![None; num_slots],
            changes: TableChanges::default(),
        }
    }

    /// Bytes on the device.
    pub fn size_bytes(&self) -> usize {
        self.held.len() * 4
    }

    /// The largest number of slots of a step. Padding adds fewer than 32 to any number of decoded sequences.
    pub fn num_slots(limits: &BatchLimits) -> usize {
        limits.num_sequences + 31
    }

    /// The slots of this many decoded sequences.
    pub fn num_decode_slots(num_decoded: usize) -> usize {
        if num_decoded == 0 { 0 } else { padded(num_decoded) }
    }

    /// Gives each sequence a slot and notes what changes in its table. The first `num_decoded` sequences are decoded.
    /// A sequence that was decoded in the step before keeps its slot, unless the step has fewer slots now.
    ///
    /// # Panics
    /// When a sequence is longer than the longest one, or there are too many.
    pub fn place(&mut self, sequences: &[Placed<'_>], num_decoded: usize) -> (Vec<usize>, &TableChanges) {
        let num_slots = Self::num_decode_slots(num_decoded);
        let mut is_taken = vec![false; num_slots];
        let keep = |sequence: &Placed<'_>| {
            let slot = self.slot_before(sequence)?;
            let is_free = slot < num_slots && !std::mem::replace(&mut is_taken[slot], true);
            is_free.then_some(slot)
        };
        let kept: Vec<Option<usize>> = sequences[..num_decoded].iter().map(keep).collect();
        let mut free = (0..num_slots).filter(|&slot| !is_taken[slot]);
        let decoded = kept.into_iter().map(|slot| slot.unwrap_or_else(|| free.next().expect("padded")));
        let slots: Vec<usize> = decoded.chain(num_slots..num_slots + sequences.len() - num_decoded).collect();
        self.changes.runs.clear();
        self.changes.entries.clear();
        for (sequence, &slot) in sequences.iter().zip(&slots) {
            self.hold(slot, sequence);
        }
        (slots, &self.changes)
    }

    /// The slot of the sequence in the last step that it was in.
    fn slot_before(&self, sequence: &Placed<'_>) -> Option<usize> {
        let written = &sequence.blocks[..=sequence.first_written];
        let recent = written.iter().rev().take(self.max_written + 1);
        recent.filter_map(|block| self.slots.get(block)).next().copied()
    }

    fn hold(&mut self, slot: usize, sequence: &Placed<'_>) {
        let found_by = sequence.blocks[sequence.first_written];
        if let Some(before) = self.found_by[slot].replace(found_by)
            && self.slots.get(&before) == Some(&slot)
        {
            self.slots.remove(&before);
        }
        self.slots.insert(found_by, slot);

        let first = slot * self.max_blocks;
        let table = &mut self.held[first..first + self.max_blocks][..sequence.blocks.len()];
        let differs = |(held, block): (&u32, &BlockId)| *held != block.0;
        let Some(begin) = table.iter().zip(sequence.blocks).position(differs) else { return };
        let end = 1 + table.iter().zip(sequence.blocks).rposition(differs).expect("one differs");
        table[begin..end].iter_mut().zip(&sequence.blocks[begin..end]).for_each(|(held, it)| *held = it.0);
        let TableChanges { runs, entries } = &mut self.changes;
        runs.push(ByteRun {
            from: 4 * entries.len() as u64,
            to: 4 * (first + begin) as u64,
            num_bytes: 4 * (end - begin) as u64,
        });
        entries.extend_from_slice(&table[begin..end]);
    }
}
