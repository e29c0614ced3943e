//! What the prefix cache of an engine stores and evicts, for readers on other threads.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

use baton_kv_cache::BlockHash;
use baton_kv_events::{BlockHolder, BlockKey, CacheEvent, CacheReader, EventBatch, EventLog};
use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
};

/// The events of an engine. Clones share them.
#[derive(Clone, Debug)]
pub struct CacheLog {
    /// Locked by the engine's thread and by tiers for their events, and by a reader for a copy of what it lacks: all of a large cache takes
    /// milliseconds.
    log: Arc<Mutex<EventLog>>,
    /// The number of the next event.
    next: watch::Sender<u64>,
}

/// One reader of a [`CacheLog`]. It reads on another thread: what a reader gets of a large cache that it does not know takes seconds.
#[derive(Debug)]
pub struct CacheLogReader {
    log: CacheLog,
    /// The number of the next event.
    next: watch::Receiver<u64>,
    /// While a thread has the reader, this is one that knows nothing.
    reader: CacheReader,
    reading: Option<JoinHandle<(Option<EventBatch>, CacheReader)>>,
}

impl CacheLog {
    pub(crate) fn new(num_blocks: usize) -> CacheLog {
        CacheLog { log: Arc::new(Mutex::new(EventLog::new(num_blocks))), next: watch::Sender::new(0) }
    }

    /// Numbers the events of the pool, or of a tier below it, and wakes the readers. A tier is told of from its first call on.
    pub fn append(&self, holder: BlockHolder, events: Vec<CacheEvent>) {
        if !events.is_empty() || holder != BlockHolder::Pool {
            self.append_to(self.lock(), holder, events);
        }
    }

    /// Takes and numbers events of the pool, unless the log is locked: the engine's thread does not wait for the copy of a reader. Then
    /// nothing is taken, and a later call is to take it.
    pub(crate) fn try_append(&self, take: impl FnOnce() -> Vec<CacheEvent>) {
        let log = match self.log.try_lock() {
            Ok(log) => log,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let events = take();
        if !events.is_empty() {
            self.append_to(log, BlockHolder::Pool, events);
        }
    }

    fn append_to(&self, mut log: MutexGuard<'_, EventLog>, holder: BlockHolder, events: Vec<CacheEvent>) {
        log.append(holder, events);
        // Under the lock: of two threads the later one would otherwise be overtaken, and its events missed until others come.
        self.next.send_replace(log.next());
    }

    /// How many blocks at the front of a sequence, by its hashes in order, are in the pool.
    pub fn num_in_pool(&self, hashes: &[BlockHash]) -> usize {
        self.lock().num_held(BlockHolder::Pool, hashes.iter().map(|hash| BlockKey(hash.short())))
    }

    /// A reader that has all events before this number. `None`: it has nothing, and gets a dump first.
    pub fn reader(&self, next: Option<u64>) -> CacheLogReader {
        CacheLogReader {
            log: self.clone(),
            next: self.next.subscribe(),
            reader: CacheReader::new(next),
            reading: None,
        }
    }

    /// [`EventLog::append`] is the only change under the lock: a panic of what [`try_append`](Self::try_append) takes leaves the log whole.
    fn lock(&self) -> MutexGuard<'_, EventLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CacheLogReader {
    /// Completes when the reader lacks something, also while that is being read.
    pub async fn lacking(&mut self) {
        let lacking = self.next.wait_for(|&next| !self.reader.is_at(next));
        drop(lacking.await.expect("the reader has the log, which sends"));
    }

    /// Whether a dump is under way, of which the next part is due at once.
    pub fn has_parts(&self) -> bool {
        self.reader.has_parts()
    }

    /// The next batch that the reader lacks, if any. A call that is dropped loses nothing: the next one goes on with what that began.
    pub async fn read(&mut self) -> Option<EventBatch> {
        if self.reader.is_at(*self.next.borrow()) {
            return None;
        }
        let reading = self.reading.get_or_insert_with(|| {
            let mut reader = mem::replace(&mut self.reader, CacheReader::new(None));
            let log = self.log.clone();
            spawn_blocking(move || (reader.next(|read| read(&log.lock())), reader))
        });
        let read = reading.await;
        self.reading = None;
        // Nothing in it panics. A reader that was lost would get a dump.
        let (batch, reader) = read.ok()?;
        self.reader = reader;
        batch
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use baton_kv_events::BatchKind;
    use tokio::{runtime::Builder, time::timeout};

    use super::*;

    fn stored(num_blocks: u64) -> Vec<CacheEvent> {
        vec![CacheEvent::stored(None, (0..num_blocks).map(BlockKey).collect())]
    }

    #[test]
    fn events_that_come_while_a_reader_copies_are_left_for_later() {
        let log = CacheLog::new(64);
        let copying = log.lock();
        log.try_append(|| panic!("the engine would have to wait"));
        drop(copying);
        log.try_append(|| stored(3));
        assert_eq!(log.lock().next(), 1);
    }

    #[test]
    fn a_dump_is_made_on_another_thread_and_not_lost_when_it_is_not_waited_for() {
        let log = CacheLog::new(64);
        log.append(BlockHolder::Pool, stored(10));
        let runtime = Builder::new_current_thread().enable_time().max_blocking_threads(1).build();
        runtime.expect("a runtime").block_on(async {
            let (let_go, gate) = mpsc::channel::<()>();
            let busy = spawn_blocking(move || gate.recv().ok());
            let mut reader = log.reader(None);
            reader.lacking().await;
            for _ in 0..2 {
                let read = timeout(Duration::from_millis(1), reader.read()).await;
                assert!(read.is_err(), "the only other thread is busy");
                timeout(Duration::from_secs(60), reader.lacking()).await.expect("it lacks the dump still");
            }
            drop(let_go);
            busy.await.expect("no panic");
            let dump = reader.read().await.expect("a dump");
            assert_eq!((dump.kind, dump.events), (BatchKind::DumpEnd, stored(10)));
            assert_eq!(reader.read().await, None);
            log.append(BlockHolder::Pool, vec![CacheEvent::removed(vec![BlockKey(9)])]);
            let then = reader.read().await.expect("an event");
            assert_eq!((then.kind, then.first, then.events.len()), (BatchKind::Events, 1, 1));
        });
    }
}
