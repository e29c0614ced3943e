//! Saves: blocks of a sequence are copied out of the pool, into memory at once and into queues for a disk and an object store. What a
//! queue has no room for is a [`SaveRest`]. The caller comes back with its blocks when there is [room](KvStore::room), so none is kept
//! meanwhile, and no memory taken.

use std::{
    slice,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, TrySendError},
    },
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockHash, HostBlocks};
use baton_kv_events::Keep;
use baton_tier_policy::{SlotChange, SlotPlace};
use tokio::{sync::oneshot, time::sleep};

use crate::{
    copy,
    counts::{Count, is_logged},
    record::{Record, RecordName},
    save_queue::{Save, SaveRest, SequenceBlocks, ToCopy, ToWrite, Write},
    slots::Sharing,
    store::{KvStore, Shared},
};

/// How late a worker learns of what others did to slots that it shares, at most.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);
/// How often a worker notes that it uses a shared host tier, and looks for others that none uses.
const TIDY_EVERY: Duration = Duration::from_secs(30);
/// How often a rest looks whether readers have given room back.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Blocks that were used by others are spared at most so often for one record, and so many slots are tried that others take first.
const MAX_SPARED: usize = 1024;
const MAX_CLAIMS: usize = 16;

impl KvStore {
    /// Tiers to which blocks are saved.
    pub fn num_targets(&self) -> usize {
        self.shared.tiers.len() + usize::from(self.shared.object.is_some())
    }

    /// Copies a sequence's blocks to the tiers that lack them, in the background. What is received when this is done, and the guard
    /// dropped: what tiers had no room for. An error is received when too many sequences wait already: these are not copied.
    pub fn save(&self, sequence: SequenceBlocks<impl Send + 'static>) -> oneshot::Receiver<Vec<SaveRest>> {
        let num_tiers = self.shared.tiers.len();
        let targets = 0..if sequence.has_ended { self.num_targets() } else { num_tiers };
        let rest = |target| SaveRest { target, first: 0, end: sequence.blocks.len() };
        let wanted = targets.map(rest).collect();
        self.copy_soon(sequence, wanted)
    }

    /// Goes on to [save](Self::save) the sequence to which this rest belongs. Blocks that are in the pool no more count as dropped.
    pub fn save_rest(
        &self,
        sequence: SequenceBlocks<impl Send + 'static>,
        rest: SaveRest,
    ) -> oneshot::Receiver<Vec<SaveRest>> {
        self.copy_soon(sequence, vec![rest])
    }

    fn copy_soon(
        &self,
        sequence: SequenceBlocks<impl Send + 'static>,
        wanted: Vec<SaveRest>,
    ) -> oneshot::Receiver<Vec<SaveRest>> {
        let SequenceBlocks { root, hashes, keeps, tokens, blocks, has_ended, guard } = sequence;
        let guard = Box::new(guard) as Box<dyn Send>;
        let sequence = SequenceBlocks { root, hashes, keeps, tokens, blocks, has_ended, guard };
        let (rests, receiver) = oneshot::channel();
        let saves = self.saves.as_ref().expect("the store is open");
        let sent = saves.try_send(ToCopy::Save(Save { sequence, wanted, rests }));
        if let Err(TrySendError::Full(ToCopy::Save(save)) | TrySendError::Disconnected(ToCopy::Save(save))) =
            sent
        {
            save.wanted.into_iter().for_each(|rest| self.give_up(rest));
        }
        receiver
    }

    /// Waits until the tier of a rest has room for a good part of a queue, and the pool's device for a record.
    pub async fn room(&self, rest: &SaveRest) {
        let shared = &*self.shared;
        match &shared.object {
            Some(object) if rest.target == shared.tiers.len() => object.room().await,
            // With the other half the disk is busy until the blocks are there.
            _ => drop(shared.queue.acquire_many(shared.num_queued.div_ceil(2) as u32).await),
        }
        while shared.room.as_ref().is_some_and(|room| room.num_free() == 0) {
            sleep(LOOK_EVERY).await;
        }
    }

    /// A rest is not saved after all. It counts as dropped.
    pub fn give_up(&self, rest: SaveRest) {
        self.shared.give_up(&rest, rest.first);
    }
}

impl Shared {
    pub(crate) fn copy_all(&self, saves: &Receiver<ToCopy>, writes: &Sender<ToWrite>) {
        let is_shared = self.sharing().next().is_some();
        let mut tidied = Instant::now();
        loop {
            // What other workers do to shared slots is told also while nothing else happens.
            let next = match is_shared {
                true => saves.recv_timeout(FOLLOW_EVERY),
                false => saves.recv().map_err(RecvTimeoutError::from),
            };
            match next {
                Ok(ToCopy::Save(Save { sequence, mut wanted, rests })) => {
                    self.copy(&sequence, &mut wanted, writes);
                    self.used(&sequence.hashes, &sequence.keeps);
                    drop(sequence);
                    wanted.retain(|rest| rest.first < rest.end);
                    // The caller may not come back.
                    let _ = rests.send(wanted);
                }
                Ok(ToCopy::Forget(forget)) => self.forget_copied(forget, writes),
                Err(RecvTimeoutError::Timeout) => {
                    drop(self.lock());
                    if tidied.elapsed() > TIDY_EVERY {
                        self.sharing().for_each(|(_, slots)| slots.tidy());
                        tidied = Instant::now();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Copies what tiers lack of the wanted blocks, in the order of the sequence. What is left is wanted still: a tier that cannot take
    /// a block gets none of the later ones, which are useless without it. Memory does not wait: what it cannot take is dropped.
    fn copy(
        &self,
        sequence: &SequenceBlocks<Box<dyn Send>>,
        wanted: &mut [SaveRest],
        writes: &Sender<ToWrite>,
    ) {
        let block_size = self.storage.layout().block_size;
        let num_blocks = sequence.blocks.len();
        for rest in wanted.iter_mut() {
            let end = rest.end.min(num_blocks);
            self.give_up(rest, end.max(rest.first));
            rest.end = end;
        }
        let mut takes = vec![true; wanted.len()];
        let first = wanted.iter().map(|rest| rest.first).min().unwrap_or(0);
        for block_idx in first..num_blocks {
            let (hash, keep) = (sequence.hashes[block_idx], sequence.keeps[block_idx]);
            let lacking: Vec<usize> = {
                let directory = self.lock();
                let lacks = |target: usize| match &self.object {
                    Some(object) if target == self.tiers.len() => object.admit(hash, keep),
                    _ => directory.lacks(target, hash, keep),
                };
                let is_next = |rest: &SaveRest| (rest.first..rest.end).contains(&block_idx);
                let next = |&nth: &usize| takes[nth] && is_next(&wanted[nth]) && lacks(wanted[nth].target);
                (0..wanted.len()).filter(next).collect()
            };
            if !lacking.is_empty() {
                let parent = block_idx.checked_sub(1).map_or(sequence.root, |before| sequence.hashes[before]);
                let tokens = sequence.tokens[block_idx * block_size..][..block_size].to_vec();
                debug_assert_eq!(parent.child(&tokens), hash, "the tokens are those of the hash");
                let block_idx = block_idx as u32;
                let name = RecordName { root: sequence.root, hash, parent, block_idx, tokens };
                let block = sequence.blocks[block_idx as usize];
                let record = match self.room.as_ref().map(HostBlocks::take) {
                    // Readers keep the room of records that are in no slot any more.
                    Some(None) => None,
                    room => match copy::from_pool(&self.storage, block, name, room.flatten()) {
                        Ok(record) => Some(Arc::new(record)),
                        Err(error) => {
                            tracing::warn!(%error, "kv not saved: the pool's device fails");
                            self.not_written(hash, wanted, &lacking);
                            return self.end_all(wanted);
                        }
                    },
                };
                if record.is_none() {
                    self.not_written(hash, wanted, &lacking);
                }
                for nth in lacking {
                    let rest = &mut wanted[nth];
                    let taken = record.as_ref().map(|record| self.take(rest.target, keep, record, writes));
                    if taken.is_none() && self.is_memory(rest.target) {
                        self.end_all(slice::from_mut(rest));
                    }
                    takes[nth] = taken.unwrap_or(false);
                }
            }
            for (rest, takes) in wanted.iter_mut().zip(&takes) {
                if *takes && rest.first <= block_idx {
                    rest.first = (block_idx + 1).min(rest.end);
                }
            }
        }
    }

    fn is_memory(&self, target: usize) -> bool {
        self.tiers.get(target).is_some_and(|slots| slots.is_memory())
    }

    /// An object store that admitted the block does not get it: it may at its next use.
    fn not_written(&self, hash: BlockHash, wanted: &[SaveRest], lacking: &[usize]) {
        if lacking.iter().any(|&nth| wanted[nth].target == self.tiers.len()) {
            self.object.iter().for_each(|object| object.give_up(hash));
        }
    }

    /// Nothing more of a sequence is saved: what is still wanted of it counts as dropped.
    fn end_all(&self, wanted: &mut [SaveRest]) {
        for rest in wanted {
            self.give_up(rest, rest.first);
            rest.end = rest.first;
        }
    }

    /// The blocks of a rest from this one on count as dropped.
    fn give_up(&self, rest: &SaveRest, first: usize) {
        let num_dropped = rest.end.saturating_sub(first) as u64;
        match self.counters.get(rest.target) {
            Some(counters) => drop(counters.add(Count::Dropped, num_dropped)),
            None => self.object.iter().for_each(|object| object.dropped(num_dropped)),
        }
    }

    /// Writes to memory at once, and leaves a disk to the writer, and an object store to its own. False when there is no room.
    fn take(&self, target: usize, keep: Keep, record: &Arc<Record>, writes: &Sender<ToWrite>) -> bool {
        let Some(slots) = self.tiers.get(target) else {
            return self.object.as_ref().is_some_and(|object| object.write(record.clone()));
        };
        let write = |place| Write { tier: target, keep, record: record.clone(), _place: place };
        if slots.is_memory() {
            self.write(&write(None));
            return true;
        }
        let place = self.queue.clone().try_acquire_owned();
        place.is_ok_and(|place| writes.send(ToWrite::Record(write(Some(place)))).is_ok())
    }

    pub(crate) fn write(&self, Write { tier, keep, record, .. }: &Write) {
        let RecordName { hash, block_idx, .. } = record.name;
        let slot = match self.tiers[*tier].shared() {
            None => self.update(|directory| directory.begin_write(*tier, hash, block_idx, *keep)),
            Some(shared) => self.claim(shared, *tier, &record.name, *keep),
        };
        let Some(slot) = slot else { return };
        let place = SlotPlace { tier: *tier, slot };
        match self.tiers[*tier].write(slot, record) {
            Ok(()) => {
                self.counters[*tier].add(Count::Writes, 1);
                if *keep != Keep::Normal {
                    self.keep(place, *keep);
                }
                self.update(|directory| directory.end_write(place, record.name.block_before()));
            }
            Err(error) => {
                let name = self.tiers[*tier].name();
                let num_before = self.counters[*tier].add(Count::WriteErrors, 1);
                // A full disk refuses every write.
                if is_logged(num_before) {
                    tracing::warn!(tier = name, %error, num_before, "kv not saved: the tier refuses a write");
                }
                self.tiers[*tier].shared().iter().for_each(|shared| shared.release(slot));
                self.update(|directory| directory.fail_write(place));
            }
        }
    }

    /// A slot of a shared tier for a record, which is this process's now. A block that others used since this one last asked does not make
    /// room for it.
    fn claim(&self, shared: &dyn Sharing, tier: usize, name: &RecordName, keep: Keep) -> Option<u32> {
        for _ in 0..MAX_CLAIMS {
            let (slot, is_claimed) = self.update(|directory| {
                for _ in 0..MAX_SPARED {
                    let Some(slot) = directory.next_evicted(tier, keep) else { break };
                    let Some(keep) = shared.used_by_others(slot) else { break };
                    directory.used_slot(SlotPlace { tier, slot }, keep);
                }
                let slot = directory.begin_write(tier, name.hash, name.block_idx, keep)?;
                let is_claimed = shared.claim(slot);
                if !is_claimed {
                    // Another process was first. It may have been stopped before it told more.
                    directory.follow(tier, vec![(slot, SlotChange::Taken)]);
                }
                Some((slot, is_claimed))
            })?;
            if is_claimed {
                return Some(slot);
            }
        }
        None
    }
}
