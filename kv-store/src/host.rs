//! Slots in this process's memory.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_kv_cache::BlockHash;
use baton_kv_events::Keep;

use crate::{
    record::{Record, RecordName},
    slots::{ReadError, Slots},
};

/// Records in memory. They are shared with readers, so a record that made room stays in memory until its last reader is done.
#[derive(Debug)]
pub struct HostSlots {
    record_bytes: usize,
    records: Mutex<Vec<Option<Arc<Record>>>>,
}

impl HostSlots {
    /// As many slots as fit into `max_bytes` with records of `record_bytes`; at least one.
    pub fn new(max_bytes: u64, record_bytes: usize) -> HostSlots {
        let num_slots = (max_bytes / record_bytes as u64).clamp(1, u64::from(u32::MAX - 1));
        HostSlots { record_bytes, records: Mutex::new(vec![None; num_slots as usize]) }
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<Record>>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slots for HostSlots {
    fn name(&self) -> &'static str {
        "host"
    }

    fn is_memory(&self) -> bool {
        true
    }

    fn num_slots(&self) -> u32 {
        self.lock().len() as u32
    }

    fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    fn write(&self, slot: u32, record: &Arc<Record>) -> io::Result<()> {
        let old = self.lock()[slot as usize].replace(record.clone());
        // Its memory returns to the system outside the lock.
        drop(old);
        Ok(())
    }

    fn read(&self, wanted: &[(u32, BlockHash)]) -> Vec<Result<Arc<Record>, ReadError>> {
        let records: Vec<_> = {
            let held = self.lock();
            wanted.iter().map(|&(slot, _)| held[slot as usize].clone()).collect()
        };
        let verified = |(record, &(_, hash)): (Option<Arc<Record>>, &(u32, BlockHash))| {
            // What the pool's device reads itself it verifies then.
            let is_whole = |record: &Arc<Record>| record.as_reached().is_some() || record.is_whole();
            record.filter(|record| record.name.hash == hash && is_whole(record)).ok_or(ReadError::Damaged)
        };
        records.into_iter().zip(wanted).map(verified).collect()
    }

    fn keep(&self, _: u32, _: Keep) -> io::Result<()> {
        Ok(())
    }

    fn clear(&self, slot: u32) -> io::Result<()> {
        let old = self.lock()[slot as usize].take();
        drop(old); // as in `write`
        Ok(())
    }

    fn take_found(&mut self) -> Vec<(u32, RecordName, Keep)> {
        Vec::new()
    }
}
