//! What a tier has done: counters for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a tier holds, and what it has done since it was opened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierCounts {
    /// Its name: "host", "disk", "object".
    pub name: &'static str,
    /// Records that fit.
    pub num_slots: u64,
    /// Records that it holds.
    pub num_held: u64,
    /// Bytes of one.
    pub record_bytes: u64,
    /// Blocks that were read. A few are not used: the pool has no room for them, or its device finds that they are damaged.
    pub hits: u64,
    /// Blocks that were written.
    pub writes: u64,
    /// Blocks that made room for others.
    pub evictions: u64,
    /// Blocks that were not written because too much waited, or the pool's device failed.
    pub dropped: u64,
    /// Records that were not what was written.
    pub damaged: u64,
    /// Blocks that were not read because computing them is faster, or the tier's speed is not known.
    pub declined: u64,
    /// Reads that failed; of an object store also fronts that were late, and listings, manifests and measurements that failed.
    pub read_errors: u64,
    /// Writes that the device refused.
    pub write_errors: u64,
    /// Seconds for the KV of a token that came from it recently, until that is in the pool; of an object store, as its speed was measured.
    /// 0: none came, or it is not measured, and no request waits for it.
    pub recall_token_seconds: f64,
    /// Seconds of an object store until the first byte comes.
    pub recall_latency_seconds: f64,
    /// Names an object store among those that workers share; 0: it is another tier.
    pub store_name: u64,
}

/// One of the counts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    Hits,
    Writes,
    Dropped,
    Damaged,
    Declined,
    ReadErrors,
    WriteErrors,
}

/// Whether what was counted so often before is worth a line in the log: the first time, the second, the third, the fifth and so on.
pub(crate) fn is_logged(num_before: u64) -> bool {
    num_before == 0 || num_before.is_power_of_two()
}

/// [`TierCounts`] as they grow.
#[derive(Debug, Default)]
pub(crate) struct TierCounters([AtomicU64; 7]);

impl TierCounters {
    /// Adds, and returns what was counted before.
    pub(crate) fn add(&self, count: Count, num: u64) -> u64 {
        self.0[count as usize].fetch_add(num, Ordering::Relaxed)
    }

    pub(crate) fn read(
        &self,
        name: &'static str,
        num_slots: u64,
        record_bytes: u64,
        num_held: usize,
        evictions: u64,
    ) -> TierCounts {
        let count = |count: Count| self.0[count as usize].load(Ordering::Relaxed);
        TierCounts {
            name,
            num_slots,
            num_held: num_held as u64,
            record_bytes,
            hits: count(Count::Hits),
            writes: count(Count::Writes),
            evictions,
            dropped: count(Count::Dropped),
            damaged: count(Count::Damaged),
            declined: count(Count::Declined),
            read_errors: count(Count::ReadErrors),
            write_errors: count(Count::WriteErrors),
            recall_token_seconds: 0.0,
            recall_latency_seconds: 0.0,
            store_name: 0,
        }
    }
}
