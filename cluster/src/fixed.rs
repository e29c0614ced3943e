//! Discovery by a fixed list of addresses. The record of each is requested periodically.
//!
//! If an address does not answer, its worker stays known. One that answers
//! with a new incarnation replaces it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use baton_proto::worker::{InfoRequest, worker_client::WorkerClient};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::{
    Dialer, DiscoveryError, Membership, WorkerId, WorkerRecord,
    backoff::Backoff,
    config::WORKERS,
    members::{Members, Publisher},
};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// The interval in which a restarted worker is noticed.
const ASK_AGAIN: Duration = Duration::from_secs(1);

type Shared = Arc<Mutex<(Members, Publisher)>>;

pub(crate) fn watch(
    workers: &[String],
    dialer: &Dialer,
    stop: CancellationToken,
) -> Result<(Membership, JoinHandle<()>), DiscoveryError> {
    if workers.is_empty() {
        let message =
            format!("{WORKERS} is empty; static discovery needs at least one worker, http://host:port");
        return Err(DiscoveryError::Config(message));
    }
    let publisher = Publisher::new();
    let membership = publisher.subscribe();
    let shared: Shared = Arc::new(Mutex::new((Members::default(), publisher)));
    let mut pollers = JoinSet::new();
    for address in workers {
        let endpoint = dialer
            .endpoint(address)
            .map_err(|error| DiscoveryError::Config(format!("{WORKERS}: {error}")))?
            .connect_timeout(ANSWER_TIMEOUT)
            .timeout(ANSWER_TIMEOUT);
        pollers.spawn(poll(dialer.dial(endpoint).channel, address.clone(), shared.clone()));
    }
    let task = tokio::spawn(async move {
        stop.cancelled().await;
        pollers.shutdown().await;
    });
    Ok((membership, task))
}

/// Polls one address until discovery ends.
async fn poll(channel: Channel, address: String, shared: Shared) {
    let mut backoff = Backoff::new(ASK_AGAIN);
    let mut current: Option<(WorkerId, u64)> = None;
    let mut complained = false;
    loop {
        let wait = match ask(&channel).await {
            Ok(record) => {
                complained = false;
                backoff.reset();
                let (members, publisher) = &mut *shared.lock().unwrap_or_else(PoisonError::into_inner);
                let entered = current.replace((record.id.clone(), record.incarnation));
                // Another worker listens at the address now. The one before may have been found at another address since.
                if let Some((id, incarnation)) = entered.filter(|(id, _)| *id != record.id)
                    && members.get(&id).is_some_and(|known| known.incarnation == incarnation)
                {
                    members.remove(&id);
                }
                members.insert(record);
                publisher.publish(members);
                ASK_AGAIN
            }
            Err(problem) => {
                if !std::mem::replace(&mut complained, true) {
                    tracing::warn!(%address, "worker did not return its record, so it is not updated: {problem}");
                }
                backoff.next()
            }
        };
        sleep(wait).await;
    }
}

async fn ask(channel: &Channel) -> Result<WorkerRecord, String> {
    let mut client = WorkerClient::new(channel.clone());
    let answer = timeout(ANSWER_TIMEOUT, client.info(InfoRequest {}))
        .await
        .map_err(|_| "no answer".to_owned())?
        .map_err(|status| status.message().to_owned())?;
    WorkerRecord::try_from(answer.into_inner()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use baton_proto::worker::{self as proto, worker_server};
    use tokio::net::TcpListener;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Request, Response, Status, transport::Server};

    use super::*;
    use crate::{
        Role,
        testing::{record, until},
    };

    /// A worker that only answers with its record.
    struct Someone(WorkerRecord);

    #[tonic::async_trait]
    impl worker_server::Worker for Someone {
        async fn info(&self, _: Request<InfoRequest>) -> Result<Response<proto::WorkerRecord>, Status> {
            Ok(Response::new((&self.0).into()))
        }

        type WatchLoadStream = tokio_stream::Empty<Result<baton_proto::v1::Load, Status>>;

        async fn watch_load(
            &self,
            _: Request<proto::WatchLoadRequest>,
        ) -> Result<Response<Self::WatchLoadStream>, Status> {
            Err(Status::unimplemented(""))
        }

        type WatchSegmentsStream = tokio_stream::Empty<Result<proto::SegmentChanges, Status>>;

        async fn watch_segments(
            &self,
            _: Request<proto::WatchSegmentsRequest>,
        ) -> Result<Response<Self::WatchSegmentsStream>, Status> {
            Err(Status::unimplemented(""))
        }

        async fn drain(
            &self,
            _: Request<proto::DrainRequest>,
        ) -> Result<Response<proto::DrainResponse>, Status> {
            Err(Status::unimplemented(""))
        }
    }

    async fn serve(listener: TcpListener, record: WorkerRecord, stop: CancellationToken) -> JoinHandle<()> {
        let service = worker_server::WorkerServer::new(Someone(record));
        tokio::spawn(async move {
            Server::builder()
                .add_service(service)
                .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop.cancelled_owned())
                .await
                .expect("the server runs until it is told to stop");
        })
    }

    #[tokio::test]
    async fn a_listed_worker_is_found_when_it_answers_kept_when_it_does_not_and_replaced_when_it_returns() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let (mut members, task) =
            watch(&[format!("http://{address}")], &Dialer::default(), stop.clone()).unwrap();
        assert!(members.borrow().is_empty());

        let down = CancellationToken::new();
        let server = serve(listener, record("d0", Role::Decode), down.clone()).await;
        until(&mut members, |members| members.get(&"d0".into()).is_some()).await;
        down.cancel();
        server.await.unwrap();
        assert_eq!(members.borrow().len(), 1);

        let listener = TcpListener::bind(address).await.unwrap();
        let down = CancellationToken::new();
        let restarted = WorkerRecord { incarnation: 2, ..record("d0", Role::Decode) };
        let server = serve(listener, restarted, down.clone()).await;
        until(&mut members, |members| {
            members.get(&"d0".into()).expect("it stays known meanwhile").incarnation == 2
        })
        .await;
        stop.cancel();
        task.await.unwrap();
        down.cancel();
        server.await.unwrap();
    }

    #[tokio::test]
    async fn workers_that_swap_their_addresses_are_both_kept() {
        let worker = |id, incarnation| WorkerRecord { incarnation, ..record(id, Role::Decode) };
        let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let second = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [first.local_addr().unwrap(), second.local_addr().unwrap()];
        let stop = CancellationToken::new();
        let urls = addresses.map(|address| format!("http://{address}"));
        let (mut members, task) = watch(&urls, &Dialer::default(), stop.clone()).unwrap();
        let down = CancellationToken::new();
        let servers = [
            serve(first, worker("w0", 1), down.clone()).await,
            serve(second, worker("w1", 1), down.clone()).await,
        ];
        until(&mut members, |members| members.len() == 2).await;
        down.cancel();
        for server in servers {
            server.await.unwrap();
        }

        let first = TcpListener::bind(addresses[0]).await.unwrap();
        let second = TcpListener::bind(addresses[1]).await.unwrap();
        let down = CancellationToken::new();
        let first = serve(first, worker("w1", 2), down.clone()).await;
        until(&mut members, |members| {
            members.get(&"w0".into()).is_none()
                && members.get(&"w1".into()).is_some_and(|worker| worker.incarnation == 2)
        })
        .await;
        let second = serve(second, worker("w0", 2), down.clone()).await;
        until(&mut members, |members| {
            assert!(members.get(&"w1".into()).is_some(), "it runs at the first address");
            members.get(&"w0".into()).is_some()
        })
        .await;
        stop.cancel();
        task.await.unwrap();
        down.cancel();
        first.await.unwrap();
        second.await.unwrap();
    }

    #[tokio::test]
    async fn an_empty_list_is_refused() {
        let error = watch(&[], &Dialer::default(), CancellationToken::new()).unwrap_err().to_string();
        assert!(error.contains("at least one worker"), "{error}");
    }
}
