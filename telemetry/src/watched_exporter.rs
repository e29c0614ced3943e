//! What becomes of spans: counted, and logged when their collector stops answering and when it answers again. It does not know how
//! spans travel.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{SpanData, SpanExporter},
};
use prometheus_client::{metrics::counter::Counter, registry::Registry};

/// Counts spans that were sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpanCounts {
    exported: Counter,
    lost: Counter,
}

impl SpanCounts {
    /// Those of this process. It has one export, which starts before any registry of metrics is there.
    pub(crate) fn of_process() -> SpanCounts {
        static COUNTS: LazyLock<SpanCounts> = LazyLock::new(SpanCounts::default);
        COUNTS.clone()
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let (exported, lost) = (self.exported.clone(), self.lost.clone());
        registry.register("baton_exported_spans", "Spans that the trace collector has taken", exported);
        registry.register("baton_lost_spans", "Spans that the trace collector did not take", lost);
    }
}

/// An exporter that is watched. A line for each batch that fails would flood the log.
#[derive(Debug)]
pub(crate) struct WatchedExporter<E> {
    exporter: E,
    endpoint: String,
    counts: SpanCounts,
    is_answering: AtomicBool,
}

impl<E> WatchedExporter<E> {
    pub(crate) fn new(exporter: E, endpoint: &str, counts: SpanCounts) -> WatchedExporter<E> {
        let is_answering = AtomicBool::new(true);
        WatchedExporter { exporter, endpoint: endpoint.to_owned(), counts, is_answering }
    }
}

impl<E: SpanExporter> SpanExporter for WatchedExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let num_spans = batch.len() as u64;
        let result = self.exporter.export(batch).await;
        let was_answering = self.is_answering.swap(result.is_ok(), Ordering::Relaxed);
        let endpoint = &self.endpoint;
        match &result {
            Ok(()) => {
                self.counts.exported.inc_by(num_spans);
                if !was_answering {
                    tracing::info!("the trace collector at {endpoint} answers again");
                }
            }
            Err(error) => {
                self.counts.lost.inc_by(num_spans);
                if was_answering {
                    tracing::warn!(%error, "the trace collector at {endpoint} does not answer; spans are lost");
                }
            }
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn shutdown(&self) -> OTelSdkResult {
        self.exporter.shutdown()
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use opentelemetry::trace::{Span, Tracer, TracerProvider};
    use opentelemetry_sdk::{
        error::OTelSdkError,
        trace::{InMemorySpanExporter, SdkTracerProvider},
    };

    use super::*;

    /// Fails while it is false.
    #[derive(Debug)]
    struct FakeExporter(AtomicBool);

    impl SpanExporter for FakeExporter {
        async fn export(&self, _: Vec<SpanData>) -> OTelSdkResult {
            match self.0.load(Ordering::Relaxed) {
                true => Ok(()),
                false => Err(OTelSdkError::InternalFailure("connection refused".into())),
            }
        }
    }

    fn spans(num: usize) -> Vec<SpanData> {
        let exported = InMemorySpanExporter::default();
        let provider = SdkTracerProvider::builder().with_simple_exporter(exported.clone()).build();
        for _ in 0..num {
            provider.tracer("test").start("span").end();
        }
        exported.get_finished_spans().expect("kept in memory")
    }

    #[test]
    fn a_collector_that_does_not_answer_is_logged_once_and_all_spans_are_counted() {
        let log = tempfile::NamedTempFile::new().expect("a file");
        let writer = log.reopen().expect("it is there");
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let counts = SpanCounts::default();
        let fake = FakeExporter(AtomicBool::new(true));
        let exporter = WatchedExporter::new(fake, "http://collector:4317", counts.clone());
        let batch = spans(6);
        tracing::subscriber::with_default(subscriber, || {
            for (answers, num_spans) in [(true, 1), (false, 2), (false, 3), (true, 4), (true, 5), (false, 6)]
            {
                exporter.exporter.0.store(answers, Ordering::Relaxed);
                let result = runtime.block_on(exporter.export(batch[..num_spans].to_vec()));
                assert_eq!(result.is_ok(), answers);
            }
        });
        let log = fs::read_to_string(log.path()).expect("it is there");
        let lines: Vec<_> = log.lines().collect();
        let collector = "the trace collector at http://collector:4317";
        let expected = [("WARN", "does not answer"), ("INFO", "answers again"), ("WARN", "does not answer")];
        assert_eq!(lines.len(), expected.len(), "{log}");
        for (line, (level, what)) in lines.iter().zip(expected) {
            assert!(line.contains(level) && line.contains(&format!("{collector} {what}")), "{line}");
        }
        assert!(lines[0].contains("connection refused"), "{log}");
        assert_eq!((counts.exported.get(), counts.lost.get()), (10, 11));
    }
}
