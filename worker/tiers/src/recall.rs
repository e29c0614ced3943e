//! What the pool lacks of a prompt is recalled: before it is computed what is fast, and meanwhile, from its end, what is slow.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context;
use baton_engine::PrefixReservation;
use baton_kv_cache::BlockHash;
use baton_kv_store::Record;
use baton_request::Request;
use baton_tier_policy::{ReadMode, Worth};
use tokio::{
    task::spawn_blocking,
    time::{error::Elapsed, timeout},
};

use crate::{
    beside::BesideRecall,
    tiers::{Permit, Tiers},
};

/// What tiers have of a request and the pool lacks.
#[derive(Debug)]
pub struct Recall {
    tiers: Arc<Tiers>,
    /// Of the blocks in the pool, then of those that are read.
    hashes: Vec<BlockHash>,
    /// Blocks at the front that are in the pool.
    num_pooled: usize,
    /// Of those after them, what is read before anything is computed.
    worth: Worth,
    mode: ReadMode,
    /// Where the batch begins and ends that is being read, and since when that goes on. Locked for a copy.
    reading: Mutex<Option<(usize, usize, Instant)>>,
}

impl Recall {
    /// Of a prompt that will be computed here. `None` when the pool has all that the tiers have of it, there are no
    /// tiers, or it is scored.
    pub async fn of(tiers: Option<&Arc<Tiers>>, request: &Request) -> Option<Recall> {
        // A head is computed as a whole.
        let mode = if request.blended().is_some() { ReadMode::Alone } else { ReadMode::BesideComputing };
        Recall::new(tiers?, request, mode).await
    }

    /// The same of a prompt that is not computed here: another worker asks for its KV.
    pub async fn for_peer(tiers: Option<&Arc<Tiers>>, request: &Request) -> Option<Recall> {
        Recall::new(tiers?, request, ReadMode::Alone).await
    }

    async fn new(tiers: &Arc<Tiers>, request: &Request, mode: ReadMode) -> Option<Recall> {
        // A scored prompt shares no blocks: cached tokens have no logits.
        if request.is_scored() {
            return None;
        }
        let engine = &tiers.limits.engine;
        let num_tokens = engine.num_sharable_tokens(request);
        // Hashing may wait for a thread, no longer than computing takes.
        let finding = engine.find_prefix(request, num_tokens);
        let (mut hashes, num_pooled) = timeout(tiers.limits.deadline(num_tokens), finding).await.ok()?;
        let worth = tiers.worth(&hashes, num_pooled, mode);
        let num_wanted = match mode {
            ReadMode::Alone => worth.num_blocks,
            ReadMode::BesideComputing => worth.num_held,
        };
        hashes.truncate(num_pooled + num_wanted);
        let reading = Mutex::default();
        (num_wanted > 0).then(|| Recall { tiers: tiers.clone(), hashes, num_pooled, worth, mode, reading })
    }

    /// Whether the prompt waits for a part of it.
    pub fn is_awaited(&self) -> bool {
        self.worth.num_blocks > 0
    }

    /// Brings the fast blocks into the pool, as far as there is room, and no longer than it would take to compute them. Dropping the
    /// future ends it; blocks that are being written are free when that is done. Returns what to [start](BesideRecall::start) before
    /// the rest is computed.
    pub async fn run(self) -> Option<BesideRecall> {
        let num_recalled = if self.is_awaited() { self.run_before().await } else { 0 };
        let Recall { tiers, hashes, num_pooled, mode, .. } = self;
        let num_ready = num_pooled + num_recalled;
        let is_more = mode == ReadMode::BesideComputing && num_ready < hashes.len();
        is_more.then(|| BesideRecall::new(tiers, hashes, num_ready))
    }

    /// Returns how many blocks came, unless it was too late.
    async fn run_before(&self) -> usize {
        let block_size = self.tiers.block_size();
        let num_tokens = self.worth.num_blocks * block_size;
        let started = Instant::now();
        let (limit, patience) = self.tiers.bounds(&self.worth);
        match timeout(limit, self.bring_in(limit, patience)).await {
            Ok(Ok((num_blocks, reading))) => {
                let num_recalled = num_blocks * block_size;
                let elapsed = started.elapsed();
                self.tiers.store.note_rest(num_blocks, elapsed.saturating_sub(reading));
                tracing::debug!(num_tokens, num_recalled, ?elapsed, "prefix recalled from tiers");
                return num_blocks;
            }
            Ok(Err(error)) => tracing::warn!(%error, "prefix not recalled; the prompt is computed"),
            Err(Elapsed { .. }) => {
                // Otherwise the engine was slow, or other recalls.
                let reading = *self.reading.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((first, end, since)) = reading {
                    self.tiers.store.note_late(&self.hashes[first..end], since.elapsed());
                }
                tracing::info!(num_tokens, ?limit, "prefix not recalled in time; the rest is computed");
            }
        }
        0
    }

    /// Hashes of the blocks from `first` on that are read before anything is computed.
    fn wanted(&self, first: usize) -> &[BlockHash] {
        &self.hashes[first..self.num_pooled + self.worth.num_blocks]
    }

    /// Returns how many blocks came, and how long their records were read.
    async fn bring_in(&self, limit: Duration, patience: Duration) -> anyhow::Result<(usize, Duration)> {
        let first = self.num_pooled;
        let Some(permit) = self.tiers.permit(self.wanted(first), limit).await else {
            return Ok((0, Duration::ZERO));
        };
        let until = Instant::now() + patience;
        // The engine answers after its step: the first batch is read meanwhile.
        let (reservation, mut next) = tokio::join!(self.reserve(), self.read(first, until, &permit));
        // Without room, or after blocks before these were evicted, the engine computes them.
        let Some(reservation) = reservation? else { return Ok((0, Duration::ZERO)) };
        let reservation = Arc::new(reservation);
        let num_reserved = reservation.blocks().len();
        // The ends of what is in the pool, and of what was read.
        let (mut end, mut end_read, mut reading) = (first, first, Duration::ZERO);
        while let Some(batch) = next {
            let (mut records, took) = batch?;
            reading += took;
            records.truncate(num_reserved - end_read);
            // A record is missing, or is not what was saved.
            if records.is_empty() || end < end_read {
                break;
            }
            end_read += records.len();
            let write = self.write(end, records, reservation.clone(), permit.clone());
            let read = async {
                if end_read < num_reserved { self.read(end_read, until, &permit).await } else { None }
            };
            let (written, following) = tokio::join!(write, read);
            let start = end;
            end += written?;
            self.tiers.limits.engine.cache_blocks(&reservation, start..end);
            next = following;
        }
        Ok((end - first, reading))
    }

    /// Writes the records of blocks from `start` on. Returns how many of these blocks are there, up to a record that is not what was saved.
    /// Invariant 3: the writer keeps the blocks, also when this future is dropped.
    async fn write(
        &self,
        start: usize,
        records: Vec<Arc<Record>>,
        reservation: Arc<PrefixReservation>,
        permit: Permit,
    ) -> anyhow::Result<usize> {
        let tiers = self.tiers.clone();
        let written = spawn_blocking(move || {
            let _permit = permit;
            let end = start + records.len();
            let num_ready = reservation.num_cached_blocks().clamp(start, end);
            let (records, blocks) = (&records[num_ready - start..], &reservation.blocks()[num_ready..end]);
            let num_whole = tiers.store.write_to_pool(records, blocks)?;
            anyhow::Ok(num_ready - start + num_whole)
        });
        written.await?.context("the pool's device")
    }

    /// Blocks for as many of those that are wanted as there is room for.
    async fn reserve(&self) -> anyhow::Result<Option<PrefixReservation>> {
        let first = self.num_pooled;
        let wanted = &self.hashes[..first + self.worth.num_blocks];
        let found = self.tiers.limits.engine.reserve_blocks(wanted, 0, first + 1).await?;
        Ok(found.filter(|found| found.num_cached_blocks() >= first))
    }

    /// The records of a batch from block `first` on, and how long reading them took; `None`: no more are wanted.
    async fn read(
        &self,
        first: usize,
        until: Instant,
        permit: &Permit,
    ) -> Option<anyhow::Result<(Vec<Arc<Record>>, Duration)>> {
        let wanted = self.wanted(first);
        if wanted.is_empty() {
            return None;
        }
        let batch = self.tiers.batch(wanted, permit);
        let note = |reading| *self.reading.lock().unwrap_or_else(PoisonError::into_inner) = reading;
        note(Some((first, first + batch.len(), Instant::now())));
        let read = self.tiers.read(batch, until, permit).await;
        note(None);
        Some(read)
    }
}

impl Tiers {
    /// What the tiers have of the blocks after the first `num_before`, as far as reading them saves time.
    pub(crate) fn worth(&self, hashes: &[BlockHash], num_before: usize, mode: ReadMode) -> Worth {
        let compute = |num_blocks| self.limits.compute_blocks(num_before, num_blocks);
        self.store.worth(&hashes[num_before..], compute, mode)
    }

    /// How long a recall may take, and for how long it may read before an object store is given up that is slower than expected: less than
    /// computing takes, and what came is kept.
    pub(crate) fn bounds(&self, worth: &Worth) -> (Duration, Duration) {
        let num_tokens = worth.num_blocks * self.block_size();
        let limit = self.limits.deadline(num_tokens).max(worth.compute);
        (limit, (worth.expected + worth.compute) / 2)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::unix::fs::FileExt,
        path::Path,
    };

    use baton_engine::{EngineConfig, EngineThread, TokenEvent};
    use baton_engine_testing::FakeModel;
    use baton_kv_cache::{KvDtype, KvFormat, KvLayout};
    use baton_kv_store::{HostConfig, KvStore, StoreConfig};
    use baton_request::SamplingParams;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::{limits::FetchLimits, save::SaveAtEnd};

    /// Blocks of one page, which a pool reads from shared memory itself.
    const LAYOUT: KvLayout =
        KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 2, head_dim: 32, dtype: KvDtype::F32 };
    const NUM_BLOCKS: usize = 10;
    const PATIENCE: Duration = Duration::from_secs(60);

    /// The tiers of a worker with a host tier in this directory.
    fn open(dir: &Path) -> (EngineThread, Arc<Tiers>) {
        let config = EngineConfig {
            num_blocks: 64,
            max_running: 2,
            token_budget: 16,
            max_drafted_step_tokens: 16,
            itl_target: None,
            context_length: 256,
            max_waiting: 2,
            prefix_cache: true,
            model_revision: "fake".into(),
            step_prior: None,
            grammars: None,
            blending: None,
            clock: Instant::now,
            thread_waits: || Duration::ZERO,
        };
        let executor = FakeModel { layout: LAYOUT, ..FakeModel::new(LAYOUT.block_size) }.executor();
        let (engine, thread) = baton_engine::start(executor, None, config).expect("it starts");
        let host = HostConfig { max_bytes: 1 << 20, dir: Some(dir.to_owned()) };
        let stores = StoreConfig { host: Some(host), ..StoreConfig::default() };
        let format = KvFormat::new("fake".into(), &LAYOUT, "theta=1".into());
        let store = KvStore::open(&stores, &format, engine.storage().clone(), |_, _| ()).expect("it opens");
        let limits = FetchLimits { engine, fetch_deadline: Some(PATIENCE), handoff_deadline: PATIENCE };
        (thread, Arc::new(Tiers::over(store, limits, TaskTracker::new())))
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_damaged_record_costs_no_block_before_it() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        let prompt = (0..(NUM_BLOCKS * LAYOUT.block_size + 1) as u32).map(|idx| idx % 64).collect();
        let sampling = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
        let request = Request { prompt, sampling, ..Request::default() };
        let (_saving, saver) = open(dir.path());
        let save = SaveAtEnd::new(Some(&saver), &request);
        let mut stream = saver.limits.engine.generate(request.clone()).expect("accepted");
        while !matches!(stream.next().await, Some(TokenEvent::Finished(_))) {}
        drop(save);
        let deadline = Instant::now() + PATIENCE;
        while saver.counts()[0].num_held < NUM_BLOCKS as u64 {
            assert!(Instant::now() < deadline, "{:?}", saver.counts());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }

        // A byte of the fourth block, which is in the fourth slot.
        let tier = fs::read_dir(dir.path()).expect("it is there").flatten().next().expect("one tier").path();
        let slabs = File::options().read(true).write(true).open(tier.join("slabs")).expect("it is there");
        let (mut byte, at) = ([0], 3 * LAYOUT.block_bytes() as u64 + 77);
        slabs.read_exact_at(&mut byte, at).expect("it is long enough");
        slabs.write_all_at(&[byte[0] ^ 8], at).expect("it is long enough");
        let (_reading, reader) = open(dir.path());
        let recall = Recall::for_peer(Some(&reader), &request).await.expect("the tier has it");
        assert!(recall.run().await.is_none());
        let engine = &reader.limits.engine;
        let hashes = engine.prefix_hashes(&request, request.prompt.len());
        let held = engine.hold_cached(hashes.into()).await.expect("it runs");
        assert_eq!((held.blocks().len(), reader.counts()[0].damaged), (3, 1));
    }
}
