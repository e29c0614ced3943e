//! A worker's metrics, under their names in `/metrics`. What vLLM measures, too, is in `baton_worker_metrics`.

use std::{sync::Weak, time::Duration};

use baton_engine::{BlendCounts, DraftCounts, EngineHandle, EngineLoad};
use baton_handoff::{HandoffError, TransportKind};
use baton_kv_store::TierCounts;
use baton_telemetry::{Metrics, TracePoint};
use baton_transfer::TransportCounts;
use baton_worker_metrics::{EndedRequests, RequestClock, VllmMetrics};
use baton_worker_tiers::Tiers;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::ConstGauge,
        histogram::{Histogram, exponential_buckets},
    },
};
use tracing::Span;

use crate::data_plane::{DataPlane, KvDirection};

/// Counters and histograms that services feed.
#[derive(Clone, Debug)]
pub struct WorkerMetrics {
    handoffs: Family<Outcome, Counter>,
    /// Seconds from `Begin` to the outcome.
    pub handoff_seconds: Histogram,
    /// Seconds of a committed handoff after the first token and the grant: transfer that no computation hid.
    pub exposed_seconds: Histogram,
    /// Seconds from the start of a remote prefill until this worker had blocks for it.
    pub block_wait_seconds: Histogram,
    prefix_fetches: Family<Outcome, Counter>,
    prefix_fetched_tokens: Counter,
    prefix_waits: Family<PrefixFrom, Histogram>,
    prefixes_given: Family<Outcome, Counter>,
    blends_refused: Family<Refusal, Counter>,
    blend_audits: Family<Audited, Histogram>,
    /// Requests accepted.
    requests: Family<PrefillPlace, Counter>,
    ended: EndedRequests,
    vllm: VllmMetrics,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

/// Why a prompt with passages is computed in full: "off", "model", "uncalibrated", "closed".
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Refusal {
    reason: &'static str,
}

/// The ratio of an audited prompt: "calibrated", or "smaller" than that.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Audited {
    ratio: &'static str,
}

/// Where cached KV comes from: "tiers" or another "worker".
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PrefixFrom {
    source: &'static str,
}

/// Where a request's prompt is computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PrefillPlace {
    /// "local", "remote", or on a prefill worker "handoff".
    prefill: &'static str,
}

/// Of times from half a millisecond to a minute.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_5, 2.0, 18))
}

/// Of divergences from a hundred thousandth of a nat to 42.
fn divergences() -> Histogram {
    Histogram::new(exponential_buckets(1e-5, 4.0, 12))
}

impl WorkerMetrics {
    /// Registers everything, the engine's gauges and the data plane's bytes included.
    pub(crate) fn register(
        metrics: &Metrics,
        model: &str,
        engine: &EngineHandle,
        data_plane: DataPlane,
        tiers: Weak<Tiers>,
    ) -> WorkerMetrics {
        let vllm = metrics.register(|registry| VllmMetrics::register(registry, model, engine));
        let ended = metrics.register(EndedRequests::register);
        let ours = WorkerMetrics {
            handoffs: Family::default(),
            handoff_seconds: seconds(),
            exposed_seconds: seconds(),
            block_wait_seconds: seconds(),
            prefix_fetches: Family::default(),
            prefix_fetched_tokens: Counter::default(),
            prefix_waits: Family::new_with_constructor(seconds),
            prefixes_given: Family::default(),
            blends_refused: Family::default(),
            blend_audits: Family::new_with_constructor(divergences),
            requests: Family::default(),
            ended,
            vllm,
        };
        ours.start_at_zero();
        metrics.register(|registry| {
            registry.register("baton_handoffs", "Handoffs that ended, by how", ours.handoffs.clone());
            registry.register(
                "baton_handoff_seconds",
                "Seconds from the beginning of a handoff to its end",
                ours.handoff_seconds.clone(),
            );
            registry.register(
                "baton_handoff_exposed_seconds",
                "Seconds of committed handoffs that no computation hid",
                ours.exposed_seconds.clone(),
            );
            registry.register(
                "baton_handoff_block_wait_seconds",
                "Seconds that prompts computed elsewhere waited for blocks of this worker",
                ours.block_wait_seconds.clone(),
            );
            registry.register(
                "baton_prefix_fetches",
                "Cached prefixes requested from other workers, by outcome",
                ours.prefix_fetches.clone(),
            );
            registry.register(
                "baton_prefix_fetched_tokens",
                "Tokens whose KV was fetched from the cache of another worker",
                ours.prefix_fetched_tokens.clone(),
            );
            registry.register(
                "baton_prefix_wait_seconds",
                "Seconds that prompts waited for cached KV before they went to the engine, by where it came from",
                ours.prefix_waits.clone(),
            );
            registry.register(
                "baton_prefixes_given",
                "Cached prefixes that other workers requested, by outcome",
                ours.prefixes_given.clone(),
            );
            registry.register(
                "baton_blends_refused",
                "Prompts with passages that were computed in full, by reason",
                ours.blends_refused.clone(),
            );
            registry.register(
                "baton_blend_audit_kl",
                "Divergence of blended prompts from full prefills, in nats, of those that were audited, by ratio",
                ours.blend_audits.clone(),
            );
            registry.register("baton_worker_requests", "Requests taken, by plan", ours.requests.clone());
            registry.register_collector(Box::new(EngineCollector {
                engine: engine.clone(),
                data_plane,
                tiers,
            }));
        });
        ours
    }

    /// Series exist from the start: a rate over a series that appears later misses its first count.
    fn start_at_zero(&self) {
        for outcome in ["committed", "finished"].into_iter().chain(HandoffError::LABELS) {
            drop(self.handoffs.get_or_create(&Outcome { outcome }));
        }
        for outcome in ["fetched"].into_iter().chain(HandoffError::LABELS) {
            drop(self.prefix_fetches.get_or_create(&Outcome { outcome }));
        }
        for outcome in ["committed"].into_iter().chain(HandoffError::LABELS) {
            drop(self.prefixes_given.get_or_create(&Outcome { outcome }));
        }
        for source in ["tiers", "worker"] {
            drop(self.prefix_waits.get_or_create(&PrefixFrom { source }));
        }
        for reason in ["off", "model", "too_long", "uncalibrated", "closed"] {
            drop(self.blends_refused.get_or_create(&Refusal { reason }));
        }
        for ratio in ["calibrated", "smaller"] {
            drop(self.blend_audits.get_or_create(&Audited { ratio }));
        }
        for prefill in ["local", "remote", "handoff"] {
            drop(self.requests.get_or_create(&PrefillPlace { prefill }));
        }
    }

    /// A handoff ended: "committed", "finished" when the first token ended the request, or the error's label.
    pub fn handoff_ended(&self, outcome: &'static str) {
        self.handoffs.get_or_create(&Outcome { outcome }).inc();
    }

    /// A prefix was fetched ("fetched", with so many tokens), or was not: the error's label.
    pub fn prefix_fetched(&self, outcome: &'static str, num_tokens: usize) {
        self.prefix_fetches.get_or_create(&Outcome { outcome }).inc();
        self.prefix_fetched_tokens.inc_by(num_tokens as u64);
    }

    /// A prompt waited so long for KV from "tiers", or from another "worker".
    pub(crate) fn prefix_waited(&self, source: &'static str, waited: Duration) {
        self.prefix_waits.get_or_create(&PrefixFrom { source }).observe(waited.as_secs_f64());
    }

    /// A handoff of a cached prefix ended here: "committed" or the error's label.
    pub fn prefix_handed_over(&self, outcome: &'static str) {
        self.prefixes_given.get_or_create(&Outcome { outcome }).inc();
    }

    /// A prompt with passages is computed in full.
    pub(crate) fn blend_refused(&self, reason: &'static str) {
        self.blends_refused.get_or_create(&Refusal { reason }).inc();
    }

    /// A prompt that was blended with such a ratio was compared with a full prefill.
    pub(crate) fn blend_audited(&self, ratio: &'static str, kl: f64) {
        self.blend_audits.get_or_create(&Audited { ratio }).observe(kl);
    }

    /// A request was accepted; `span` is its part here. What it becomes is told to the clock.
    pub fn request_taken(
        &self,
        prefill: &'static str,
        num_prompt_tokens: usize,
        span: &Span,
    ) -> RequestClock {
        self.requests.get_or_create(&PrefillPlace { prefill }).inc();
        let (vllm, ended) = (self.vllm.clone(), self.ended.clone());
        RequestClock::start(vllm, ended, num_prompt_tokens, TracePoint::of(span))
    }
}

/// Read at each scrape.
struct EngineCollector {
    engine: EngineHandle,
    data_plane: DataPlane,
    /// The worker alone owns them: when it ends, they write what is queued.
    tiers: Weak<Tiers>,
}

impl std::fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EngineCollector")
    }
}

type Gauge = (&'static str, &'static str, fn(&EngineLoad) -> usize);

const GAUGES: [Gauge; 5] = [
    ("baton_engine_waiting", "Requests that wait for blocks or a place", |load| load.num_waiting),
    ("baton_engine_running", "Sequences that hold blocks", |load| load.num_running),
    ("baton_engine_free_blocks", "KV blocks without owner", |load| load.num_free_blocks),
    ("baton_engine_total_blocks", "KV blocks", |load| load.num_total_blocks),
    ("baton_engine_queued_tokens", "Prompt tokens that wait to be computed", |load| load.num_queued_tokens),
];

type Count = (&'static str, &'static str, fn(&TransportCounts) -> u64);

const COUNTS: [Count; 7] = [
    ("baton_handoff_bytes", "KV bytes moved by handoffs", |counts| counts.bytes),
    ("baton_handoff_pieces", "KV pieces moved by handoffs", |counts| counts.pieces),
    ("baton_handoff_routes", "Handoffs that took, or peers that used, a transport", |counts| counts.routes),
    ("baton_handoff_fallbacks", "Handoffs that took a transport because a better one failed", |counts| {
        counts.fallbacks
    }),
    ("baton_handoff_late_bytes", "Bytes that came for a revoked grant", |counts| counts.late_bytes),
    ("baton_handoff_connection_failures", "Connections that broke in use", |counts| counts.failures),
    ("baton_handoff_connection_rejections", "Connections whose peer was not admitted", |counts| {
        counts.rejections
    }),
];

type DraftCount = (&'static str, &'static str, fn(&DraftCounts) -> u64);

const DRAFT_COUNTS: [DraftCount; 2] = [
    ("baton_drafted_tokens", "Tokens drafted and verified", |counts| counts.drafted),
    ("baton_accepted_tokens", "Drafted tokens that were accepted", |counts| counts.accepted),
];

type BlendCount = (&'static str, &'static str, fn(&BlendCounts) -> u64);

const BLEND_COUNTS: [BlendCount; 6] = [
    ("baton_blends", "Prompts that were blended", |counts| counts.blended),
    ("baton_blended_tokens", "Tokens of blended prompts up to the end of their last passages", |counts| {
        counts.tokens
    }),
    ("baton_blend_computed_tokens", "Of those, tokens that were computed in all layers", |counts| {
        counts.tokens_computed
    }),
    ("baton_blend_reused_tokens", "Of those, tokens whose KV came from kept passages", |counts| {
        counts.tokens_reused
    }),
    ("baton_passages_found", "Passages of blended prompts that were kept", |counts| counts.passages_found),
    ("baton_passages_computed", "Passages of blended prompts that were computed", |counts| {
        counts.passages_computed
    }),
];

type TierCount = (&'static str, &'static str, fn(&TierCounts) -> u64);

const TIER_GAUGES: [TierCount; 2] = [
    ("baton_kv_tier_blocks", "Blocks that a tier below the pool holds", |tier| tier.num_held),
    ("baton_kv_tier_capacity_blocks", "Blocks that fit into a tier", |tier| tier.num_slots),
];

const TIER_COUNTS: [TierCount; 10] = [
    ("baton_kv_tier_hits", "Blocks that were read from a tier, also for a pool without room", |tier| {
        tier.hits
    }),
    ("baton_kv_tier_read_bytes", "Bytes of those blocks", |tier| tier.hits * tier.record_bytes),
    ("baton_kv_tier_writes", "Blocks that were written to a tier", |tier| tier.writes),
    ("baton_kv_tier_written_bytes", "Bytes of those blocks", |tier| tier.writes * tier.record_bytes),
    ("baton_kv_tier_evictions", "Blocks that made room for others in a tier", |tier| tier.evictions),
    (
        "baton_kv_tier_dropped",
        "Blocks that a tier did not get as too much waited or the pool failed",
        |tier| tier.dropped,
    ),
    ("baton_kv_tier_damaged", "Blocks that were not what was written, and not used", |tier| tier.damaged),
    ("baton_kv_tier_declined", "Blocks that were not read because computing is faster", |tier| tier.declined),
    ("baton_kv_tier_read_errors", "Reads, listings and measurements that failed or were late", |tier| {
        tier.read_errors
    }),
    ("baton_kv_tier_write_errors", "Writes that a tier's device refused", |tier| tier.write_errors),
];

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        // As vLLM's names have it.
        let load = self.engine.load_now();
        for (name, help, read) in GAUGES {
            let gauge = ConstGauge::new(read(&load) as i64);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        let computed = ConstCounter::new(self.engine.num_computed_tokens());
        let metric = encoder.encode_descriptor(
            "baton_engine_computed_tokens",
            "Tokens whose KV was computed, drafts included",
            None,
            computed.metric_type(),
        )?;
        computed.encode(metric)?;
        let forced = ("grammar", self.engine.forced_drafts());
        for (name, help, read) in DRAFT_COUNTS {
            let metric_type = ConstCounter::new(0_u64).metric_type();
            let mut family = encoder.encode_descriptor(name, help, None, metric_type)?;
            for (drafter, counts) in self.engine.drafts().into_iter().chain([forced]) {
                let counter = ConstCounter::new(read(&counts));
                counter.encode(family.encode_family(&[("drafter", drafter)])?)?;
            }
        }
        if let Some(counts) = self.engine.blends() {
            let gauge = ConstGauge::new(counts.store_bytes as i64);
            let help = "Bytes of KV of passages that are kept";
            let metric = encoder.encode_descriptor("baton_passage_bytes", help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
            for (name, help, read) in BLEND_COUNTS {
                let counter = ConstCounter::new(read(&counts));
                counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
            }
        }
        let tiers = self.tiers.upgrade();
        let resumed = ConstCounter::new(tiers.as_ref().map_or(0, |tiers| tiers.num_resumed_tokens()));
        let help = "Tokens of preempted sequences whose KV came back from tiers";
        let (name, metric_type) = ("baton_preempted_recalled_tokens", resumed.metric_type());
        resumed.encode(encoder.encode_descriptor(name, help, None, metric_type)?)?;
        let tiers: Vec<_> = tiers.iter().flat_map(|tiers| tiers.counts()).collect();
        for (name, help, read) in TIER_GAUGES {
            let metric_type = ConstGauge::new(0_i64).metric_type();
            let mut family = encoder.encode_descriptor(name, help, None, metric_type)?;
            for tier in &tiers {
                let gauge = ConstGauge::new(read(tier) as i64);
                gauge.encode(family.encode_family(&[("tier", tier.name)])?)?;
            }
        }
        for (name, help, read) in TIER_COUNTS {
            let metric_type = ConstCounter::new(0_u64).metric_type();
            let mut family = encoder.encode_descriptor(name, help, None, metric_type)?;
            for tier in &tiers {
                let counter = ConstCounter::new(read(tier));
                counter.encode(family.encode_family(&[("tier", tier.name)])?)?;
            }
        }
        let quarantined = ConstGauge::new(self.data_plane.receiver.load().num_quarantined_blocks as i64);
        let help = "Blocks that are not free because a peer may still write into them, though their handoff has ended";
        let (name, metric_type) = ("baton_handoff_quarantined_blocks", quarantined.metric_type());
        quarantined.encode(encoder.encode_descriptor(name, help, None, metric_type)?)?;
        for (name, help, read) in COUNTS {
            let metric_type = ConstCounter::new(0_u64).metric_type();
            let mut family = encoder.encode_descriptor(name, help, None, metric_type)?;
            for (kind, direction) in
                TransportKind::ALL.into_iter().flat_map(|kind| KvDirection::ALL.map(|d| (kind, d)))
            {
                let labels = [("transport", kind.name()), ("direction", direction.name())];
                let counter = ConstCounter::new(read(&self.data_plane.read(direction, kind)));
                counter.encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
