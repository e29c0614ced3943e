//! A feed that the stream of a worker's reports and the requests of a router share.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{BlockKey, CacheFeed, EventBatch, FeedError, KvIndex, SourceState, feed::POOL};

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
    tells_pool: AtomicBool,
}

/// Tokens at the front of a sequence that an owner holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokensHeld {
    /// In its pool or a tier.
    pub num_tokens: usize,
    /// In its pool, by a source that [tells it](CacheSource::tells_pool).
    pub num_pooled: usize,
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
        CacheSource { owner, feed, tells_pool: AtomicBool::new(false) }
    }

    /// Its name in lookups.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Whether the worker tells what of all that it holds is in its pool. Otherwise all of it is.
    pub fn tells_pool(&self) -> bool {
        self.tells_pool.load(Ordering::Relaxed)
    }

    /// How far it is known what the worker holds.
    pub fn state(&self) -> SourceState {
        self.feed().state()
    }

    /// See [`CacheFeed::resume_from`].
    pub fn resume_from(&self) -> Option<u64> {
        self.feed().resume_from()
    }

    /// Takes a report, and the events that it brings, if any. The worker's tiers have room for so many blocks.
    pub fn report(&self, batch: Option<EventBatch>, num_tier_blocks: usize) -> SourceReport {
        let mut feed = self.feed();
        feed.set_tier_blocks(num_tier_blocks.min(LARGEST_POOL));
        let was_degraded = feed.state() == SourceState::Degraded;
        let taken = batch.map_or(Ok(()), |batch| feed.take(&batch));
        feed.on_report();
        self.tells_pool.store(feed.tells_pool(), Ordering::Relaxed);
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
                let held = found.entry(holder.owner & !POOL).or_default();
                let num_tokens = holder.num_blocks.saturating_mul(block_size);
                held.num_tokens = held.num_tokens.max(num_tokens);
                if holder.owner & POOL != 0 {
                    held.num_pooled = held.num_pooled.max(num_tokens);
                }
            }
        }
        found
    }
}
