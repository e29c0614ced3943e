//! A running worker: what its services share.

use std::sync::Arc;

use baton_cluster::{Dialer, WorkerId, WorkerRecord};
use baton_engine::EngineHandle;
use baton_handoff::TransportKind;
use baton_kv_cache::KvFormat;
use baton_proto::v1;

use crate::{
    config::WorkerConfig,
    data_plane::{DataPlane, Direction},
    lifecycle::Lifecycle,
    metrics::WorkerMetrics,
    peers::Peers,
};

/// What the services of one worker share.
pub struct Worker {
    pub(crate) config: WorkerConfig,
    pub(crate) record: WorkerRecord,
    pub(crate) engine: EngineHandle,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) metrics: WorkerMetrics,
    pub(crate) data_plane: DataPlane,
    pub(crate) peers: Arc<Peers>,
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

    /// Its incarnation.
    pub fn incarnation(&self) -> u64 {
        self.record.incarnation
    }

    /// Its record in discovery.
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

    /// What dials routers and other workers.
    pub fn dialer(&self) -> &Dialer {
        self.peers.dialer()
    }

    /// Its engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Its phase and its tasks.
    pub fn lifecycle(&self) -> &Lifecycle {
        &self.lifecycle
    }

    /// Its counters.
    pub fn metrics(&self) -> &WorkerMetrics {
        &self.metrics
    }

    /// Moves KV to and from other workers.
    pub fn data_plane(&self) -> &DataPlane {
        &self.data_plane
    }

    /// Connections to other workers.
    pub fn peers(&self) -> &Arc<Peers> {
        &self.peers
    }

    /// Its load, for routers.
    pub fn load(&self) -> v1::Load {
        let load = *self.engine.load().borrow();
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let handoff_bytes = TransportKind::ALL.map(|kind| v1::TransportBytes {
            transport: kind.name().to_owned(),
            bytes: Direction::ALL.map(|direction| self.data_plane.read(direction, kind).bytes).iter().sum(),
        });
        v1::Load {
            num_waiting: count(load.num_waiting),
            num_running: count(load.num_running),
            num_free_blocks: count(load.num_free_blocks),
            num_total_blocks: count(load.num_total_blocks),
            num_queued_tokens: load.num_queued_tokens as u64,
            draining: self.lifecycle.is_draining(),
            handoff_bytes: handoff_bytes.into(),
            prefill_tokens_per_second: self.engine.prefill_rate().unwrap_or(0.0) as u64,
        }
    }
}
