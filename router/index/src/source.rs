//! A feed that the stream of a worker's reports and the requests of a router share.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    BlockKey, CacheFeed, EventBatch, FeedError, KvIndex, MAX_TIERS, SourceState, feed::owner_and_level,
};

/// Blocks of a worker that does not say how many it has, and those that are believed of any worker at most.
const UNKNOWN_POOL: usize = 1 << 17;
const LARGEST_POOL: usize = 1 << 24;

/// The source of one life of a worker. Dropping it makes the worker hold nothing.
#[derive(Debug)]
pub struct CacheSource {
    owner: u32,
    /// Locked by the stream of reports for a batch, and by requests for a prompt. Lookups do not lock it.
    feed: Mutex<CacheFeed>,
    /// As the feed says: plans ask without its lock.
    num_tiers: AtomicUsize,
}

/// Tokens at the front of a sequence that an owner holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokensHeld {
    /// In its pool or a tier.
    pub num_tokens: usize,
    /// Above each tier: in its pool, then in its pool or the first tier, and so on. By a source that [tells it](CacheSource::num_tiers).
    pub above: [usize; MAX_TIERS],
}

/// What is to be done after a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceReport {
    /// Events are missing: the worker is to be asked for them.
    pub wants_replay: bool,
    /// Why the source is not exact, if it was before: for a log.
    pub news: Option<FeedError>,
}

impl CacheSource {
    /// Of a worker that has said nothing so far. Its pool has so many blocks; 0: it does not say.
    pub fn new(index: &Arc<KvIndex>, owner: u32, num_blocks: usize) -> CacheSource {
        let num_blocks = if num_blocks == 0 { UNKNOWN_POOL } else { num_blocks.min(LARGEST_POOL) };
        let feed = Mutex::new(CacheFeed::new(index.clone(), owner, num_blocks));
        CacheSource { owner, feed, num_tiers: AtomicUsize::new(0) }
    }

    /// Its name in lookups.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Tiers of which the worker tells what it holds above them. 0: all that it holds is in its pool.
    pub fn num_tiers(&self) -> usize {
        self.num_tiers.load(Ordering::Relaxed)
    }

    /// How far it is known what the worker holds.
    pub fn state(&self) -> SourceState {
        self.feed().state()
    }

    /// See [`CacheFeed::resume_from`].
    pub fn resume_from(&self) -> Option<u64> {
        self.feed().resume_from()
    }

    /// Takes a report, and the events that it brings, if any. Each of the worker's tiers has room for so many blocks.
    pub fn report(&self, batch: Option<EventBatch>, tier_blocks: [usize; MAX_TIERS]) -> SourceReport {
        let mut feed = self.feed();
        feed.set_tier_blocks(tier_blocks.map(|num| num.min(LARGEST_POOL)));
        let was_degraded = feed.state() == SourceState::Degraded;
        let taken = batch.map_or(Ok(()), |batch| feed.take(&batch));
        feed.on_report();
        self.num_tiers.store(feed.num_tiers(), Ordering::Relaxed);
        match taken {
            Ok(()) => SourceReport::default(),
            Err(error) => SourceReport {
                wants_replay: error.wants_replay(),
                news: Some(error).filter(|_| !was_degraded),
            },
        }
    }

    /// A prompt is sent to the worker, and will be cached. Without room in the index it is not noted.
    pub fn expect(&self, chain: impl Iterator<Item = BlockKey>) {
        let _ = self.feed().expect(chain);
    }

    /// A request has ended there, and its whole sequence is cached. Without room in the index it is not noted.
    pub fn finished(&self, chain: impl Iterator<Item = BlockKey>) {
        let _ = self.feed().finished(chain);
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn feed(&self) -> MutexGuard<'_, CacheFeed> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvIndex {
    /// What each owner holds, or is believed to, of the front of a sequence. `chains` are its blocks, by their size in tokens.
    pub fn tokens_held<'a, T: Copy + 'a>(
        &self,
        chains: impl Iterator<Item = (usize, &'a [T])>,
        key: impl Fn(T) -> BlockKey,
    ) -> HashMap<u32, TokensHeld> {
        let mut found: HashMap<u32, TokensHeld> = HashMap::new();
        for (block_size, chain) in chains {
            for holder in self.lookup(chain, &key) {
                let (owner, level) = owner_and_level(holder.owner);
                let held = found.entry(owner).or_default();
                let num_tokens = holder.num_blocks.saturating_mul(block_size);
                // What is above one tier is above all slower ones.
                let above = level.tier().and_then(|tier| held.above.get_mut(tier..)).unwrap_or_default();
                for num in above.iter_mut().chain([&mut held.num_tokens]) {
                    *num = num_tokens.max(*num);
                }
            }
        }
        found
    }
}
