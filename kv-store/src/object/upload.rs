//! Writes segments: one after the other, with patience.

use std::{sync::Arc, time::Duration};

use object_store::{ObjectStoreExt, PutPayload, path::Path};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout_at},
};

use super::shared::{MAX_SEGMENT_RECORDS, SEGMENT_BYTES, Shared};
use crate::{
    counts::{Count, is_logged},
    record::Record,
};

/// How long a segment waits for more records.
const FLUSH_AFTER: Duration = Duration::from_secs(2);
/// A write that fails is tried again after so long, then after four times that, …
const FIRST_WAIT: Duration = Duration::from_millis(250);
const NUM_TRIES: u32 = 5;

/// Writes all records that come, until no more can.
pub(super) async fn all(shared: Arc<Shared>, incarnation: u64, mut records: mpsc::Receiver<Arc<Record>>) {
    let max_records = max_records(&shared);
    let mut number = 0;
    while let Some(first) = records.recv().await {
        let mut segment = vec![first];
        let flush_at = Instant::now() + FLUSH_AFTER;
        while segment.len() < max_records
            && let Ok(Some(record)) = timeout_at(flush_at, records.recv()).await
        {
            segment.push(record);
        }
        let name = shared.own_dir.clone().join(format!("{incarnation:016x}-{number:06}"));
        number += 1;
        write(&shared, &name, segment).await;
        shared.make_room().await;
    }
    // What was forgotten since.
    shared.make_room().await;
}

/// Records of a segment.
pub(super) fn max_records(shared: &Shared) -> usize {
    // Several segments, so that not all is deleted at once.
    let max_bytes = SEGMENT_BYTES.min(usize::try_from(shared.max_bytes / 4).unwrap_or(usize::MAX));
    (max_bytes / shared.shape.record_bytes()).clamp(1, MAX_SEGMENT_RECORDS)
}

async fn write(shared: &Shared, name: &Path, records: Vec<Arc<Record>>) {
    let records = without_spoiled(shared, records);
    if records.is_empty() {
        return;
    }
    let hashes: Vec<_> = records.iter().map(|record| record.name.hash).collect();
    let payload = PutPayload::from(shared.shape.write_segment(&records));
    drop(records);
    let num_bytes = payload.content_length() as u64;
    let mut wait = FIRST_WAIT;
    for nth in 1..=NUM_TRIES {
        let Err(error) = shared.store.put(name, payload.clone()).await else {
            shared.counters.add(Count::Writes, hashes.len() as u64);
            shared.lock().written(name.to_string(), hashes, num_bytes);
            return;
        };
        tracing::debug!(%error, nth, "the object store refuses a segment");
        if nth == NUM_TRIES {
            let num_before = shared.counters.add(Count::WriteErrors, hashes.len() as u64);
            if is_logged(num_before) {
                tracing::warn!(%error, num_before, "kv not saved: the object store refuses a segment");
            }
        } else {
            sleep(wait).await;
            wait *= 4;
        }
    }
    shared.lock().not_written(name.to_string(), hashes);
}

/// Blocks that were forgotten while they waited are not written.
fn without_spoiled(shared: &Shared, mut records: Vec<Arc<Record>>) -> Vec<Arc<Record>> {
    let mut catalogue = shared.lock();
    let spoiled: Vec<_> = records.extract_if(.., |record| catalogue.is_spoiled(record.name.hash)).collect();
    catalogue.give_up(spoiled.iter().map(|record| record.name.hash));
    records
}
