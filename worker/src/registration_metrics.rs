//! A worker's registration as a metric.

use std::fmt;

use baton_cluster::RegistrationState;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
};
use tokio::sync::watch;

/// Reads whether the worker is registered when metrics are asked for.
#[derive(Debug)]
pub(crate) struct RegistrationCollector(pub(crate) watch::Receiver<RegistrationState>);

impl Collector for RegistrationCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauge = ConstGauge::new(i64::from(*self.0.borrow() == RegistrationState::Registered));
        let help = "1 if the worker is registered; a router that starts does not find one that is not";
        let name = "baton_worker_registered";
        gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
    }
}
