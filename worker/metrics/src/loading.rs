//! How far the weights are loaded, for those who wait for a worker to be ready.

use std::sync::atomic::AtomicU64;

use baton_telemetry::Metrics;
use prometheus_client::metrics::gauge::Gauge;

/// Bytes of the weights. Both are 0 until the size of the files is known; a draft model starts them anew.
#[derive(Clone, Debug, Default)]
pub struct LoadGauges {
    done: Gauge<u64, AtomicU64>,
    total: Gauge<u64, AtomicU64>,
}

impl LoadGauges {
    /// Registers the gauges.
    pub fn register(metrics: &Metrics) -> LoadGauges {
        let gauges = LoadGauges::default();
        metrics.register(|registry| {
            registry.register(
                "baton_worker_loaded_bytes",
                "Bytes of weights that are loaded",
                gauges.done.clone(),
            );
            registry.register(
                "baton_worker_load_bytes",
                "Bytes of weights that are to be loaded",
                gauges.total.clone(),
            );
        });
        gauges
    }

    /// So many bytes of `total` are loaded.
    pub fn set(&self, done: u64, total: u64) {
        self.done.set(done);
        self.total.set(total);
    }
}
