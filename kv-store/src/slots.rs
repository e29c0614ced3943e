//! The seam of the stores: numbered slots, each with room for one record. A store moves bytes. It does not know which slot
//! is for which block, nor which record makes room for another.

use std::{fmt, io, ops::Range, sync::Arc};

use baton_kv_cache::BlockHash;
use baton_kv_events::Keep;
use baton_tier_policy::SlotChange;

use crate::record::{Record, RecordName};

/// The slots of one tier.
pub trait Slots: Send + Sync + fmt::Debug {
    /// The tier's name in metrics: "host", "disk".
    fn name(&self) -> &'static str;

    /// Whether a write only copies memory. Others are left to a thread that may wait.
    fn is_memory(&self) -> bool;

    /// Slots, numbered from 0.
    fn num_slots(&self) -> u32;

    /// Bytes that a record takes.
    fn record_bytes(&self) -> usize;

    /// Replaces what a slot holds. The caller is the only writer of this slot. After an error, and while this runs, the slot
    /// holds the old record, the new one, or none.
    ///
    /// # Errors
    /// When the device refuses.
    fn write(&self, slot: u32, record: &Arc<Record>) -> io::Result<()>;

    /// The record of each of `wanted`, in order: a slot, and the hash of the block that it should hold. What comes back is
    /// verified, unless the pool's device reads it itself: then that verifies it.
    fn read(&self, wanted: &[(u32, BlockHash)]) -> Vec<Result<Arc<Record>, ReadError>>;

    /// How the block of a slot is to be kept, until its record is replaced: for a later life of the store, if there is one. An
    /// error costs no more than that.
    ///
    /// # Errors
    /// When the device refuses.
    fn keep(&self, slot: u32, keep: Keep) -> io::Result<()>;

    /// Removes the record of a slot that was forgotten, also for a later life of the store. The caller is the only writer of this slot.
    /// Slots that processes share are [given up](Sharing::give_up) instead.
    ///
    /// # Errors
    /// When the device refuses: a later life may find the record.
    fn clear(&self, _slot: u32) -> io::Result<()> {
        Ok(())
    }

    /// What the slots held when the store was opened, each with its slot, and how it is to be kept. Told once.
    fn take_found(&mut self) -> Vec<(u32, RecordName, Keep)>;

    /// What other processes do with these slots, if they have them, too.
    fn shared(&self) -> Option<&dyn Sharing> {
        None
    }
}

/// Slots that several processes have. Each decides by itself what to write where, and follows the others.
pub trait Sharing {
    /// What other processes did to slots since the last call.
    fn changes(&self) -> Vec<(u32, SlotChange)>;

    /// Takes a slot to write it; false if another process changed it since [`changes`](Self::changes) was called.
    fn claim(&self, slot: u32) -> bool;

    /// Gives back a slot that was claimed and not written.
    fn release(&self, slot: u32);

    /// Gives up a slot that holds a block which was forgotten, or which another slot holds, too. Of two each process gives up one that sees
    /// both: else those that see one of them would find it longer than others.
    fn give_up(&self, slot: u32);

    /// This process used the blocks of these slots.
    fn note_used(&self, slots: &[u32]);

    /// How the block of a slot is to be kept, if other processes used it since this was last asked.
    fn used_by_others(&self, slot: u32) -> Option<Keep>;

    /// Whether other processes have written the slot since it had this record.
    fn has_replaced(&self, record: &Record) -> bool;

    /// Notes that this process uses the slots, and removes those of other formats and sizes that none has used for a while.
    fn tidy(&self);
}

/// Where a read of records that follow each other begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forwards,
    FromEnd,
}

impl Direction {
    /// What `get` has for these indices, up to the first one, in this direction, that it has nothing for. In the order of the
    /// indices.
    pub(crate) fn collect<T>(self, indices: Range<usize>, mut get: impl FnMut(usize) -> Option<T>) -> Vec<T> {
        match self {
            Direction::Forwards => indices.map_while(get).collect(),
            Direction::FromEnd => {
                let mut found: Vec<T> = indices.rev().map_while(&mut get).collect();
                found.reverse();
                found
            }
        }
    }
}

/// Why a slot's record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The slot holds no record, another one, or a damaged one.
    #[error("the slot does not hold the block undamaged")]
    Damaged,
    /// The device refuses.
    #[error("cannot read the slot")]
    Io(#[from] io::Error),
}
