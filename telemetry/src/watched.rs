//! A gauge that is 1 or 0, read when metrics are asked for. It does not know what it says.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
};

/// A gauge over a state that is kept elsewhere.
pub(crate) struct Watched<F> {
    name: &'static str,
    help: &'static str,
    is_true: F,
}

impl<F: Fn() -> bool> Watched<F> {
    pub(crate) fn new(name: &'static str, help: &'static str, is_true: F) -> Watched<F> {
        Watched { name, help, is_true }
    }
}

impl<F: Fn() -> bool + Send + Sync + 'static> Collector for Watched<F> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauge = ConstGauge::new(i64::from((self.is_true)()));
        gauge.encode(encoder.encode_descriptor(self.name, self.help, None, gauge.metric_type())?)
    }
}

impl<F> fmt::Debug for Watched<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("name", &self.name).finish_non_exhaustive()
    }
}
