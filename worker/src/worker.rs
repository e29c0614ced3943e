//! A running worker: what its services share.

use std::sync::Arc;

use baton_cluster::{Dialer, WorkerId, WorkerRecord};
use baton_cost::LinkLine;
use baton_engine::EngineHandle;
use baton_handoff::TransportKind;
use baton_kv_cache::KvFormat;
use baton_kv_store::TierCounts;
use baton_proto::v1;
use baton_worker_tiers::{FetchLimits, Tiers};

use crate::{
    blending::state::Blending,
    config::WorkerConfig,
    data_plane::{DataPlane, KvDirection},
    lifecycle::Lifecycle,
    links::{Links, PeerLinks},
    metrics::WorkerMetrics,
    peers::Peers,
    tickets::Tickets,
    watchers::Watchers,
};

/// What the services of one worker share.
pub struct Worker {
    pub(crate) config: WorkerConfig,
    pub(crate) record: WorkerRecord,
    pub(crate) engine: EngineHandle,
    pub(crate) fetch_limits: FetchLimits,
    pub(crate) tiers: Option<Arc<Tiers>>,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) metrics: WorkerMetrics,
    pub(crate) blending: Blending,
    pub(crate) data_plane: DataPlane,
    pub(crate) peers: Arc<Peers>,
    pub(crate) tickets: Tickets,
    pub(crate) links: Links,
    pub(crate) peer_links: PeerLinks,
    pub(crate) watchers: Watchers,
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

    /// How long it waits for KV that it could compute.
    pub fn fetch_limits(&self) -> &FetchLimits {
        &self.fetch_limits
    }

    /// The tiers below its pool, if it has any.
    pub fn tiers(&self) -> Option<&Arc<Tiers>> {
        self.tiers.as_ref()
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

    /// How fast KV comes from other workers.
    pub fn peer_links(&self) -> &PeerLinks {
        &self.peer_links
    }

    /// Which requests its load reports count.
    pub fn tickets(&self) -> &Tickets {
        &self.tickets
    }

    /// Its load, for the router of this name, or for a reader without one: 0.
    pub fn load(&self, router: u64) -> v1::Load {
        // Before the load: a request that is covered now is counted by it, or is gone.
        let covered = self.tickets.covered(router);
        let load = self.engine.load_now();
        let pace = self.engine.pace();
        let blending = self.blending.point();
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let handoff_bytes = TransportKind::ALL.map(|kind| v1::TransportBytes {
            transport: kind.name().to_owned(),
            bytes: KvDirection::ALL.map(|direction| self.data_plane.read(direction, kind).bytes).iter().sum(),
        });
        v1::Load {
            num_waiting: count(load.num_waiting),
            num_running: count(load.num_running),
            num_free_blocks: count(load.num_free_blocks),
            num_total_blocks: count(load.num_total_blocks),
            num_queued_tokens: load.num_queued_tokens as u64,
            num_queued_blocks: count(load.num_queued_blocks),
            draining: self.lifecycle.is_draining(),
            handoff_bytes: handoff_bytes.into(),
            prefill_tokens_per_second: self.engine.prefill_rate().unwrap_or(0.0) as u64,
            step: self.engine.expected_step(&pace).map(|step| v1::StepLine {
                fixed: step.fixed,
                per_token: step.per_token,
                per_context_token: step.per_context_token,
                per_pair: step.per_pair,
                num_steps: pace.num_steps,
            }),
            num_decoding: count(pace.num_decoding),
            num_context_tokens: pace.num_context_tokens as u64,
            num_queued_pairs: pace.num_queued_pairs as u64,
            recent_itl_seconds: pace.recent_itl_seconds,
            recent_tokens_per_step: self.engine.expected_yield(&pace).num_tokens(),
            max_step_tokens: count(self.engine.token_budget()),
            itl_target_seconds: self.engine.itl_target().map_or(0.0, |target| target.as_secs_f64()),
            is_home_of_another: self.watchers.prefer_another(self.id(), router),
            links: self.links.read().into_iter().map(link_rate).collect(),
            covered,
            blend_ratio: blending.map(|point| point.ratio),
            blend_layer: blending.map_or(0, |point| point.layer),
            blend_closed: self.blending.is_closed_by_audits(),
            tiers: self.tiers.iter().flat_map(|tiers| tiers.counts()).map(kv_tier).collect(),
            // Of each reader its own.
            cache: None,
        }
    }
}

fn kv_tier(tier: TierCounts) -> v1::KvTier {
    v1::KvTier {
        name: tier.name.to_owned(),
        num_slots: tier.num_slots,
        num_held: tier.num_held,
        record_bytes: tier.record_bytes,
        num_hits: tier.hits,
        num_writes: tier.writes,
        num_evicted: tier.evictions,
        num_dropped: tier.dropped,
        num_damaged: tier.damaged,
        num_errors: tier.read_errors + tier.write_errors,
        num_declined: tier.declined,
        recall_token_seconds: tier.recall_token_seconds,
        recall_latency_seconds: tier.recall_latency_seconds,
        store_name: tier.store_name,
    }
}

fn link_rate((kind, line): (TransportKind, LinkLine)) -> v1::LinkRate {
    v1::LinkRate {
        transport: kind.name().to_owned(),
        latency_seconds: line.latency_seconds,
        bytes_per_second: line.bytes_per_second,
    }
}
