//! What the prefix cache of an engine stores and evicts, for readers on other threads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_kv_cache::BlockHash;
use baton_kv_events::{BlockHolder, BlockKey, CacheEvent, CacheReader, EventBatch, EventLog};
use tokio::sync::watch;

/// The events of an engine. Clones share them.
#[derive(Clone, Debug)]
pub struct CacheLog {
    /// Locked by the engine's thread for its events, and by a reader for a copy of what it lacks.
    log: Arc<Mutex<EventLog>>,
    /// The number of the next event.
    next: watch::Sender<u64>,
}

impl CacheLog {
    pub(crate) fn new(num_blocks: usize) -> CacheLog {
        CacheLog { log: Arc::new(Mutex::new(EventLog::new(num_blocks))), next: watch::Sender::new(0) }
    }

    /// Numbers the events of the pool, or of a tier below it, and wakes the readers. A tier is told of from its first call on.
    pub fn append(&self, holder: BlockHolder, events: Vec<CacheEvent>) {
        if events.is_empty() && holder == BlockHolder::Pool {
            return;
        }
        let next = {
            let mut log = self.lock();
            log.append(holder, events);
            log.next()
        };
        self.next.send_replace(next);
    }

    /// How many blocks at the front of a sequence, by its hashes in order, are in the pool.
    pub fn num_in_pool(&self, hashes: &[BlockHash]) -> usize {
        self.lock().num_held(BlockHolder::Pool, hashes.iter().map(|hash| BlockKey(hash.short())))
    }

    /// The next batch that a reader lacks, if any.
    pub fn read(&self, reader: &mut CacheReader) -> Option<EventBatch> {
        reader.next(|read| read(&self.lock()))
    }

    /// Follows the number of the next event.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn lock(&self) -> MutexGuard<'_, EventLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
