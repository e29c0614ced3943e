//! Slots in files of one directory. See [`files`] for their arrangement.
//!
//! A write clears the slot's head, writes the body, then the new head. A process that is killed leaves a slot with the old
//! record, without one, or with the new one. After a loss of power any part of a write may be missing, and in any order: then
//! the head's checksum does not fit, or the body's. A reader verifies both (invariant 4), so a record is used only if it is
//! whole.

pub(crate) mod files;
pub(crate) mod kept;
mod medium;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io, mem,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::SystemTime,
};

use baton_kv_cache::BlockHash;
use baton_kv_events::Keep;

pub(crate) use self::files::DirLock;
use self::{files::Files, kept::KeptFile};
pub use self::{files::StoreOpenError, medium::Medium};
use crate::{
    buffer::{PAGE, PageBuffer},
    record::{Head, HeadError, Record, RecordName, RecordShape},
    slots::{ReadError, Slots},
};

/// Threads that read at once. A disk serves several reads faster than one after the other, and those that verify a record do not
/// wait for it.
const NUM_READERS: usize = 16;
/// Heads that are read at once when the directory is opened, in bytes.
const SCAN_BYTES: usize = 1 << 20;

/// Records in files.
#[derive(Debug)]
pub struct DiskSlots<M = File> {
    shape: RecordShape,
    index: M,
    slabs: M,
    num_slots: u32,
    found: Vec<(u32, RecordName, Keep)>,
    num_damaged: usize,
    /// `None`: there is no later life.
    kept: Option<KeptFile>,
    /// Keeps the directory locked.
    _lock: Option<DirLock>,
}

impl DiskSlots {
    /// Opens a directory for at most `max_bytes`, and looks what it holds.
    ///
    /// # Errors
    /// When another process uses it, it holds KV of another format, or the file system refuses.
    pub(crate) fn open(dir: &Path, max_bytes: u64, shape: RecordShape) -> Result<DiskSlots, StoreOpenError> {
        let Files { index, slabs, kept, num_slots, lock } = Files::open(dir, max_bytes, &shape)?;
        let failed = |file| files::failed(&dir.join(file), "cannot read");
        let mut slots = DiskSlots::over(index, slabs, num_slots, shape).map_err(failed("index"))?;
        let kept = KeptFile(kept);
        let keeps = kept.read(num_slots, SystemTime::now()).map_err(failed("kept"))?;
        slots.found.iter_mut().for_each(|(slot, _, keep)| *keep = keeps[*slot as usize]);
        Ok(DiskSlots { _lock: Some(lock), kept: Some(kept), ..slots })
    }

    /// The file with the bodies, each in whole pages.
    pub(crate) fn slabs(&self) -> &File {
        &self.slabs
    }
}

impl<M: Medium> DiskSlots<M> {
    /// The slots of an index and of slabs of sufficient length.
    ///
    /// # Errors
    /// When the index cannot be read.
    pub(crate) fn over(index: M, slabs: M, num_slots: u32, shape: RecordShape) -> io::Result<DiskSlots<M>> {
        let (mut found, mut num_damaged) = (Vec::new(), 0);
        let head_bytes = shape.head_bytes();
        let num_at_once = (SCAN_BYTES / head_bytes).max(1);
        let mut heads = vec![0; num_at_once * head_bytes];
        for first in (0..num_slots).step_by(num_at_once) {
            let heads = &mut heads[..(num_slots - first).min(num_at_once as u32) as usize * head_bytes];
            index.read_at(heads, head_offset(first, &shape))?;
            for (slot, head) in (first..).zip(heads.chunks_exact(head_bytes)) {
                match shape.read_head(head) {
                    Ok(head) => found.push((slot, head.name, Keep::Normal)),
                    Err(HeadError::Empty) => {}
                    Err(HeadError::Damaged | HeadError::Foreign) => num_damaged += 1,
                }
            }
        }
        Ok(DiskSlots { shape, index, slabs, num_slots, found, num_damaged, kept: None, _lock: None })
    }

    /// Heads that were damaged when the directory was opened. Their slots count as empty.
    pub fn num_damaged(&self) -> usize {
        self.num_damaged
    }

    /// A slot's head, if it is whole.
    pub(crate) fn head(&self, slot: u32) -> io::Result<Option<Head>> {
        let mut head = vec![0; self.shape.head_bytes()];
        self.index.read_at(&mut head, head_offset(slot, &self.shape))?;
        Ok(self.shape.read_head(&head).ok())
    }

    fn read_one(&self, slot: u32, hash: BlockHash) -> Result<Arc<Record>, ReadError> {
        let head = self.head(slot)?.filter(|head| head.name.hash == hash).ok_or(ReadError::Damaged)?;
        let mut body = PageBuffer::new(self.shape.body.bytes);
        self.slabs.read_at(body.pages_mut(), self.body_offset(slot))?;
        // Invariant 4: the record is used only if it is whole.
        self.shape.verified(head, body).map(Arc::new).ok_or(ReadError::Damaged)
    }

    fn body_offset(&self, slot: u32) -> u64 {
        u64::from(slot) * self.shape.body_pages_bytes() as u64
    }
}

impl<M: Medium> Slots for DiskSlots<M> {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn is_memory(&self) -> bool {
        false
    }

    fn num_slots(&self) -> u32 {
        self.num_slots
    }

    fn record_bytes(&self) -> usize {
        self.shape.head_bytes() + self.shape.body_pages_bytes()
    }

    fn write(&self, slot: u32, record: &Arc<Record>) -> io::Result<()> {
        self.clear(slot)?;
        self.keep(slot, Keep::Normal)?;
        let bytes = self.shape.write(record);
        self.slabs.write_at(bytes.pages(), self.body_offset(slot))?;
        self.index.write_at(&bytes.head, head_offset(slot, &self.shape))
    }

    fn read(&self, wanted: &[(u32, BlockHash)]) -> Vec<Result<Arc<Record>, ReadError>> {
        let num_readers = NUM_READERS.min(wanted.len());
        if num_readers <= 1 {
            return wanted.iter().map(|&(slot, hash)| self.read_one(slot, hash)).collect();
        }
        let next = AtomicUsize::new(0);
        let read = || {
            let mut records = Vec::new();
            while let idx = next.fetch_add(1, Ordering::Relaxed)
                && let Some(&(slot, hash)) = wanted.get(idx)
            {
                records.push((idx, self.read_one(slot, hash)));
            }
            records
        };
        let mut records = thread::scope(|scope| {
            let readers: Vec<_> = (1..num_readers).map(|_| scope.spawn(read)).collect();
            let mut records = read();
            for reader in readers {
                records.extend(reader.join().expect("a reader does not panic"));
            }
            records
        });
        records.sort_unstable_by_key(|&(idx, _)| idx);
        records.into_iter().map(|(_, record)| record).collect()
    }

    fn keep(&self, slot: u32, keep: Keep) -> io::Result<()> {
        self.kept.as_ref().map_or(Ok(()), |kept| kept.write(slot, keep, SystemTime::now()))
    }

    fn clear(&self, slot: u32) -> io::Result<()> {
        self.index.write_at(&vec![0; self.shape.head_bytes()], head_offset(slot, &self.shape))
    }

    fn take_found(&mut self) -> Vec<(u32, RecordName, Keep)> {
        mem::take(&mut self.found)
    }
}

impl RecordShape {
    /// Bytes of a body in whole pages.
    pub(crate) fn body_pages_bytes(&self) -> usize {
        self.body.bytes.next_multiple_of(PAGE)
    }
}

fn head_offset(slot: u32, shape: &RecordShape) -> u64 {
    PAGE as u64 + u64::from(slot) * shape.head_bytes() as u64
}
