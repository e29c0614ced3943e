//! What the threads of an object tier share: what the store holds, how fast it is, and reads of it.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use baton_cost::LinkLine;
use baton_kv_cache::BlockHash;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, path::Path};
use tokio::{
    sync::{Notify, mpsc},
    time::{sleep, timeout, timeout_at},
};

use super::{
    catalogue::{Catalogue, ListedSegment, RecordPlace},
    speed::{self, Pauses, Timing},
};
use crate::{
    counts::{Count, TierCounters, is_logged},
    record::{Record, RecordShape},
    slots::{Direction, ReadError},
};

/// A segment has about so many bytes, in at most so many records.
pub(super) const SEGMENT_BYTES: usize = 32 << 20;
pub(super) const MAX_SEGMENT_RECORDS: usize = 1024;
/// A request for records that follow each other in a segment, and such requests at a time. One stream alone is slow.
const RANGE_BYTES: usize = 2 << 20;
const NUM_RANGES: usize = 8;
/// Time between two listings, and between two that fail.
const REFRESH_EVERY: Duration = Duration::from_secs(10);
const MAX_REFRESH_EVERY: Duration = Duration::from_secs(300);
/// However many requests want the store to be measured.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// Segments of a listing that are looked at, beside this worker's own, and manifests that are read after one.
const MAX_LISTED: usize = 1 << 16;
const MAX_NEW: usize = 256;
/// How long a listing and its manifests may take.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(120);
/// What is read to measure the store, at most; how long that may take, and how old the result may be when it keeps requests from
/// reading.
const MEASURE_BYTES: usize = 8 << 20;
const MEASURE_TIMEOUT: Duration = Duration::from_secs(10);
const MEASURE_EVERY: Duration = Duration::from_secs(60);
pub(super) struct Shared {
    pub(super) store: Arc<dyn ObjectStore>,
    /// Where segments of this format are, of all workers.
    pub(super) dir: Path,
    /// Where those of this worker are.
    pub(super) own_dir: Path,
    pub(super) max_bytes: u64,
    pub(super) shape: RecordShape,
    pub(super) catalogue: Mutex<Catalogue>,
    pub(super) counters: TierCounters,
    pub(super) speed: Mutex<Speed>,
    /// A request would have read, had the store been measured lately.
    pub(super) is_wanted: AtomicBool,
    pub(super) wanted: Notify,
    /// Segments that the store did not delete.
    pub(super) num_not_deleted: AtomicU64,
}

/// How fast records come.
#[derive(Debug, Default)]
pub(super) struct Speed {
    /// `None`: not measured, or it was wrong.
    pub(super) line: Option<LinkLine>,
    pub(super) measured: Option<Instant>,
}

/// Records of a segment that follow each other.
#[derive(Debug)]
struct Fetch {
    segment: String,
    range: Range<u64>,
    records: Vec<(BlockHash, RecordPlace)>,
}

impl Shared {
    /// The records of the front of a sequence, as far as they come whole and before `until`. The time that it took is `None` when it
    /// tells nothing: the store failed, or it was too late.
    pub(super) async fn read(
        &self,
        hashes: &[BlockHash],
        until: Instant,
    ) -> (Vec<Arc<Record>>, Option<Timing>) {
        self.read_fetches(self.fetches(hashes), until).await
    }

    async fn read_fetches(&self, fetches: Vec<Fetch>, until: Instant) -> (Vec<Arc<Record>>, Option<Timing>) {
        let num_bytes: u64 = fetches.iter().map(|fetch| fetch.range.end - fetch.range.start).sum();
        let expected = self.speed().line.map(|line| line.seconds(num_bytes as f64));
        let (sender, mut of_fetches) = mpsc::channel(fetches.len().max(1));
        let started = Instant::now();
        // It is too late to ask the store.
        if started >= until {
            return (Vec::new(), None);
        }
        let (is_late, timing) = self.read_all(fetches, until, Direction::Forwards, sender).await;
        // A read that had less time than it should take says nothing of the store.
        if is_late && expected.is_some_and(|expected| started.elapsed().as_secs_f64() >= expected) {
            *self.speed() = Speed::default();
            self.counters.add(Count::ReadErrors, 1);
            self.wanted.notify_one();
            tracing::info!("the object store is slower than it was; it is not waited for");
        }
        let of_fetches = std::iter::from_fn(|| of_fetches.try_recv().ok());
        (of_fetches.flatten().collect(), timing.filter(|_| !is_late))
    }

    /// Sends the records of a sequence, if segments hold all of it, from the last ones on: piece by piece, each in its order. Ends when
    /// the reader has gone. Returns how fast they came; one that is late is as slow as it was until then.
    pub(super) async fn read_from_end(
        &self,
        hashes: &[BlockHash],
        until: Instant,
        pieces: mpsc::Sender<Vec<Arc<Record>>>,
    ) -> Option<Timing> {
        let mut fetches = self.fetches(hashes);
        let num_found: usize = fetches.iter().map(|fetch| fetch.records.len()).sum();
        if num_found < hashes.len() {
            return None;
        }
        fetches.reverse();
        let (_, timing) = self.read_all(fetches, until, Direction::FromEnd, pieces).await;
        timing
    }

    /// Sends requests, a few at a time and in this order, and the records of each to the reader of `pieces`, until that has gone or a
    /// record is not whole. Returns whether it was not over before `until`, and how fast the bytes came: `None` if the store failed, or sent
    /// nothing.
    async fn read_all(
        &self,
        fetches: Vec<Fetch>,
        until: Instant,
        direction: Direction,
        pieces: mpsc::Sender<Vec<Arc<Record>>>,
    ) -> (bool, Option<Timing>) {
        let started = Instant::now();
        let (mut num_bytes, mut is_late) = (0, false);
        let mut fetched = stream::iter(fetches)
            .map(|fetch| async move {
                let range = fetch.range.clone();
                (self.store.get_range(&path(&fetch.segment), range).await, fetch)
            })
            .buffered(NUM_RANGES);
        loop {
            let (read, fetch) = match timeout_at(until.into(), fetched.next()).await {
                Ok(Some(read)) => read,
                Ok(None) => break,
                Err(_) => {
                    is_late = true;
                    break;
                }
            };
            let bytes = match read {
                Ok(bytes) => bytes,
                Err(error) => {
                    self.read_failed(&fetch, &error);
                    return (false, None);
                }
            };
            num_bytes += bytes.len() as u64;
            let records = self.whole(&fetch, &bytes, direction);
            let is_whole = records.len() == fetch.records.len();
            if !records.is_empty() && pieces.send(records).await.is_err() || !is_whole {
                break;
            }
        }
        let timing = Timing { num_bytes, seconds: started.elapsed().as_secs_f64() };
        (is_late, (num_bytes > 0).then_some(timing))
    }

    /// The records of a fetch up to the first one, in this direction, that is not whole. In the order of the sequence.
    fn whole(&self, fetch: &Fetch, bytes: &[u8], direction: Direction) -> Vec<Arc<Record>> {
        let parts: Vec<&[u8]> = bytes.chunks(self.shape.record_bytes()).collect();
        direction.collect(0..fetch.records.len(), |idx| {
            let (hash, place) = fetch.records[idx];
            // Invariant 4: a record is used only if it is whole.
            let record = parts.get(idx).and_then(|part| self.shape.read_record(part, hash));
            if record.is_none() {
                self.damaged(fetch, hash, place);
            }
            record.map(Arc::new)
        })
    }

    /// The requests for the front of a sequence, as far as segments hold it.
    fn fetches(&self, hashes: &[BlockHash]) -> Vec<Fetch> {
        let catalogue = self.lock();
        let places = hashes.iter().map_while(|&hash| Some((hash, catalogue.find(hash)?)));
        self.fetches_of(&catalogue, &places.collect::<Vec<_>>())
    }

    /// The requests for records, up to the first one whose segment is gone.
    fn fetches_of(&self, catalogue: &Catalogue, places: &[(BlockHash, RecordPlace)]) -> Vec<Fetch> {
        let mut fetches: Vec<Fetch> = Vec::new();
        let max_records = (RANGE_BYTES / self.shape.record_bytes()).max(1);
        let follows = |(_, one): &(_, RecordPlace), (_, next): &(_, RecordPlace)| {
            one.segment == next.segment && one.record + 1 == next.record
        };
        for records in places.chunk_by(follows).flat_map(|run| run.chunks(max_records)) {
            let (_, first) = records[0];
            let Some(segment) = catalogue.segment(first) else { break };
            fetches.push(Fetch {
                segment: segment.name.clone(),
                range: self.shape.range(segment.hashes.len(), first.record, records.len()),
                records: records.to_vec(),
            });
        }
        fetches
    }

    fn damaged(&self, fetch: &Fetch, hash: BlockHash, place: RecordPlace) {
        self.counters.add(Count::Damaged, 1);
        self.lock().forget(hash, place);
        let error = ReadError::Damaged;
        tracing::warn!(tier = "object", segment = fetch.segment, %error, "kv of a block is lost; it is computed again");
    }

    fn read_failed(&self, fetch: &Fetch, error: &object_store::Error) {
        let num_before = self.counters.add(Count::ReadErrors, 1);
        match error {
            // Its owner made room.
            object_store::Error::NotFound { .. } => self.lock().remove(&fetch.segment),
            _ => *self.speed() = Speed::default(),
        }
        if is_logged(num_before) {
            tracing::warn!(%error, num_before, "the object store refuses a read; the prompt is computed");
        }
    }

    /// Reads which segments there are, and what the new ones hold. Makes room for them. Nothing is asked again of those that are `refused`,
    /// and of `unread` ones after pauses.
    async fn refresh(
        &self,
        refused: &mut HashSet<String>,
        unread: &mut HashMap<String, Pauses>,
    ) -> Result<(), object_store::Error> {
        let known_before = self.lock().next_segment();
        let objects = self.store.list(Some(&self.dir)).take(MAX_LISTED);
        let mut listed: Vec<_> = objects.try_collect().await?;
        let is_whole = listed.len() < MAX_LISTED;
        if !is_whole {
            // Of its own it must know all: it makes room among them.
            listed.retain(|object| !object.location.prefix_matches(&self.own_dir));
            listed.extend(self.store.list(Some(&self.own_dir)).try_collect::<Vec<_>>().await?);
        }
        // The oldest first: it makes room first.
        listed.sort_by_key(|object| object.last_modified);
        let listed: Vec<_> = listed.iter().map(|object| self.segment(object)).collect();
        let names: HashSet<&str> = listed.iter().map(|segment| segment.name.as_str()).collect();
        refused.retain(|name| names.contains(name.as_str()));
        unread.retain(|name, _| names.contains(name.as_str()));
        let mut new = {
            let mut catalogue = self.lock();
            catalogue.listed(&names, known_before, is_whole);
            let now = Instant::now();
            let may_read = |name: &str| unread.get(name).is_none_or(|pauses| pauses.is_over(now));
            let is_new = |name: &str| !catalogue.is_known(name) && !refused.contains(name) && may_read(name);
            let new = listed.into_iter().filter(|segment| is_new(&segment.name)).collect();
            catalogue.choose(new)
        };
        // However many cannot be read, the others are.
        new.sort_by_key(|segment| unread.contains_key(&segment.name));
        self.make_room().await;
        let mut manifests = stream::iter(new.into_iter().take(MAX_NEW))
            .map(|new| async move { (self.manifest(&new).await, new) })
            .buffered(NUM_RANGES);
        let mut first_error = None;
        while let Some((hashes, new)) = manifests.next().await {
            match hashes {
                Ok(Some(hashes)) => {
                    unread.remove(&new.name);
                    self.lock().add(new.name, hashes, new.num_bytes, new.is_own);
                    self.make_room().await;
                }
                Ok(None) => {
                    self.counters.add(Count::Damaged, new.num_records.max(1) as u64);
                    tracing::warn!(
                        segment = new.name,
                        "not a segment of KV, damaged, or sealed by another key; it is not used"
                    );
                    refused.insert(new.name);
                }
                // It was deleted meanwhile.
                Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => {
                    self.counters.add(Count::ReadErrors, 1);
                    unread.entry(new.name).or_default().observe(false, Instant::now());
                    first_error = first_error.or(Some(error));
                }
            }
        }
        if let Some(error) = first_error {
            tracing::warn!(%error, "the object store refuses to tell what segments hold; they are asked for again later");
        }
        Ok(())
    }

    fn segment(&self, object: &ObjectMeta) -> ListedSegment {
        ListedSegment {
            name: object.location.to_string(),
            num_bytes: object.size,
            num_records: self.shape.num_records(object.size).unwrap_or(0),
            is_own: object.location.prefix_matches(&self.own_dir),
        }
    }

    /// The hashes of a segment; `None`: it is none of ours.
    async fn manifest(&self, new: &ListedSegment) -> Result<Option<Vec<BlockHash>>, object_store::Error> {
        if !(1..=MAX_SEGMENT_RECORDS).contains(&new.num_records) {
            return Ok(None);
        }
        let range = 0..self.shape.manifest_bytes(new.num_records) as u64;
        let manifest = self.store.get_range(&path(&new.name), range).await?;
        Ok(self.shape.read_manifest(&manifest, new.num_records))
    }

    /// Deletes own segments that are too many, or hold what was forgotten. One that cannot be deleted is deleted later: it is listed again,
    /// or stays unwanted.
    pub(super) async fn make_room(&self) {
        while let Some(name) = { self.lock().make_room(self.max_bytes) } {
            self.delete(&name).await;
        }
        let unwanted = self.lock().unwanted();
        for name in unwanted {
            if self.delete(&name).await {
                self.lock().deleted(&name);
            }
        }
    }

    /// Whether the segment is gone.
    async fn delete(&self, name: &str) -> bool {
        match self.store.delete(&path(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => true,
            Err(error) => {
                let num_before = self.num_not_deleted.fetch_add(1, Ordering::Relaxed);
                // It is tried again every few seconds.
                if is_logged(num_before) {
                    tracing::warn!(%error, segment = name, num_before, "cannot delete a segment of the object store");
                }
                false
            }
        }
    }

    /// Reads a part of a segment: a record, which opens connections; a record again, which tells the latency; and many. Of another
    /// segment for another `nth`: records of one may be damaged. False: it could not be measured.
    async fn measure(&self, nth: usize) -> bool {
        let max_records = (MEASURE_BYTES / self.shape.record_bytes()).max(1);
        let places = self.lock().any_places(nth, max_records);
        // There is nothing to read yet.
        if places.is_empty() {
            return true;
        }
        let until = Instant::now() + MEASURE_TIMEOUT;
        let mut timings = Vec::new();
        for num_records in [1, 1, places.len()] {
            let fetches = self.fetches_of(&self.lock(), &places[..num_records]);
            let (records, timing) = self.read_fetches(fetches, until).await;
            timings.extend(timing.filter(|_| records.len() == num_records));
        }
        let line = match timings[..] {
            [_, one, many] => speed::through(one, many),
            _ => None,
        };
        match line {
            Some(LinkLine { latency_seconds, bytes_per_second }) => {
                tracing::info!(latency_seconds, bytes_per_second, "object store measured");
            }
            None => tracing::info!("the object store is too slow to be measured; it is not waited for"),
        }
        *self.speed() = Speed { line, measured: Some(Instant::now()) };
        line.is_some()
    }

    /// Whether the speed is not known, or is old and a request would have read.
    fn is_due(&self) -> bool {
        let Speed { line, measured } = &*self.speed();
        let is_old = measured.is_none_or(|measured| measured.elapsed() >= MEASURE_EVERY);
        line.is_none() || is_old && self.is_wanted.swap(false, Ordering::Relaxed)
    }

    /// No user code runs under the locks, so poisoned ones hold whole data.
    pub(super) fn lock(&self) -> MutexGuard<'_, Catalogue> {
        self.catalogue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn speed(&self) -> MutexGuard<'_, Speed> {
        self.speed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows what other workers write, and how fast the store is.
pub(super) async fn keep_up(shared: Arc<Shared>) {
    let (mut refused, mut unread) = (HashSet::new(), HashMap::new());
    let mut num_measured = 0;
    let mut pauses = Pauses::default();
    let mut every = REFRESH_EVERY;
    let mut refresh_at = Instant::now();
    loop {
        if Instant::now() >= refresh_at {
            every = match timeout(REFRESH_TIMEOUT, shared.refresh(&mut refused, &mut unread)).await {
                Ok(Ok(())) => REFRESH_EVERY,
                failed => {
                    shared.counters.add(Count::ReadErrors, 1);
                    let error = failed.map_or_else(|late| late.to_string(), |error| format!("{error:?}"));
                    tracing::warn!(error, again_in = ?every, "cannot list the object store");
                    (every * 2).min(MAX_REFRESH_EVERY)
                }
            };
            refresh_at = Instant::now() + every;
        }
        if pauses.is_over(Instant::now()) && shared.is_due() {
            let is_measured = shared.measure(num_measured).await;
            pauses.observe(is_measured, Instant::now());
            num_measured += 1;
        }
        // A request that would have read lets the store be measured sooner.
        let _ = timeout_at(refresh_at.into(), shared.wanted.notified()).await;
        sleep(MIN_WAIT).await;
    }
}

fn path(name: &str) -> Path {
    Path::parse(name).expect("a name of the store's own listing, or made of a path")
}
