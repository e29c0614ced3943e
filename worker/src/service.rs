//! `baton.worker.v1.Worker`: information, load and drain, for every worker.

use std::{pin::Pin, sync::Arc, time::Duration};

use baton_engine::{CacheLogReader, EngineLoad};
use baton_kv_cache::BlockHash;
use baton_kv_store::{SegmentChanges, SegmentReader};
use baton_proto::{v1, worker as proto};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::{lifecycle::Phase, watchers::Watching, worker::Worker};

/// Shortest time between two load reports.
const REPORT_AT_MOST_EVERY: Duration = Duration::from_millis(50);
/// Longest time between two load reports.
const REPORT_AT_LEAST_EVERY: Duration = Duration::from_secs(1);

/// How often it looks for new segments: an object store is listed every few seconds.
const LOOK_AT_SEGMENTS_EVERY: Duration = Duration::from_secs(1);

/// Serves `Worker`.
#[derive(Clone, Debug)]
pub(crate) struct WorkerService {
    pub(crate) worker: Arc<Worker>,
}

/// Makes a report when one is due.
struct Reports {
    worker: Arc<Worker>,
    /// Who reads; 0: it has no name.
    router: u64,
    load: watch::Receiver<EngineLoad>,
    phase: watch::Receiver<Phase>,
    cache: Option<CacheLogReader>,
    last: Option<Instant>,
    /// Counts this reader.
    _watching: Watching,
}

impl Reports {
    /// `None` when the engine has ended: the server closes and does not wait for this stream.
    async fn next(&mut self) -> Option<v1::Load> {
        if let Some(last) = self.last.filter(|_| !self.cache.as_ref().is_some_and(CacheLogReader::has_parts))
        {
            tokio::select! {
                () = sleep_until(last + REPORT_AT_LEAST_EVERY) => {}
                changed = self.load.changed() => changed.ok()?,
                Ok(()) = self.phase.changed() => {}
                () = lacking(&mut self.cache) => {}
            }
            sleep_until(last + REPORT_AT_MOST_EVERY).await;
        }
        self.load.mark_unchanged();
        self.phase.mark_unchanged();
        self.last = Some(Instant::now());
        let cache = match &mut self.cache {
            // A router takes two missing reports for a worker that hangs. What is still read then is in a later one.
            Some(cache) => timeout(REPORT_AT_MOST_EVERY, cache.read()).await.ok().flatten(),
            None => None,
        };
        Some(v1::Load { cache: cache.map(v1::CacheEvents::from), ..self.worker.load(self.router) })
    }
}

/// Completes when the reader lacks something.
async fn lacking(cache: &mut Option<CacheLogReader>) {
    match cache {
        Some(cache) => cache.lacking().await,
        None => std::future::pending().await,
    }
}

fn segment_changes(SegmentChanges { added, removed, is_current }: SegmentChanges) -> proto::SegmentChanges {
    let segment = |(number, hashes): (u32, Vec<BlockHash>)| proto::Segment {
        number,
        blocks: hashes.iter().map(|hash| hash.short()).collect(),
    };
    proto::SegmentChanges { added: added.into_iter().map(segment).collect(), removed, is_current }
}

#[tonic::async_trait]
impl proto::worker_server::Worker for WorkerService {
    async fn info(&self, _: Request<proto::InfoRequest>) -> Result<Response<proto::WorkerRecord>, Status> {
        Ok(Response::new(self.worker.record().into()))
    }

    type WatchLoadStream = Pin<Box<dyn Stream<Item = Result<v1::Load, Status>> + Send>>;

    async fn watch_load(
        &self,
        request: Request<proto::WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        let &proto::WatchLoadRequest { router, cache_events, cache_from } = request.get_ref();
        let log = self.worker.engine().cache_log();
        let reports = Reports {
            worker: self.worker.clone(),
            router,
            load: self.worker.engine().load(),
            phase: self.worker.lifecycle().watch(),
            cache: cache_events.then(|| log.reader(cache_from)),
            last: None,
            _watching: self.worker.watchers.enter(router),
        };
        let reports = futures_util::stream::unfold(reports, |mut reports| async move {
            let report = reports.next().await?;
            Some((Ok(report), reports))
        });
        Ok(Response::new(Box::pin(reports)))
    }

    type WatchSegmentsStream = Pin<Box<dyn Stream<Item = Result<proto::SegmentChanges, Status>> + Send>>;

    async fn watch_segments(
        &self,
        _: Request<proto::WatchSegmentsRequest>,
    ) -> Result<Response<Self::WatchSegmentsStream>, Status> {
        let shared = self.worker.tiers().filter(|tiers| tiers.has_object_store());
        let tiers = shared.ok_or_else(|| Status::failed_precondition("this worker has no object store"))?;
        let watch = (tiers.clone(), SegmentReader::default(), self.worker.lifecycle().watch());
        let changes = futures_util::stream::unfold(watch, |(tiers, mut reader, mut phase)| async move {
            loop {
                if let Some(changes) = tiers.segment_changes(&mut reader) {
                    return Some((Ok(segment_changes(changes)), (tiers, reader, phase)));
                }
                let is_over = phase.wait_for(|phase| *phase == Phase::Draining);
                // Another worker tells it: the server does not wait for this stream.
                if timeout(LOOK_AT_SEGMENTS_EVERY, is_over).await.is_ok() {
                    return None;
                }
            }
        });
        Ok(Response::new(Box::pin(changes)))
    }

    async fn drain(&self, _: Request<proto::DrainRequest>) -> Result<Response<proto::DrainResponse>, Status> {
        tracing::info!("drain requested by rpc");
        self.worker.lifecycle().drain();
        Ok(Response::new(proto::DrainResponse {}))
    }
}
