//! The tiers of KV below a worker's pool.

use std::{sync::Arc, time::Instant};

use anyhow::Context;
use baton_engine::EngineHandle;
use baton_kv_cache::{BlockHash, KvFormat};
use baton_kv_events::BlockHolder;
use baton_kv_store::{DiskConfig, KvKey, KvStore, ObjectConfig, Record, StoreConfig, TierCounts};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
};

use crate::config::WorkerConfig;

/// Recalls that read at once. Each has at most a batch of KV between a tier and the pool, so this bounds memory, and
/// the threads that a disk that hangs can keep.
const MAX_RECALLS: usize = 4;

/// The tiers of a worker.
#[derive(Debug)]
pub struct Tiers {
    pub(crate) store: KvStore,
    /// Permits of recalls that read.
    reading: Arc<Semaphore>,
}

impl Tiers {
    /// Opens the tiers of a configuration; `None` if it names none.
    pub(crate) fn open(
        config: &WorkerConfig,
        format: &KvFormat,
        engine: &EngineHandle,
    ) -> anyhow::Result<Option<Tiers>> {
        let worker = || config.id.to_string();
        let object = config.object_kv.clone();
        let object = object.map(|(url, max_bytes)| ObjectConfig { url, worker: worker(), max_bytes });
        let disk = config.disk_kv.clone().map(|(dir, max_bytes)| DiskConfig { dir, max_bytes });
        if config.host_kv_bytes.is_none() && disk.is_none() && object.is_none() {
            return Ok(None);
        }
        let key = config.kv_key_file.as_deref().map(|path| {
            KvKey::read(path).with_context(|| format!("cannot use --kv-key-file {}", path.display()))
        });
        let config = StoreConfig { host_bytes: config.host_kv_bytes, disk, object, key: key.transpose()? };
        let started = Instant::now();
        let log = engine.cache_log().clone();
        let tell = move |events| log.append(BlockHolder::Store, events);
        let store = KvStore::open(&config, format, engine.storage().clone(), tell);
        let store = store.context("cannot open the tiers of KV below the pool")?;
        let tiers = Tiers { store, reading: Arc::new(Semaphore::new(MAX_RECALLS)) };
        for TierCounts { name, num_slots, num_held, record_bytes, .. } in tiers.store.counts() {
            let elapsed = started.elapsed();
            tracing::info!(tier = name, num_slots, num_held, record_bytes, ?elapsed, "tier of KV opened");
        }
        Ok(Some(tiers))
    }

    /// Reads [a batch](KvStore::batch) of records as [`KvStore::read`]. The permit is kept until they are in the pool.
    pub(crate) async fn read(
        self: &Arc<Self>,
        hashes: &[BlockHash],
        until: Instant,
    ) -> anyhow::Result<(Vec<Arc<Record>>, OwnedSemaphorePermit)> {
        let wanted = self.store.batch(hashes).to_vec();
        let permit = self.reading.clone().acquire_owned().await?;
        let tiers = self.clone();
        Ok(spawn_blocking(move || (tiers.store.read(&wanted, until), permit)).await?)
    }
}
