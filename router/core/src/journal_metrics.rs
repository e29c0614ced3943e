//! The journal's counts as metrics.

use std::{fmt, sync::Arc};

use baton_journal::Journal;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};

/// Reads the counts when metrics are asked for.
#[derive(Debug)]
pub(crate) struct JournalCollector(pub(crate) Arc<Journal>);

impl Collector for JournalCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = self.0.counts();
        let gauges = [
            ("running", "Streams in the journal that a client reads", counts.num_running as i64),
            ("parked", "Streams in the journal that wait for their client", counts.num_parked as i64),
            ("ended", "Streams in the journal that are complete", counts.num_ended as i64),
            ("bytes", "Bytes of the journal's files", counts.num_bytes as i64),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(value);
            let name = format!("baton_journal_{name}");
            gauge.encode(encoder.encode_descriptor(&name, help, None, gauge.metric_type())?)?;
        }
        let counters = [
            ("resumed", "Streams that were resumed", counts.num_resumed),
            (
                "refused",
                "Requests that were refused, as the journal was full, or its disk failed or was too slow",
                counts.num_refused,
            ),
            (
                "failed_writes",
                "Writes of the journal that failed, and reads of what is written anew",
                counts.num_failed,
            ),
            (
                "dropped_tokens",
                "Tokens that could not be journalled, and may be computed again",
                counts.num_dropped,
            ),
            ("damaged", "Damaged records of the journal", counts.num_damaged),
            (
                "expired",
                "Streams that no client resumed in time, or before others took their room",
                counts.num_expired,
            ),
        ];
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value);
            let name = format!("baton_journal_{name}");
            counter.encode(encoder.encode_descriptor(&name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}
