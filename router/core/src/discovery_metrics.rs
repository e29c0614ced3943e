//! Discovery as a metric.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
};
use tokio::sync::watch;

/// Reads whether the discovery service answers when metrics are asked for.
#[derive(Debug)]
pub(crate) struct DiscoveryCollector(pub(crate) watch::Receiver<bool>);

impl Collector for DiscoveryCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauge = ConstGauge::new(i64::from(*self.0.borrow()));
        let help = "1 if the discovery service answers; without it no worker is added";
        let name = "baton_router_discovery_connected";
        gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
    }
}
