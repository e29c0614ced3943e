//! The tiers below one worker's pool. What decides is real: the directory of blocks, what is worth reading, the log of events. What is
//! simulated are the devices: each reads one sequence after the other, and writes likewise.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use baton_cost::LinkLine;
use baton_kv_cache::BlockHash;
use baton_kv_events::{BlockHolder, CacheEvent, CacheReader, EventBatch, EventLog, Keep, MAX_TIERS};
use baton_tier_policy::{Directory, RecallPace, SlotPlace, TierRun};

use crate::{cluster::TierSpec, time::SimTime};

/// Sequences that wait to be written to a tier at most, as in a worker.
const MAX_WAITING: usize = 256;

/// The tiers of one worker.
#[derive(Debug)]
pub(crate) struct Tiers {
    block_size: usize,
    block_bytes: f64,
    directory: Directory,
    devices: Vec<Device>,
    pace: RecallPace,
    log: EventLog,
    reader: CacheReader,
}

/// What a tier is made of.
#[derive(Debug)]
struct Device {
    link: LinkLine,
    is_read_until: SimTime,
    /// Sequences to write, by their hashes. The first one is being written, if `slots` has some.
    saves: VecDeque<Arc<[BlockHash]>>,
    /// Blocks of the first one that are being written, by their place in it, and their slots.
    slots: Vec<(usize, u32)>,
}

/// Whether a sequence is saved that goes on: with its second token, and every 256 tokens.
pub(crate) fn saves_after(num_generated: u32) -> bool {
    num_generated % 256 == 2
}

impl Tiers {
    /// Of a pool of so many blocks; `None` without a tier.
    pub(crate) fn new(
        specs: &[TierSpec],
        num_pool_blocks: usize,
        block_size: usize,
        block_bytes: f64,
    ) -> Option<Tiers> {
        let specs = &specs[..specs.len().min(MAX_TIERS)];
        let device = |spec: &TierSpec| Device {
            link: spec.link,
            is_read_until: SimTime(0),
            saves: VecDeque::new(),
            slots: Vec::new(),
        };
        let num_slots: Vec<u32> =
            specs.iter().map(|spec| u32::try_from(spec.num_blocks).unwrap_or(u32::MAX)).collect();
        let mut log = EventLog::new(num_pool_blocks);
        (0..specs.len()).for_each(|tier| log.append(BlockHolder::Tier(tier), Vec::new()));
        (!specs.is_empty()).then(|| Tiers {
            block_size,
            block_bytes,
            directory: Directory::new(&num_slots),
            devices: specs.iter().map(device).collect(),
            pace: RecallPace::new(specs.len()),
            log,
            reader: CacheReader::new(Some(0)),
        })
    }

    /// The front of a sequence as far as tiers hold it, in runs of one tier, with what their reads took.
    pub(crate) fn runs(&self, hashes: &[BlockHash]) -> Vec<TierRun> {
        let places = self.directory.find_prefix(hashes);
        let run = |run: &[SlotPlace]| TierRun {
            num_blocks: run.len(),
            speed: Some(self.pace.speed(run[0].tier, self.block_bytes)),
        };
        places.chunk_by(|one, next| one.tier == next.tier).map(run).collect()
    }

    /// Begins to read these blocks, which tiers hold. Returns when they are there.
    pub(crate) fn read(&mut self, hashes: &[BlockHash], now: SimTime) -> SimTime {
        let places = self.directory.find_prefix(hashes);
        self.directory.used(hashes, &[]);
        let mut at = now;
        for run in places.chunk_by(|one, next| one.tier == next.tier) {
            let (tier, num_blocks) = (run[0].tier, run.len());
            let device = &mut self.devices[tier];
            let took = SimTime::from_seconds(device.link.seconds(num_blocks as f64 * self.block_bytes));
            at = at.max(device.is_read_until) + took;
            device.is_read_until = at;
            self.pace.observe_read(tier, num_blocks, Duration::from_nanos(took.0));
        }
        at
    }

    /// A sequence is to be written to every tier. Returns the tiers that write nothing now.
    pub(crate) fn save(&mut self, hashes: &Arc<[BlockHash]>) -> Vec<usize> {
        let mut idle = Vec::new();
        for (tier, device) in self.devices.iter_mut().enumerate() {
            if device.slots.is_empty() {
                idle.push(tier);
            }
            if device.saves.len() < MAX_WAITING {
                device.saves.push_back(hashes.clone());
            }
        }
        idle
    }

    /// A tier has written what it was writing.
    pub(crate) fn written(&mut self, tier: usize) {
        let device = &mut self.devices[tier];
        let hashes = device.saves.pop_front().expect("it writes one");
        for (idx, slot) in device.slots.drain(..) {
            self.directory
                .end_write(SlotPlace { tier, slot }, idx.checked_sub(1).map(|before| hashes[before]));
        }
        self.directory.used(&hashes, &[]);
    }

    /// Begins to write what the tier lacks of the next sequence that waits, as far as the pool has it: `num_pooled` says how many
    /// blocks at its front. Returns when that is done; `None`: nothing waits.
    pub(crate) fn write_next(
        &mut self,
        tier: usize,
        now: SimTime,
        num_pooled: impl Fn(&[BlockHash]) -> usize,
    ) -> Option<SimTime> {
        let device = &mut self.devices[tier];
        debug_assert!(device.slots.is_empty(), "one after the other");
        while let Some(hashes) = device.saves.front() {
            for (idx, &hash) in hashes.iter().take(num_pooled(hashes)).enumerate() {
                let slot = self.directory.begin_write(tier, hash, idx as u32, Keep::Normal);
                device.slots.extend(slot.map(|slot| (idx, slot)));
            }
            if !device.slots.is_empty() {
                let num_bytes = device.slots.len() as f64 * self.block_bytes;
                return Some(now + SimTime::from_seconds(device.link.seconds(num_bytes)));
            }
            self.directory.used(hashes, &[]);
            device.saves.pop_front();
        }
        None
    }

    /// What routers are told next. `pool` are the events of the pool.
    pub(crate) fn events(&mut self, pool: Vec<CacheEvent>) -> Vec<EventBatch> {
        self.log.append(BlockHolder::Pool, pool);
        for tier in 0..self.devices.len() {
            self.log.append(BlockHolder::Tier(tier), self.directory.take_events(tier));
        }
        std::iter::from_fn(|| self.reader.next(|read| read(&self.log))).collect()
    }

    /// Seconds for a token of each tier, as load reports say them.
    pub(crate) fn recall_token_seconds(&self) -> [f64; MAX_TIERS] {
        std::array::from_fn(|tier| match tier < self.devices.len() {
            true => self.pace.seconds(tier).unwrap_or(0.0) / self.block_size as f64,
            false => 0.0,
        })
    }
}
