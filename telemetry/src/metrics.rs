//! The registry of metrics, and the buckets of histograms.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use prometheus_client::{encoding::text, metrics::histogram::Histogram, registry::Registry};

use crate::{process, watched::Watched, watched_exporter::SpanCounts};

/// A handle to the process's metrics. Clones share them.
///
/// Counters get `_total` appended when they are written: register `baton_router_requests`, read
/// `baton_router_requests_total`.
#[derive(Clone, Default)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
}

impl Metrics {
    /// The content type of what [`encode`](Self::encode) returns.
    pub const CONTENT_TYPE: &'static str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

    /// No metrics yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Those of the process, its build and its spans: `process_*`, `baton_build_info`, `baton_exported_spans_total`,
    /// `baton_lost_spans_total`. `component` is what the process does: "router", "prefill", "decode".
    pub fn of_process(component: &str) -> Self {
        let metrics = Self::new();
        metrics.register(|registry| {
            process::register(registry, component);
            SpanCounts::of_process().register(registry);
        });
        metrics
    }

    /// Registers metrics, once, when the part that counts them is built. Returns what `register` returns: usually a
    /// struct of the counters, which then count without this lock.
    pub fn register<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Registers a gauge that is 1 while `is_true`, else 0. It is read whenever metrics are asked for.
    pub fn watch(
        &self,
        name: &'static str,
        help: &'static str,
        is_true: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        let gauge = Box::new(Watched::new(name, help, is_true));
        self.register(|registry| registry.register_collector(gauge));
    }

    /// All metrics in the OpenMetrics text format, which Prometheus reads.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        self.register(|registry| text::encode(&mut text, registry)).expect("a String takes everything");
        text
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Seconds from a request to its first token: 1 ms to 2 min.
pub fn ttft_histogram() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0, 120.0,
    ])
}

/// Seconds between one token and the next: 0.5 ms to 5 s.
pub fn itl_histogram() -> Histogram {
    Histogram::new([
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
        1.0, 2.5, 5.0,
    ])
}

/// Seconds from a request to its last token: 5 ms to 40 min.
pub fn e2e_histogram() -> Histogram {
    Histogram::new([
        0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
        1280.0, 2400.0,
    ])
}

/// Tokens per request: 1 to 2^20, in powers of two.
pub fn token_count_histogram() -> Histogram {
    Histogram::new((0..=20).map(|power| f64::from(1u32 << power)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use prometheus_client::metrics::counter::Counter;

    use super::*;

    #[test]
    fn registered_metrics_are_encoded() {
        let metrics = Metrics::new();
        let (requests, ttft) = metrics.clone().register(|registry| {
            let requests = Counter::<u64>::default();
            let ttft = ttft_histogram();
            registry.register("baton_requests", "Requests received", requests.clone());
            registry.register("baton_ttft_seconds", "Time to first token", ttft.clone());
            (requests, ttft)
        });
        requests.inc_by(3);
        ttft.observe(0.03);
        let text = metrics.encode();
        assert!(text.contains("baton_requests_total 3\n"), "{text}");
        assert!(text.contains("baton_ttft_seconds_bucket{le=\"0.04\"} 1\n"), "{text}");
        assert!(text.contains("baton_ttft_seconds_bucket{le=\"0.02\"} 0\n"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[test]
    fn a_watched_state_is_read_when_metrics_are_asked_for() {
        let is_ready = Arc::new(AtomicBool::new(false));
        let metrics = Metrics::new();
        let watched = is_ready.clone();
        metrics.watch("baton_ready", "Whether it is ready", move || watched.load(Ordering::Relaxed));
        for (ready, line) in [(false, "baton_ready 0\n"), (true, "baton_ready 1\n")] {
            is_ready.store(ready, Ordering::Relaxed);
            let text = metrics.encode();
            assert!(text.contains("# TYPE baton_ready gauge\n") && text.contains(line), "{text}");
        }
    }

    #[test]
    fn buckets_rise() {
        for histogram in [ttft_histogram(), itl_histogram(), e2e_histogram(), token_count_histogram()] {
            let metrics = Metrics::new();
            metrics.register(|registry| registry.register("h", "h", histogram));
            let bounds: Vec<f64> = metrics
                .encode()
                .split("le=\"")
                .skip(1)
                .filter_map(|rest| rest.split('"').next()?.parse().ok())
                .collect();
            assert!(bounds.len() > 10 && bounds.is_sorted(), "{bounds:?}");
        }
    }
}
