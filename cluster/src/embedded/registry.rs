//! The router's side: a gRPC service that lists every worker that holds a stream open.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_proto::worker::{self as proto, registry_server::Registry};
use baton_tls::Identity;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    Membership, WorkerId, WorkerRecord,
    members::{IdTaken, Members, Publisher},
};

/// Serves `Registry`. Clones share one membership.
#[derive(Clone, Debug)]
pub struct RegistryService {
    shared: Arc<Mutex<Shared>>,
    members: Membership,
    closing: CancellationToken,
    /// Peers without a certificate are rejected.
    wants_identity: bool,
}

#[derive(Debug)]
struct Shared {
    members: Members,
    publisher: Publisher,
    /// The stream that holds each worker's record.
    holders: HashMap<WorkerId, u64>,
    num_streams: u64,
}

/// A worker's entry; dropping it removes the worker unless another stream has taken the entry over.
#[derive(Debug)]
struct Lease {
    service: RegistryService,
    id: WorkerId,
    stream: u64,
}

impl RegistryService {
    /// An empty registry that ends its streams when `closing` is cancelled.
    pub(crate) fn new(closing: CancellationToken, wants_identity: bool) -> RegistryService {
        let publisher = Publisher::new();
        let members = publisher.subscribe();
        let shared =
            Shared { members: Members::default(), publisher, holders: HashMap::new(), num_streams: 0 };
        RegistryService { shared: Arc::new(Mutex::new(shared)), members, closing, wants_identity }
    }

    /// Follows the membership.
    pub fn members(&self) -> Membership {
        self.members.clone()
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_stream(&self) -> u64 {
        let mut shared = self.lock();
        shared.num_streams += 1;
        shared.num_streams
    }

    fn enter(&self, record: WorkerRecord, stream: u64) -> Result<Lease, IdTaken> {
        let mut shared = self.lock();
        let held_by_other = shared.holders.get(&record.id).is_some_and(|holder| *holder != stream);
        if held_by_other
            && let Some(holder) = shared.members.get(&record.id)
            && holder.incarnation != record.incarnation
            && holder.address != record.address
        {
            // The same address: the holder has ended, and its connection is not closed yet. Another address: a
            // second worker has the same name.
            return Err(IdTaken { id: record.id.0, address: holder.address.clone() });
        }
        let id = record.id.clone();
        shared.holders.insert(id.clone(), stream);
        shared.members.insert(record);
        shared.publish();
        Ok(Lease { service: self.clone(), id, stream })
    }
}

impl Shared {
    fn publish(&mut self) {
        self.publisher.publish(&self.members);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut shared = self.service.lock();
        if shared.holders.get(&self.id) == Some(&self.stream) {
            shared.holders.remove(&self.id);
            shared.members.remove(&self.id);
            shared.publish();
        }
    }
}

/// One registration stream. It lives inside the response body, so it ends with the connection.
struct Session {
    inbound: Streaming<proto::WorkerRecord>,
    service: RegistryService,
    stream: u64,
    lease: Option<Lease>,
    over: bool,
}

impl Session {
    /// The answer to the worker's next record; `None` when the stream is over.
    async fn next(&mut self) -> Option<Result<proto::Registered, Status>> {
        if self.over {
            return None;
        }
        let record = tokio::select! {
            biased;
            () = self.service.closing.cancelled() => None,
            // An error here is a connection that broke: the lease ends as if the worker had closed it.
            message = self.inbound.message() => message.ok().flatten(),
        }?;
        let answer = self.register(record);
        if !matches!(&answer, Ok(registered) if registered.refused.is_empty()) {
            self.over = true;
            self.lease = None;
        }
        Some(answer)
    }

    fn register(&mut self, record: proto::WorkerRecord) -> Result<proto::Registered, Status> {
        let record =
            WorkerRecord::try_from(record).map_err(|error| Status::invalid_argument(error.to_string()))?;
        if self.lease.as_ref().is_some_and(|lease| lease.id != record.id) {
            return Err(Status::invalid_argument("one stream registers one worker id"));
        }
        let refused = match self.service.enter(record, self.stream) {
            Ok(lease) => {
                // An earlier lease of this stream is the same entry: it must not be removed.
                if let Some(mut earlier) = self.lease.replace(lease) {
                    earlier.stream = 0;
                }
                String::new()
            }
            Err(taken) => {
                tracing::warn!("{taken}");
                taken.to_string()
            }
        };
        Ok(proto::Registered { refused })
    }
}

#[tonic::async_trait]
impl Registry for RegistryService {
    type RegisterStream = Pin<Box<dyn Stream<Item = Result<proto::Registered, Status>> + Send>>;

    async fn register(
        &self,
        request: Request<Streaming<proto::WorkerRecord>>,
    ) -> Result<Response<Self::RegisterStream>, Status> {
        if self.wants_identity && request.extensions().get::<Identity>().is_none() {
            let message = "a worker registers over https and shows a certificate of --tls-ca: give it \
                           --tls-cert, --tls-key and --tls-ca";
            return Err(Status::unauthenticated(message));
        }
        let session = Session {
            inbound: request.into_inner(),
            service: self.clone(),
            stream: self.open_stream(),
            lease: None,
            over: false,
        };
        let answers = futures_util::stream::unfold(session, |mut session| async move {
            let answer = session.next().await?;
            Some((answer, session))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}
