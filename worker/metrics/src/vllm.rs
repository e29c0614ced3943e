//! A worker's metrics under the names, labels and buckets that vLLM gives them, for the gateways, autoscalers and dashboards
//! that read those. Where vLLM's buckets begin too high for what occurs here, finer ones come before them.
//!
//! Times are those of this worker: a prefill worker measures until its first token, a decode worker its whole part.

use baton_engine::{EngineHandle, EngineTotals};
use baton_request::FinishReason;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::ConstGauge,
        histogram::Histogram,
        info::Info,
    },
    registry::Registry,
};

/// Buckets of times until the first token, in seconds.
const TTFT: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// Buckets of times between two tokens. vLLM's begin at 0.01.
const ITL: [f64; 24] = [
    0.000_5, 0.001, 0.002_5, 0.005, 0.007_5, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Buckets of the phases of a request. vLLM's begin at 0.3.
const PHASE: [f64; 29] = [
    0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0,
    20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];

/// Times and outcomes of requests.
#[derive(Clone, Debug)]
pub struct VllmMetrics {
    pub(crate) ttft: Histogram,
    pub(crate) itl: Histogram,
    pub(crate) tpot: Histogram,
    pub(crate) e2e: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) inference: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    pub(crate) prompt_lengths: Histogram,
    pub(crate) output_lengths: Histogram,
    pub(crate) prompt_tokens: Counter,
    pub(crate) output_tokens: Counter,
    finished: Family<Finished, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Finished {
    finished_reason: &'static str,
}

impl VllmMetrics {
    /// Registers everything, with the labels `model_name` and `engine`.
    pub fn register(registry: &mut Registry, model: &str, engine: &EngineHandle) -> VllmMetrics {
        let labels = [("model_name".into(), model.to_owned().into()), ("engine".into(), "0".into())];
        let registry = registry.sub_registry_with_labels(labels.into_iter());
        let ours = VllmMetrics::new(engine.context_length());
        for (name, help, histogram) in [
            ("vllm:time_to_first_token_seconds", "From a request to its first token", &ours.ttft),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a request", &ours.itl),
            // The name before vLLM 0.11, which dashboards still read.
            ("vllm:time_per_output_token_seconds", "Between two tokens of a request", &ours.itl),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean time between tokens of a request",
                &ours.tpot,
            ),
            ("vllm:e2e_request_latency_seconds", "From a request to its end", &ours.e2e),
            (
                "vllm:request_queue_time_seconds",
                "From the engine taking a request to its first step",
                &ours.queue,
            ),
            ("vllm:request_inference_time_seconds", "From the first step to the end", &ours.inference),
            ("vllm:request_prefill_time_seconds", "From the first step to the first token", &ours.prefill),
            ("vllm:request_decode_time_seconds", "From the first token to the last", &ours.decode),
            ("vllm:request_prompt_tokens", "Prompt tokens per request", &ours.prompt_lengths),
            ("vllm:request_generation_tokens", "Tokens sent per request", &ours.output_lengths),
        ] {
            registry.register(name, help, histogram.clone());
        }
        registry.register(
            "vllm:prompt_tokens",
            "Prompt tokens of accepted requests",
            ours.prompt_tokens.clone(),
        );
        registry.register("vllm:generation_tokens", "Tokens sent", ours.output_tokens.clone());
        registry.register(
            "vllm:request_success",
            "Requests that ended well, by reason",
            ours.finished.clone(),
        );
        // Series exist from the start: a rate over a series that appears later misses its first count.
        for reason in [FinishReason::Stop, FinishReason::Length, FinishReason::Abort] {
            drop(ours.finished.get_or_create(&Finished { finished_reason: reason.name() }));
        }
        let config = engine.storage().layout();
        let cache = vec![
            ("block_size", config.block_size.to_string()),
            ("num_gpu_blocks", engine.load().borrow().num_total_blocks.to_string()),
        ];
        registry.register("vllm:cache_config", "The KV pool", Info::new(cache));
        registry.register_collector(Box::new(EngineReader(engine.clone())));
        ours
    }

    /// Nothing is measured yet.
    pub(crate) fn new(context_length: usize) -> VllmMetrics {
        VllmMetrics {
            ttft: Histogram::new(TTFT),
            itl: Histogram::new(ITL),
            tpot: Histogram::new(ITL),
            e2e: Histogram::new(PHASE),
            queue: Histogram::new(PHASE),
            inference: Histogram::new(PHASE),
            prefill: Histogram::new(PHASE),
            decode: Histogram::new(PHASE),
            prompt_lengths: Histogram::new(lengths(context_length)),
            output_lengths: Histogram::new(lengths(context_length)),
            prompt_tokens: Counter::default(),
            output_tokens: Counter::default(),
            finished: Family::default(),
        }
    }

    pub(crate) fn on_finish(&self, reason: FinishReason) {
        self.finished.get_or_create(&Finished { finished_reason: reason.name() }).inc();
    }
}

/// Buckets of lengths: 1, 2, 5, 10, 20, 50, … up to the longest sequence.
fn lengths(context_length: usize) -> impl Iterator<Item = f64> {
    let decades = std::iter::successors(Some(1_usize), |decade| decade.checked_mul(10));
    let bounds = decades.flat_map(|decade| [1, 2, 5].map(|digit: usize| digit.saturating_mul(decade)));
    bounds.take_while(move |&bound| bound <= context_length).map(|bound| bound as f64)
}

/// What an engine says of itself, at each scrape.
#[derive(Debug)]
struct EngineReader(EngineHandle);

impl Collector for EngineReader {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let load = self.0.load_now();
        let used = load.num_total_blocks.saturating_sub(load.num_free_blocks);
        let used = used as f64 / load.num_total_blocks.max(1) as f64;
        for (name, help, value) in [
            ("vllm:num_requests_running", "Sequences that hold blocks", load.num_running as f64),
            (
                "vllm:num_requests_waiting",
                "Requests that wait for blocks or a place",
                load.num_waiting as f64,
            ),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks that have an owner, 0 to 1", used),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let EngineTotals { num_preempted, num_prompt_tokens, num_cached_tokens } = self.0.totals();
        for (name, help, value) in [
            ("vllm:num_preemptions", "Sequences that lost their blocks to others", num_preempted),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", num_prompt_tokens),
            ("vllm:prefix_cache_hits", "Of those, the tokens found", num_cached_tokens),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_ascend_and_go_on_as_those_of_vllm() {
        for (buckets, of_vllm) in [(&ITL[..], [0.01, 0.025, 0.05]), (&PHASE[..], [0.3, 0.5, 0.8])] {
            assert!(buckets.is_sorted_by(|a, b| a < b), "{buckets:?}");
            assert!(buckets.windows(3).any(|window| window == of_vllm), "{buckets:?}");
        }
    }
}
