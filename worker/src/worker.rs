//! A running worker, as its services see it.

use std::sync::{Arc, OnceLock};

use baton_cluster::{Dialer, WorkerId, WorkerRecord};
use baton_engine::EngineHandle;
use baton_kv_cache::KvFormat;
use baton_kv_transfer::{TransportCounts, TransportKind};
use baton_proto::v1;

use crate::{config::WorkerConfig, lifecycle::Lifecycle, metrics::WorkerMetrics};

/// Which way KV moves through a worker's data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Out of a prefill worker.
    Sent,
    /// Into a decode worker.
    Received,
}

impl Direction {
    /// "sent" or "received".
    pub fn name(self) -> &'static str {
        match self {
            Direction::Sent => "sent",
            Direction::Received => "received",
        }
    }
}

/// Reads the counters of a data plane.
pub type ReadCounts = Box<dyn Fn(TransportKind) -> TransportCounts + Send + Sync>;

/// The data plane's counters, once there is one.
pub(crate) type DataPlane = Arc<OnceLock<(Direction, ReadCounts)>>;

/// What the services of one worker share.
pub struct Worker {
    pub(crate) config: WorkerConfig,
    pub(crate) record: WorkerRecord,
    pub(crate) engine: EngineHandle,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) metrics: WorkerMetrics,
    pub(crate) data_plane: DataPlane,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("record", &self.record).finish_non_exhaustive()
    }
}

impl Worker {
    /// Its name.
    pub fn id(&self) -> &WorkerId {
        &self.record.id
    }

    /// This life of it.
    pub fn incarnation(&self) -> u64 {
        self.record.incarnation
    }

    /// What others know of it.
    pub fn record(&self) -> &WorkerRecord {
        &self.record
    }

    /// What its blocks mean.
    pub fn kv_format(&self) -> &KvFormat {
        &self.record.kv_format
    }

    /// What it was started with.
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }

    /// How it calls routers and other workers.
    pub fn dialer(&self) -> Dialer {
        Dialer::new(self.config.tls.clone())
    }

    /// What computes.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Where it stands.
    pub fn lifecycle(&self) -> &Lifecycle {
        &self.lifecycle
    }

    /// What it counts.
    pub fn metrics(&self) -> &WorkerMetrics {
        &self.metrics
    }

    /// Makes the data plane's counters part of metrics and load reports. Called once, by the role.
    pub fn set_data_plane(&self, direction: Direction, read: ReadCounts) {
        assert!(self.data_plane.set((direction, read)).is_ok(), "a worker has one data plane");
    }

    /// How busy it is.
    pub fn load(&self) -> v1::Load {
        let load = *self.engine.load().borrow();
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let handoff_bytes = self.data_plane.get().map(|(_, read)| {
            let bytes = |kind: TransportKind| v1::TransportBytes {
                transport: kind.name().to_owned(),
                bytes: read(kind).bytes,
            };
            TransportKind::ALL.map(bytes).into()
        });
        v1::Load {
            num_waiting: count(load.num_waiting),
            num_running: count(load.num_running),
            num_free_blocks: count(load.num_free_blocks),
            num_total_blocks: count(load.num_total_blocks),
            num_queued_tokens: load.num_queued_tokens as u64,
            draining: self.lifecycle.is_draining(),
            handoff_bytes: handoff_bytes.unwrap_or_default(),
        }
    }
}
