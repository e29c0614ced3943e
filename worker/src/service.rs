//! `baton.worker.v1.Worker`: information, load and drain, for every worker.

use std::{pin::Pin, sync::Arc, time::Duration};

use baton_engine::EngineLoad;
use baton_proto::{v1, worker as proto};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::{lifecycle::Phase, worker::Worker};

/// Shortest time between two load reports.
const REPORT_AT_MOST_EVERY: Duration = Duration::from_millis(50);
/// Longest time between two load reports.
const REPORT_AT_LEAST_EVERY: Duration = Duration::from_secs(1);

/// Serves `Worker`.
#[derive(Clone, Debug)]
pub(crate) struct WorkerService {
    pub(crate) worker: Arc<Worker>,
}

/// Makes a report when one is due.
struct Reports {
    worker: Arc<Worker>,
    load: watch::Receiver<EngineLoad>,
    phase: watch::Receiver<Phase>,
    last: Option<Instant>,
}

impl Reports {
    /// `None` when the engine has ended: the server closes and does not wait for this stream.
    async fn next(&mut self) -> Option<v1::Load> {
        if let Some(last) = self.last {
            tokio::select! {
                () = sleep_until(last + REPORT_AT_LEAST_EVERY) => {}
                changed = self.load.changed() => changed.ok()?,
                Ok(()) = self.phase.changed() => {}
            }
            sleep_until(last + REPORT_AT_MOST_EVERY).await;
        }
        self.load.mark_unchanged();
        self.phase.mark_unchanged();
        self.last = Some(Instant::now());
        Some(self.worker.load())
    }
}

#[tonic::async_trait]
impl proto::worker_server::Worker for WorkerService {
    async fn info(&self, _: Request<proto::InfoRequest>) -> Result<Response<proto::WorkerRecord>, Status> {
        Ok(Response::new(self.worker.record().into()))
    }

    type WatchLoadStream = Pin<Box<dyn Stream<Item = Result<v1::Load, Status>> + Send>>;

    async fn watch_load(
        &self,
        _: Request<proto::WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        let reports = Reports {
            worker: self.worker.clone(),
            load: self.worker.engine().load(),
            phase: self.worker.lifecycle().watch(),
            last: None,
        };
        let reports = futures_util::stream::unfold(reports, |mut reports| async move {
            let report = reports.next().await?;
            Some((Ok(report), reports))
        });
        Ok(Response::new(Box::pin(reports)))
    }

    async fn drain(&self, _: Request<proto::DrainRequest>) -> Result<Response<proto::DrainResponse>, Status> {
        tracing::info!("drain requested by rpc");
        self.worker.lifecycle().drain();
        Ok(Response::new(proto::DrainResponse {}))
    }
}
